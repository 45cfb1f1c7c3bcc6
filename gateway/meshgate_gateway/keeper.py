"""Keeps the sessions: carries out what ``sessions`` decides, with engines, hosts and timers.

It never looks into a connection: that is handed to the session's engine, which completes the handshake. Every
way in which an engine may end leads through one place, which says why, keeps that for the client, and has the
hosts cleared of the processes that the engine left.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from meshgate_gateway.engines import Engine, EngineSupply
from meshgate_gateway.handoff import (
    HOSTS_IN_A_MESSAGE,
    Assign,
    Connected,
    Connection,
    ControlMessage,
    Disconnected,
    End,
    Ended,
    HostBack,
    HostLost,
    HostsReply,
    HostsRequest,
)
from meshgate_gateway.hosts import Host, HostProvider, HostsUnavailable
from meshgate_gateway.processes import Child
from meshgate_gateway.sessions import Admission, Begin, Gone, Kind, Refuse, Sessions, Statistics

__all__ = ["Keeper", "Visit"]

log = structlog.get_logger()

END_GRACE = 7.0  # seconds an engine gets to stop its meshes
EXIT_GRACE = 2.0  # seconds from the end of its channel to the end of its process
REAP_LIMIT = 15.0


@dataclass(frozen=True, slots=True)
class Visit:
    """An authenticated client at the door."""

    session: str
    owner: str
    resume: bool
    head: bytes


class Keeper:
    """All sessions of this gateway."""

    def __init__(
        self,
        sessions: Sessions,
        supply: EngineSupply,
        hosts: HostProvider,
        *,
        lease: float,
        reap_command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self._sessions, self._supply, self._hosts = sessions, supply, hosts
        self._lease, self._reap_command, self._environment = lease, reap_command, environment
        self._loop = asyncio.get_running_loop()
        self._engines: dict[str, Engine] = {}
        self._offered: dict[str, list[asyncio.Future[bool]]] = {}
        self._served: dict[str, asyncio.Task[None]] = {}
        self._reaping: dict[str, asyncio.Task[None]] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.TimerHandle | None = None
        self.changed = asyncio.Event()
        hosts.watch(self.host_lost, self.host_back)

    @property
    def idle_since(self) -> float | None:
        """Since when, on the loop's clock, there is no session; None while there is one. See ``changed``."""
        return self._sessions.idle_since

    def statistics(self) -> Statistics:
        return self._sessions.statistics()

    async def receive(self, visit: Visit, connection: socket.socket) -> Gone | Refuse | None:
        """Hands the connection to its session's engine; None when that has taken it, else why not.

        The caller closes its copy, not before: should the engine die first, the client can still be told why.
        """
        admission = self._admit(visit)
        if isinstance(admission, (Gone, Refuse)):
            return admission
        if isinstance(admission, Begin):
            try:
                self._begin(visit.session)
            except OSError as error:
                self._note_exit(visit.session, f"could not be started: {error}", "")
        engine = self._engines.get(visit.session)
        if engine is not None:
            engine.send(Connection(head=visit.head.decode("latin-1")), [connection.fileno()])
            if await self._taken(visit.session):
                return None
        again = self._admit(visit)
        return again if isinstance(again, (Gone, Refuse)) else Refuse("the session's engine does not answer")

    async def close(self, reason: str) -> None:
        """Lets nobody in, ends every session in order or, after a time, by force, and every engine."""
        for session in self._sessions.refuse(reason):
            self._end(session, reason)
        await self._wait(self._served.values(), END_GRACE + EXIT_GRACE)
        for engine in self._engines.values():
            engine.kill()
        await self._wait(self._served.values(), EXIT_GRACE)
        await self._supply.close()
        await self._wait(self._reaping.values(), EXIT_GRACE)
        for task in [*self._served.values(), *self._reaping.values(), *self._errands]:
            task.cancel()
        if self._expiry is not None:
            self._expiry.cancel()

    async def _taken(self, session: str) -> bool:
        """Whether the engine takes the connection it was sent, or ends before it does."""
        taken = self._loop.create_future()
        self._offered.setdefault(session, []).append(taken)
        return bool(await taken)

    def _settle_offers(self, session: str, taken: bool) -> None:
        for offer in self._offered.pop(session, []):
            if not offer.done():
                offer.set_result(taken)

    def host_lost(self, mesh: str, host: str, reason: str) -> None:
        """A host has ended: its sessions are told why, which they could not find out themselves."""
        for session, engine in self._engines.items():
            if mesh in self._sessions.meshes_of(session):
                engine.send(HostLost(mesh=mesh, host=host, reason=reason, returns=self._hosts.made_anew(mesh)))

    def host_back(self, mesh: str, rank: int, host: Host) -> None:
        """In the place of a host that has ended there is one again: the sessions of its mesh can use it."""
        for session, engine in self._engines.items():
            if mesh in self._sessions.meshes_of(session):
                engine.send(HostBack(mesh=mesh, rank=rank, host=host))

    def _admit(self, visit: Visit) -> Admission:
        now = self._loop.time()
        return self._sessions.admit(visit.session, visit.owner, resume=visit.resume, now=now)

    def _begin(self, session: str) -> None:
        engine = self._supply.take()
        engine.session = session
        self._engines[session] = engine
        engine.send(Assign(session=session, lease=self._lease))
        task = self._served[session] = asyncio.create_task(self._serve(session, engine))
        task.add_done_callback(lambda _: self._served.pop(session, None))
        log.info("session began", session=session, pid=engine.pid)
        self._changed()

    async def _serve(self, session: str, engine: Engine) -> None:
        """Listens to the engine until it is gone, then settles what it leaves."""
        while (message := await engine.receive()) is not None:
            self._note(session, engine, message)
            self._changed()
        exited = await engine.end(EXIT_GRACE)
        del self._engines[session]
        self._note_exit(session, exited.reason, exited.output, pid=engine.pid)
        if meshes := self._sessions.meshes_to_reap():
            self._reap(meshes)

    def _note(self, session: str, engine: Engine, message: ControlMessage) -> None:
        if isinstance(message, HostsRequest):
            self._sessions.uses(session, message.mesh)
            self._run(self._tell_hosts(engine, message.mesh))
        elif isinstance(message, Connected):
            self._sessions.connected(session)
            self._settle_offers(session, taken=True)
            log.info("session connected", session=session)
        elif isinstance(message, Disconnected):
            self._sessions.disconnected(session, self._loop.time())
            log.info("session disconnected", session=session, lease=self._lease)
        elif isinstance(message, Ended):
            self._sessions.said_goodbye(session, message.reason)

    def _note_exit(self, session: str, reason: str, output: str, **facts: object) -> None:
        gone = self._sessions.exited(session, reason, output, self._loop.time())
        self._settle_offers(session, taken=False)
        tell = log.warning if gone.kind == "died" else log.info
        tell("session ended", session=session, kind=gone.kind, reason=gone.reason, exit=reason, **facts)
        self._changed()

    async def _tell_hosts(self, engine: Engine, mesh: str) -> None:
        if reaping := self._reaping.get(mesh):  # what starts there now would be reaped as well
            await asyncio.wait([reaping])
        try:
            hosts = await self._hosts.hosts(mesh)
        except HostsUnavailable as error:
            engine.send(HostsReply(mesh=mesh, error=str(error)))
            return
        for start in range(0, max(len(hosts), 1), HOSTS_IN_A_MESSAGE):
            end = start + HOSTS_IN_A_MESSAGE
            engine.send(HostsReply(mesh=mesh, hosts=hosts[start:end], more=end < len(hosts)))

    def _end(self, session: str, reason: str, kind: Kind = "ended") -> None:
        self._sessions.ending(session, reason, kind)
        engine = self._engines.get(session)
        if engine is not None:
            engine.send(End(reason=reason))
            self._loop.call_later(END_GRACE, engine.kill)

    def _changed(self) -> None:
        """Sets the timer for the next lease to run out, and tells who waits."""
        self.changed.set()
        if self._expiry is not None:
            self._expiry.cancel()
        expiry = self._sessions.next_expiry()
        self._expiry = None if expiry is None else self._loop.call_at(expiry, self._expire)

    def _expire(self) -> None:
        for session in self._sessions.expire(self._loop.time()):
            self._end(session, f"nobody was connected for the lease of {self._lease:g} s", "expired")
        self._changed()

    def _reap(self, meshes: frozenset[str]) -> None:
        self._sessions.reaped(meshes)
        addresses = [host.address for mesh in meshes for host in self._hosts.present(mesh)]
        if not addresses:
            return
        task = asyncio.create_task(self._run_reaper(sorted(meshes), addresses))
        for mesh in meshes:
            self._reaping[mesh] = task
        task.add_done_callback(lambda _: [self._reaping.pop(mesh, None) for mesh in meshes])

    async def _run_reaper(self, meshes: Sequence[str], addresses: Sequence[str]) -> None:
        started = self._loop.time()
        command = [*self._reap_command]
        for start in range(0, len(addresses), HOSTS_IN_A_MESSAGE):  # the kernel takes 128 KiB in one argument
            command += ["--hosts", json.dumps(addresses[start : start + HOSTS_IN_A_MESSAGE])]
        try:
            child = Child(command, environment=self._environment, on_line=lambda line: None)
        except OSError as error:
            log.warning("a dead session's processes were not reaped", meshes=meshes, reason=str(error))
            return
        try:
            exited = await child.end(REAP_LIMIT)
        finally:
            child.signal(signal.SIGKILL)
        seconds = round(self._loop.time() - started, 2)
        if exited.code == os.EX_OK:
            log.info("a dead session's processes are reaped", meshes=meshes, seconds=seconds)
        else:
            log.warning(
                "a dead session's processes may remain until Monarch notices",
                **{"meshes": meshes, "reason": exited.reason, "output": exited.output, "seconds": seconds},
            )

    def _run(self, errand: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    @staticmethod
    async def _wait(tasks: Iterable[asyncio.Task[None]], limit: float) -> None:
        if waited := [*tasks]:
            await asyncio.wait(waited, timeout=limit)
