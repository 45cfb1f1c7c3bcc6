"""A sync agent on every host of the session: a process that runs a relay of the sync tree and the host's store.

All hosts of a mesh get their agents together, in one proc mesh. A host that restarted or whose agent died gets one of
its own, and so does each host if starting together failed: one host must not keep the others from theirs. If a host
cannot get an agent, requests that need it fail with the reason, and the next such request tries again.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib.util
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshgate_gateway.engine.interfaces import SetUpProcess, StartTask
from meshgate_gateway.engine.monarch.interface import CallSender, EngineActors, Slicer, Spawner, Stopper, error_text
from meshgate_gateway.engine.objects.records import HostMesh
from meshgate_gateway.engine.objects.regions import hosts_region
from meshgate_sync.distribution.distributor import Distributor
from meshgate_sync.errors import HostsBehind
from meshgate_sync.relay.plan import GATEWAY, HostSlot
from meshgate_wire.messages import Host, Region

log = logging.getLogger(__name__)

START_TIMEOUT = 90.0  # seconds that the processes and their agents have to come up
STABLE_AFTER = 10.0  # seconds after which an agent's death does not count as one of a series
MAX_DEATHS = 3  # in a series, above which an agent is not restarted until a request needs it
STOP_TIMEOUT = 5.0
LOOPBACK = "127.0.0.1"
FIRST_NUMBER = -(2**31)  # numbers of the agents' proc meshes; objects of the session never get that low

Address = tuple[str, int]
PACKAGE = "meshgate_sync"
AGENT_MODULES = ("distribution.agent", "relay.plan")
PROCESS_MODULES = ("store.home", "reload")


async def run_until(
    stops: Iterable[asyncio.Future[Any]], work: Coroutine[Any, Any, Any], *, timeout: float | None = None
) -> bool:
    """Runs ``work`` until it is done, one of ``stops`` is, or ``timeout`` seconds pass. Returns whether it is done.

    Raises what ``work`` raises. Unfinished work is cancelled, and has ended when this returns or is cancelled itself.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, *stops), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# Source texts of the ``meshgate_sync`` modules that run on workers, which may have nothing but torchmonarch.
#
# ``worker_sources`` starts from entry points and follows their imports. A test ensures that each of these modules
# imports the standard library only.


@functools.cache
def worker_sources(entry_points: tuple[str, ...]) -> dict[str, str]:
    """The sources of ``entry_points`` and of all that they import, by module name within the package."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    found: dict[str, str] = {}
    pending = list(entry_points)
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = (folder / f"{name.replace('.', '/')}.py").read_text()
            pending += imported_modules(name, found[name])
    return found


def imported_modules(name: str, source: str) -> list[str]:
    """The modules of the package that module ``name`` imports as ``from .module import …``."""
    return [
        ".".join([*name.split(".")[: -node.level], node.module])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.level and node.module
    ]


class AgentSpawner(Slicer, Spawner, EngineActors, CallSender, Stopper, Protocol):
    """What the agents need of Monarch."""


class _StartFailed(Exception):
    """Agents did not come up; the message says why."""


@dataclass(slots=True)
class _Group:
    """Agents that were spawned together; ``names`` are their hosts by rank."""

    procs: Any
    names: tuple[str, ...]
    broken: asyncio.Future[str]  # why not all of them are up
    actors: Any = None

    def break_off(self, reason: str) -> None:
        if not self.broken.done():
            self.broken.set_result(reason)


@dataclass(slots=True)
class _AgentHost:
    """A host, and the agent that it has (in ``group``) or that is starting."""

    name: str
    hosts: HostMesh
    rank: int
    group: int = 0
    started_at: float = 0.0
    deaths: int = 0
    starting: asyncio.Task[None] | None = None
    lost: bool = False
    problem: str = ""  # why it has no agent

    @property
    def host(self) -> Host:
        return self.hosts.hosts[self.rank]


class HostAgents:
    """``gateway`` is the address of the distributor. ``part_of_hosts(hosts, region)`` returns Monarch's mesh of
    a part of them, and ``end_processes(number)`` ends the processes of a proc mesh."""

    def __init__(
        self,
        monarch: AgentSpawner,
        tree: Distributor,
        gateway: Address,
        *,
        part_of_hosts: Callable[[HostMesh, Region | None], Any],
        start_task: StartTask,
        set_up_process: SetUpProcess,
        end_processes: Callable[[int], None],
        secret: bytes,
        owner: str,
    ) -> None:
        self._monarch, self._part_of_hosts, self._start_task = monarch, part_of_hosts, start_task
        self._set_up_process, self._end_processes = set_up_process, end_processes
        self._tree, self._secret, self._owner = tree, secret, owner
        self._loop = asyncio.get_running_loop()
        self._remote = gateway[0] != LOOPBACK
        self._addresses: dict[str, Address] = {GATEWAY: gateway}
        self._hosts: dict[str, _AgentHost] = {}
        self._groups: dict[int, _Group] = {}
        self._number = FIRST_NUMBER
        self._closing = False

    def provide(self, hosts: HostMesh) -> None:
        """Starts agents on those hosts that have none. Call it again when a host's health or address has changed."""
        self._tree.expect_hosts(filter(None, hosts.names))
        for rank, name in enumerate(hosts.names if hosts.hosts[0].name else ()):
            known = self._hosts.setdefault(name, _AgentHost(name, hosts, rank))
            returned = known.lost and name not in hosts.missing
            known.hosts, known.rank, known.lost = hosts, rank, name in hosts.missing
            if known.lost:
                self._unavailable(known, str(hosts.missing[name]))
            elif returned:  # no longer lost for the tree, which waits until it has an agent
                self._tree.restart_host(name)
        self._start_missing([self._hosts[name] for name in hosts.names if name in self._hosts])

    async def wait_ready(self, names: Iterable[str], root: str) -> None:
        """Waits until these hosts have agents. Raises HostsBehind for version ``root`` if some cannot get one."""
        hosts = [self._hosts[name] for name in names if name in self._hosts]
        self._start_missing(hosts)
        while starting := {host.starting for host in hosts if host.starting is not None}:  # an agent may die meanwhile
            await asyncio.wait(starting)
        if missing := {host.name: host.problem for host in hosts if not host.group}:
            raise HostsBehind(root, missing)

    def host_lost(self, name: str, reason: str) -> None:
        """The host ended, and its agent with it."""
        known = self._hosts.get(name)
        if known is not None:
            known.lost = True
            self._unavailable(known, reason)
            for group in self._groups.values():
                if name in group.names or self._cut_short(group):
                    group.break_off(f"{name}: {reason}")

    def _cut_short(self, group: _Group) -> bool:
        """Whether Monarch still waits for a host of the mesh that was lost, whichever of its hosts the group has."""
        return any(host.hosts.cut_short for host in map(self._hosts.get, group.names) if host is not None)

    def host_replaced(self, name: str) -> None:
        """A lost host does not return: nothing waits for it any more."""
        self._hosts.pop(name, None)
        self._tree.remove_host(name, None)

    def process_ended(self, number: int, rank: int) -> bool:
        """The connection of a process closed. Returns whether it was an agent's."""
        group = self._groups.get(number)
        if group is None:
            return False
        name = group.names[rank]
        group.break_off(f"the sync agent on {name} exited")
        known = self._hosts.get(name)
        if known is not None and known.group == number and not self._closing:
            self._agent_died(known)
        return True

    def _agent_died(self, host: _AgentHost) -> None:
        lived = self._loop.time() - host.started_at
        host.deaths = 1 if lived > STABLE_AFTER else host.deaths + 1
        if host.deaths > MAX_DEATHS:
            self._unavailable(host, f"its sync agent exited {host.deaths} times, the last time after {lived:.0f} s")
        else:
            host.group = 0
            self._tree.restart_host(host.name)
            self._start_missing([host])

    def _unavailable(self, host: _AgentHost, reason: str) -> None:
        host.group = 0
        host.problem = reason
        self._tree.remove_host(host.name, reason)

    async def close(self) -> None:
        """Stops the agents. Does not wait for those on lost hosts."""
        self._closing = True
        stops = []
        for group in self._groups.values():
            group.break_off("the session ended")
            if all(name in self._hosts and not self._hosts[name].lost for name in group.names):
                stops.append(asyncio.ensure_future(self._monarch.stop_procs(group.procs, "the session ended")))
        if stops:
            _, late = await asyncio.wait(stops, timeout=STOP_TIMEOUT)
            for stop in late:
                stop.cancel()
            await asyncio.gather(*stops, return_exceptions=True)

    # --- starting agents --------------------------------------------------------------------------------

    def _start_missing(self, hosts: Iterable[_AgentHost]) -> None:
        """Starts agents on those of ``hosts`` that have none and can have one: together if that is a whole mesh."""
        by_mesh: dict[int, list[_AgentHost]] = {}
        for host in hosts:
            if not (host.group or host.starting or host.lost or self._closing):
                by_mesh.setdefault(id(host.hosts), []).append(host)
        for lacking in by_mesh.values():
            whole_mesh = len(lacking) == len(lacking[0].hosts.names)
            for together in [lacking] if whole_mesh else [[host] for host in lacking]:
                task = self._start_task(self._try_start(together))
                for host in together:
                    host.starting = task

    async def _try_start(self, hosts: list[_AgentHost]) -> None:
        try:
            await self._start(hosts)
        except Exception as error:  # noqa: BLE001 - Monarch's exceptions have no common base
            if self._closing:
                return  # the end of the session is no failure of a host
            reason = error_text(error) or type(error).__name__
            log.warning("cannot start the sync agents of hosts %s: %s", [host.name for host in hosts], reason)
            if len(hosts) == 1 and not hosts[0].lost:
                self._unavailable(hosts[0], reason)
            elif len(hosts) > 1:
                await asyncio.gather(*(self._try_start([host]) for host in hosts if not host.lost))
        finally:
            for host in hosts:
                host.starting = None

    async def _start(self, hosts: list[_AgentHost]) -> None:
        """Starts a group of agents. If it raises, none of their processes is left."""
        if missing := hosts[0].hosts.missing_among(host.name for host in hosts):
            raise _StartFailed(missing)
        alone = len(hosts) < len(hosts[0].hosts.names)
        mesh = self._part_of_hosts(hosts[0].hosts, hosts_region(1, hosts[0].rank) if alone else None)
        self._number += 1
        number = self._number
        procs = self._monarch.spawn_procs(mesh, {}, "meshgate_code", self._set_up_process(number))
        group = _Group(procs, tuple(host.name for host in hosts), self._loop.create_future())
        self._groups[number] = group
        try:
            started = await run_until((group.broken,), self._configure(group, hosts), timeout=START_TIMEOUT)
            if group.broken.done():  # perhaps just now: an agent that has no group yet is not restarted when it ends
                raise _StartFailed(group.broken.result())  # noqa: TRY301
            if not started:
                raise _StartFailed(f"the sync agent did not start within {START_TIMEOUT:.0f} s")  # noqa: TRY301
        except BaseException:
            self._end_processes(number)
            raise
        for host in hosts:
            host.group, host.started_at, host.problem = number, self._loop.time(), ""

    async def _configure(self, group: _Group, hosts: Sequence[_AgentHost]) -> None:
        monarch, count = self._monarch, len(hosts)
        actors = group.actors = monarch.spawn_engine_actors(
            group.procs, "sync_agent", "HostAgentActor", worker_sources(AGENT_MODULES)
        )
        await monarch.wait_initialized(group.procs)
        advertised = [_ip_of(host.host.address) if self._remote else "" for host in hosts]
        everywhere = "::" if any(":" in ip for ip in advertised) else "0.0.0.0"
        bind = everywhere if self._remote else LOOPBACK
        names = [host.name for host in hosts]
        listening = await monarch.call_engine_actors(
            actors, count, "start", names, self._secret, self._owner, bind, advertised
        )
        if refused := [reason for reason in listening if isinstance(reason, str)]:
            raise _StartFailed("; ".join(refused))
        moved = [name for name in names if name in self._addresses]
        for name, address in zip(names, listening, strict=True):
            self._addresses[name] = (address[0], address[1])
        slots = [HostSlot(host.name, zone=host.host.zone, node=host.host.node) for host in hosts]
        routes = {name: (route.control, route.stripes) for name, route in self._tree.add_hosts(slots).items()}
        await monarch.call_engine_actors(actors, count, "configure", routes, self._addresses)
        if moved:
            self._announce_moved({name: self._addresses[name] for name in moved})

    def _announce_moved(self, addresses: Mapping[str, Address]) -> None:
        """Tells the other agents the new addresses of these hosts, so that they use them as before."""
        for host in self._hosts.values():
            group = self._groups.get(host.group)
            if group is not None and host.name not in addresses:
                region = hosts_region(1, group.names.index(host.name))
                actor = group.actors if len(group.names) == 1 else self._monarch.slice_actors(group.actors, region)
                payload = self._monarch.engine_payload(dict(addresses))
                self._monarch.cast(actor, "moved", False, payload, None)


def _ip_of(address: str) -> str:
    """The host part of ``tcp://10.0.0.3:26600`` or ``tcp://10.0.0.3:26600@tcp://0.0.0.0:26600``."""
    dialled = address.partition("tcp://")[2].partition("@")[0]
    return dialled.rpartition(":")[0].strip("[]")
