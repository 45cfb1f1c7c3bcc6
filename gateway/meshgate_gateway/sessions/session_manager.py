"""Carries out the decisions of the session table, with engine processes, hosts and timers.

It never reads from a connection: it hands the socket to the session's engine, which completes the handshake. Every
engine exit takes one path, which records the reason for the client and reaps the processes that the engine left on
the hosts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import async_timeout

from meshgate_gateway.child_process import ChildProcess, start_process
from meshgate_gateway.control import (
    MAX_HOSTS_PER_MESSAGE,
    Asked,
    ClientConnected,
    ClientDisconnected,
    ConnectionRefused,
    ControlMessage,
    EndSession,
    EngineCounts,
    HostEnding,
    HostLost,
    HostRestored,
    HostsReply,
    HostsRequest,
    Inspect,
    Inspected,
    JobEnding,
    NewConnection,
    RunEnded,
    SessionEnded,
    SessionNamed,
    SessionState,
)
from meshgate_gateway.hosts.provider import Host, HostProvider, HostsUnavailable, JobEnd, MeshIncomplete
from meshgate_gateway.logs import EventLog
from meshgate_gateway.sessions.engine_processes import EnginePool, EngineProcess
from meshgate_gateway.sessions.session_table import Admission, Gone, Kind, Reject, Sessions, Start, Statistics, Totals
from meshgate_gateway.supervisor.link import SupervisorLink
from meshgate_processes.identity import last_output
from meshgate_wire.handshake import PYTHON_VERSION, SOFTWARE_VERSION
from meshgate_wire.status import EngineStatus, HostStatus, JobStatus, OutputPage, SessionOutput, SessionStatus

log = EventLog()

STOP_TIMEOUT = 7.0  # seconds an engine has to stop its meshes
EXIT_TIMEOUT = 2.0  # seconds from the end of its channel to the exit of its process
END_TIMEOUT = STOP_TIMEOUT + EXIT_TIMEOUT + 3.0  # seconds: an engine that does not stop is killed before
REAP_TIMEOUT = 15.0
DESCRIBE_TIMEOUT = 3.0  # seconds that an engine has to describe its session, or its output
MAX_ENDED_OUTPUT = 2000  # characters of what an engine printed last, in the list of sessions that have ended
PREFIX = "ended session/"
EXITED = "its engine has exited"


@dataclass(frozen=True, slots=True)
class ConnectRequest:
    """An authenticated client's request to connect to a session. ``proof_key``, unless it is empty, proves the engine's
    response to be that of ``gateway``. ``run``: whose secret the client has presented, if that of a run."""

    session: str
    owner: str
    resume: bool
    head: bytes
    gateway: str = ""
    proof_key: str = ""
    run: str = ""


class SessionManager:
    """All sessions of this gateway."""

    def __init__(
        self,
        sessions: Sessions,
        engines: EnginePool,
        hosts: HostProvider,
        *,
        lease: float,
        reap_command: Sequence[str],
        environment: Mapping[str, str],
        ended: EndedSessions,
    ) -> None:
        self._sessions, self._pool, self._hosts, self._ended = sessions, engines, hosts, ended
        self._lease, self._reap_command, self._environment = lease, reap_command, environment
        self._loop = asyncio.get_running_loop()
        self._engines: dict[str, EngineProcess] = {}
        self.inspection = SessionInspection(sessions, self._engines, hosts, lease)
        self.totals = Totals()
        self._handovers: dict[str, list[asyncio.Future[bool]]] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}  # by session
        self._reaping: dict[asyncio.Task[None], frozenset[str]] = {}  # the meshes of each reaper
        self._sending_hosts: dict[asyncio.Task[None], None] = {}  # in order, so that a simulation is repeatable
        self._expiry: asyncio.TimerHandle | None = None
        self._job_end: JobEnd | None = None
        self.changed = asyncio.Event()
        hosts.watch(self.host_lost, self.host_restored)
        for session, gone in ended.restore().items():
            sessions.restore_gone(session, gone)

    @property
    def idle_since(self) -> float | None:
        """Since when, on the loop's clock, there has been no session; None while there is one. ``changed`` is set when
        it changes."""
        return self._sessions.idle_since

    def statistics(self) -> Statistics:
        return self._sessions.statistics()

    def adopt(self, engine: EngineProcess, session: str) -> None:
        """Continues a session of an earlier server with its engine, which may have exited meanwhile."""
        self._sessions.restore(session, engine.owner, engine.meshes, engine.name)
        self._serve_with(engine, session, engine.owner)
        log.info("session adopted", session=session, pid=engine.pid)

    async def connect(self, request: ConnectRequest, connection: socket.socket) -> Gone | Reject | None:
        """Hands the connection to its session's engine. Returns None once the engine has taken it, else why not.

        The caller must keep its copy open until then: if the engine dies first, the client still gets an answer. If
        this is cancelled in between, it returns None too: only the engine may then write to the connection.
        """
        admission = self._admit(request)
        if isinstance(admission, (Gone, Reject)):
            return admission
        if isinstance(admission, Start):
            try:
                self._start(request.session, request.owner)
            except OSError as error:
                self._on_exit(request.session, f"could not be started: {error}", "")
        engine = self._engines.get(request.session)
        if engine is not None:
            new = NewConnection(
                head=request.head.decode("latin-1"),
                gateway=request.gateway,
                proof_key=request.proof_key,
                run=request.run,
            )
            engine.send(new, [connection.fileno()])
            try:
                if await self._handed_over(request.session):
                    self.totals.reconnections += request.resume
                    return None
            except asyncio.CancelledError:
                return None
        again = self._admit(request)
        return again if isinstance(again, (Gone, Reject)) else Reject("the session's engine does not respond")

    def end(self, session: str, owner: str, reason: str) -> Gone | Reject | asyncio.Task[None] | None:
        """Begins to end a session of ``owner``. Returns what ends with its engine, None if the session has ended
        before, and else why it cannot be ended."""
        live = self._sessions.owner_of(session)
        if not live:
            known = session in self._sessions.gone
            return None if known else Gone("unknown", "this gateway does not know the session: it ended long ago")
        if live != owner:
            return Reject("the session belongs to another identity", forbidden=True)
        self._end(session, reason)
        return self._serving[session]

    async def close(self, reason: str) -> None:
        """Rejects new connections and ends every session: in order if it stops in time, otherwise by force."""
        for session in self._sessions.stop_admitting(reason):
            self._end(session, reason)
        await self._wait(self._serving.values(), STOP_TIMEOUT + EXIT_TIMEOUT)
        for engine in self._engines.values():
            engine.kill()
        await self._wait(self._serving.values(), EXIT_TIMEOUT)
        await self._pool.close()
        await self._wait(self._reaping, EXIT_TIMEOUT)
        for task in [*self._serving.values(), *self._reaping, *self._sending_hosts]:
            task.cancel()
        if self._expiry is not None:
            self._expiry.cancel()

    async def _handed_over(self, session: str) -> bool:
        """True once the engine has taken the connection; False if it exits first."""
        handover = self._loop.create_future()
        self._handovers.setdefault(session, []).append(handover)
        return bool(await handover)

    def _settle_handovers(self, session: str, taken: bool) -> None:
        for handover in self._handovers.pop(session, []):
            if not handover.done():
                handover.set_result(taken)

    def host_lost(self, mesh: str, host: str, reason: str, *, removed: bool = False) -> None:
        """Reports a lost host, with the reason, to the sessions that use its mesh. ``removed``: it is no longer a part
        of the mesh."""
        returns = not removed and self._hosts.replaces_hosts(mesh)
        last = not removed and self._hosts.all_lost()
        lost = HostLost(mesh=mesh, host=host, reason=reason, returns=returns, removed=removed, last=last)
        self._tell_users_of(mesh, lost)

    def host_ending(self, mesh: str, host: str, reason: str, seconds: float) -> None:
        """Reports to the sessions that use the mesh of a host that the cluster is going to end it."""
        self._tell_users_of(mesh, HostEnding(host=host, reason=reason, seconds=seconds))

    def host_restored(self, mesh: str, rank: int, host: Host) -> None:
        """Reports the replacement of a lost host to the sessions that use its mesh."""
        self._tell_users_of(mesh, HostRestored(mesh=mesh, rank=rank, host=host))

    def _tell_users_of(self, mesh: str, message: ControlMessage) -> None:
        for session, engine in self._engines.items():
            if mesh in self._sessions.meshes_of(session):
                engine.send(message)

    def run_ended(self, run: str) -> list[asyncio.Task[None]]:
        """All processes of ``run`` have ended: closes the connections that its secret has opened, and ends the sessions
        that it held, unless they are detached. Returns what ends with the engines of these."""
        ending = []
        for session, engine in self._engines.items():
            engine.send(RunEnded(run=run))  # it knows best whether its session is detached
            if engine.run == run and not engine.name:
                self._loop.call_later(STOP_TIMEOUT, self._kill_unless_detached, session, engine, run)
                ending.append(self._serving[session])
        return ending

    def _kill_unless_detached(self, session: str, engine: EngineProcess, run: str) -> None:
        if self._engines.get(session) is engine and engine.run == run and not engine.name:
            self._sessions.ending(
                session, f"the program of the run {run} has ended, and the session's engine did not respond"
            )
            engine.kill()

    def job_ending(self, end: JobEnd | None) -> None:
        """Reports to every session, also those that start later, that the cluster is going to end the job; None: not
        any more."""
        self._job_end = end
        for engine in self._engines.values():
            self._report_job_end(engine)

    def _report_job_end(self, engine: EngineProcess) -> None:
        if (end := self._job_end) is None:
            engine.send(JobEnding())
        else:
            engine.send(JobEnding(reason=end.reason, seconds=max(0.0, end.at - time.time()), notice=end.notice))

    def _admit(self, request: ConnectRequest) -> Admission:
        now = self._loop.time()
        return self._sessions.admit(request.session, request.owner, resume=request.resume, now=now)

    def _start(self, session: str, owner: str) -> None:
        engine = self._pool.acquire()
        self._serve_with(engine, session, owner)
        self.totals.started += 1
        log.info("session started", session=session, pid=engine.pid)

    def _serve_with(self, engine: EngineProcess, session: str, owner: str) -> None:
        self._engines[session] = engine
        engine.assign(session, owner, self._lease)
        if self._job_end is not None:
            self._report_job_end(engine)
        task = asyncio.create_task(self._serve(session, engine))
        self._serving[session] = task
        task.add_done_callback(lambda _: self._serving.pop(session))
        self._on_change()

    async def _serve(self, session: str, engine: EngineProcess) -> None:
        """Handles the engine's messages until it exits, or until one fails, which ends the session; then its exit."""
        try:
            while (message := await engine.receive()) is not None:
                self._on_message(session, engine, message)
                self._on_change()
        except Exception as error:
            reason = f"the gateway could not handle a message of the session's engine: {error!r}"
            self._sessions.ending(session, reason, "died")
            log.exception("session failed", session=session, pid=engine.pid)
        finally:
            engine.close_channel()
        status = await engine.stop(EXIT_TIMEOUT)
        del self._engines[session]
        if engine.adopted and status.code == os.EX_OK:  # the last server may have read what it said before
            self._sessions.ended(session, "the session ended")
        self._on_exit(session, status.reason, status.output, pid=engine.pid)
        engine.forget()
        if meshes := self._sessions.meshes_to_reap():
            self._reap(meshes)

    def _on_message(self, session: str, engine: EngineProcess, message: ControlMessage) -> None:
        if isinstance(message, HostsRequest):
            self._sessions.add_mesh(session, message.mesh)
            engine.add_mesh(message.mesh)
            task = asyncio.create_task(self._send_hosts(engine, message.mesh))
            self._sending_hosts[task] = None
            task.add_done_callback(self._sending_hosts.pop)
        elif isinstance(message, Inspected):
            self.inspection.received(message)
        elif isinstance(message, EngineCounts):
            self.totals.add(message)
        elif isinstance(message, ClientConnected):
            self._sessions.connected(session, self._loop.time())
            engine.set_run(message.run)
            self._settle_handovers(session, taken=True)
            log.info("session connected", session=session)
        elif isinstance(message, ConnectionRefused):
            self._settle_handovers(session, taken=True)
            log.info("connection refused: another client holds the session", session=session)
        elif isinstance(message, ClientDisconnected):
            lease = self._sessions.disconnected(session, self._loop.time(), silence=_silence(message))
            log.info(
                "session disconnected",
                session=session,
                lease=lease,
                silence=round(message.silence, 1),
                detached=message.detached,
            )
        elif isinstance(message, SessionNamed):
            engine.set_name(message.name)
            self._sessions.named(session, message.name)
        elif isinstance(message, SessionState):
            if not message.connected:
                since = self._loop.time() - message.disconnected_for
                self._sessions.disconnected(session, since, silence=_silence(message))
        elif isinstance(message, SessionEnded):
            self._sessions.ended(session, message.reason)

    def _on_exit(self, session: str, reason: str, output: str, **facts: object) -> None:
        gone = self._sessions.exited(session, reason, output, self._loop.time())
        self._settle_handovers(session, taken=False)
        self.inspection.exited(session)
        self.totals.ended[gone.kind] += 1
        log_at_level = log.warning if gone.kind == "died" else log.info
        log_at_level("session ended", session=session, kind=gone.kind, reason=gone.reason, exit=reason, **facts)
        self._ended.update(self._sessions.gone)
        self._on_change()

    async def _send_hosts(self, engine: EngineProcess, mesh: str) -> None:
        # A reaper would also kill processes that start now. Several run if sessions began and ended meanwhile; no other
        # begins before this session ends.
        if reaping := [task for task, meshes in self._reaping.items() if mesh in meshes]:
            await asyncio.wait(reaping)
        try:
            try:
                hosts = await self._hosts.hosts(mesh)
            except MeshIncomplete as incomplete:
                hosts = incomplete.hosts
                for host, reason in incomplete.lost.items():
                    engine.send(HostLost(mesh=mesh, host=host, reason=reason))
            for start in range(0, max(len(hosts), 1), MAX_HOSTS_PER_MESSAGE):
                end = start + MAX_HOSTS_PER_MESSAGE
                engine.send(HostsReply(mesh=mesh, hosts=hosts[start:end], more=end < len(hosts)))
        except HostsUnavailable as error:
            engine.send(HostsReply(mesh=mesh, error=str(error)))
        except Exception as error:
            engine.send(HostsReply(mesh=mesh, error=f"the gateway could not find the hosts of {mesh!r}: {error!r}"))
            log.exception("hosts not found", mesh=mesh)

    def _end(self, session: str, reason: str, kind: Kind = "ended") -> None:
        self._sessions.ending(session, reason, kind)
        engine = self._engines.get(session)
        if engine is not None:
            engine.send(EndSession(reason=reason))
            self._loop.call_later(STOP_TIMEOUT, engine.kill)

    def _on_change(self) -> None:
        """Sets ``changed`` and the timer for the next lease expiry."""
        self.changed.set()
        if self._expiry is not None:
            self._expiry.cancel()
        expiry = self._sessions.next_expiry()
        self._expiry = None if expiry is None else self._loop.call_at(expiry, self._expire)

    def _expire(self) -> None:
        for session, reason in self._sessions.expire(self._loop.time()).items():
            self._end(session, reason, "expired")
        self._ended.update(self._sessions.gone)
        self._on_change()

    def _reap(self, meshes: frozenset[str]) -> None:
        self._sessions.reaped(meshes)
        hosts = [host for mesh in meshes for host in self._hosts.present(mesh).values()]
        if not hosts:
            return
        task = asyncio.create_task(self._run_reaper(sorted(meshes), hosts))
        self._reaping[task] = meshes
        task.add_done_callback(self._reaping.pop)

    async def _run_reaper(self, meshes: Sequence[str], hosts: Sequence[Host]) -> None:
        started = self._loop.time()
        command = [*self._reap_command]
        described = [host.model_dump(include={"name", "address", "identity"}) for host in hosts]
        for start in range(0, len(hosts), MAX_HOSTS_PER_MESSAGE):  # the kernel limits an argument to 128 KiB
            command += ["--hosts", json.dumps(described[start : start + MAX_HOSTS_PER_MESSAGE])]
        try:
            child = ChildProcess(start_process(command, self._environment), on_line=lambda line: None)
        except OSError as error:
            log.warning("reaper not started", meshes=meshes, reason=str(error))
            return
        try:
            status = await child.stop(REAP_TIMEOUT)
        finally:
            child.signal(signal.SIGKILL)
        seconds = round(self._loop.time() - started, 2)
        if status.code == os.EX_OK:
            log.info("orphaned processes reaped", meshes=meshes, seconds=seconds)
        else:
            log.warning(
                "reaping failed; orphaned processes remain until Monarch's own timeout",
                **{"meshes": meshes, "reason": status.reason, "output": status.output, "seconds": seconds},
            )

    @staticmethod
    async def _wait(tasks: Iterable[asyncio.Task[None]], timeout: float) -> None:
        if pending := [*tasks]:
            await asyncio.wait(pending, timeout=timeout)


def _silence(message: ClientDisconnected | SessionState) -> float:
    """How long the client was silent, as far as the lease is concerned."""
    return math.inf if message.detached else message.silence


class EndedSessions:
    """A copy of the table's ended sessions."""

    def __init__(self, supervisor: SupervisorLink) -> None:
        self._supervisor = supervisor
        self._kept = {
            key.removeprefix(PREFIX): Gone(**kept.note)
            for key, kept in supervisor.kept.items()
            if key.startswith(PREFIX)
        }

    def restore(self) -> dict[str, Gone]:
        """What the last server has left."""
        return dict(self._kept)

    def update(self, gone: Mapping[str, Gone]) -> None:
        """To be called when sessions were added or forgotten."""
        for session in self._kept.keys() - gone.keys():
            self._supervisor.drop(PREFIX + session)
        for session in gone.keys() - self._kept.keys():
            self._supervisor.keep(PREFIX + session, dataclasses.asdict(gone[session]))
        self._kept = dict(gone)


class _NoAnswer(Exception):
    """Why an engine has not answered."""


class SessionInspection:
    """Asks the engines what they know about their sessions, for ``GET /v1/status``, ``GET /v1/sessions`` and ``GET
    /v1/output``; it changes none. An engine that does not answer in time is reported as such. ``engines`` are the
    running engines by session.
    """

    def __init__(
        self, sessions: Sessions, engines: Mapping[str, EngineProcess], hosts: HostProvider, lease: float
    ) -> None:
        self._sessions, self._engines, self._hosts, self._lease = sessions, engines, hosts, lease
        self._numbers = itertools.count(secrets.randbits(32))  # an answer to an earlier server must not be taken
        self._waiting: dict[int, tuple[str, list[str], asyncio.Future[str]]] = {}

    async def status(self) -> JobStatus:
        running = [(session, engine.pid) for session, engine in self._engines.items()]
        sessions = await asyncio.gather(*(self._session(session, pid) for session, pid in running))
        meshes = dict(self._hosts.meshes())
        present = tuple(
            HostStatus(mesh=mesh, rank=rank, name=host.name)
            for mesh in meshes
            for rank, host in self._hosts.present(mesh).items()
        )
        return JobStatus(
            gateway_version=SOFTWARE_VERSION,
            python=PYTHON_VERSION,
            meshes=meshes,
            hosts=present,
            sessions=tuple(sessions),
        )

    async def output(self, after: Mapping[str, int]) -> OutputPage:
        """What was printed in each session after the line numbered ``after[session]``."""
        pages = await asyncio.gather(*(self._output(each, after.get(each, 0)) for each in list(self._engines)))
        return OutputPage(sessions=tuple(pages))

    def received(self, message: Inspected) -> None:
        """Takes a part of an answer. A late one is dropped."""
        if message.request in self._waiting:
            _, parts, answer = self._waiting[message.request]
            parts.append(message.body)
            if not message.more and not answer.done():
                answer.set_result("".join(parts))

    def exited(self, session: str) -> None:
        """Its engine has exited, and will not answer."""
        for asked, _, answer in self._waiting.values():
            if asked == session and not answer.done():
                answer.set_exception(_NoAnswer(EXITED))

    async def sessions(self, owner: str) -> list[dict[str, Any]]:
        """The sessions of ``owner``, as JSON. One whose engine does not answer has an ``error``."""
        owned = [session for session in self._sessions.owned_by(owner) if session in self._engines]
        return list(await asyncio.gather(*map(self._listed, owned)))

    def ended(self, owner: str) -> list[dict[str, Any]]:
        """The ended sessions that ``owner`` may look for, as JSON, the oldest first."""
        return [
            {"id": session, "name": gone.name, "kind": gone.kind, "reason": gone.reason, "ago": round(ago, 1)}
            | {"output": last_output(gone.output, MAX_ENDED_OUTPUT)}
            for session, gone, ago in self._sessions.ended_of(owner, asyncio.get_running_loop().time())
        ]

    async def _listed(self, session: str) -> dict[str, Any]:
        try:
            known: dict[str, Any] = json.loads(await self._ask(session, "session"))
        except _NoAnswer as error:
            name = self._sessions.name_of(session)
            known = {"error": str(error), "name": name, "detached": bool(name)}
        return {**known, "id": session, "connected": self._sessions.is_connected(session), "lease": self._lease}

    async def _session(self, session: str, pid: int) -> SessionStatus:
        facts = {
            "session": session,
            "owner": self._sessions.owner_of(session),
            "connected": self._sessions.is_connected(session),
            "pid": pid,
        }
        try:
            known = EngineStatus.model_validate_json(await self._ask(session, "status"))
        except _NoAnswer as error:
            return SessionStatus.model_validate(
                {**facts, "name": self._sessions.name_of(session), "problem": str(error)}
            )
        return SessionStatus.model_validate({**facts, **known.model_dump()})

    async def _output(self, session: str, after: int) -> SessionOutput:
        try:
            found = SessionOutput.model_validate_json(await self._ask(session, "output", after))
        except _NoAnswer as error:
            found = SessionOutput(problem=str(error))
        return found.model_copy(update={"session": session})

    async def _ask(self, session: str, what: Asked, after: int = 0) -> str:
        if (engine := self._engines.get(session)) is None:
            raise _NoAnswer(EXITED)
        number = next(self._numbers)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (session, [], answer)
        try:
            engine.send(Inspect(request=number, what=what, after=after))
            async with async_timeout.timeout(DESCRIBE_TIMEOUT):
                return await answer
        except asyncio.TimeoutError:
            raise _NoAnswer(f"its engine did not answer within {DESCRIBE_TIMEOUT:g} s") from None
        finally:
            del self._waiting[number]
