"""Monarch hosts as processes on this machine.

Hosts outlive this server: they are children of the supervisor, which holds one end of a pipe. If the supervisor is
killed, its hosts read the end of file, then stop themselves and everything they started.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import async_timeout

from meshgate_gateway.child_process import ChildProcess, ExitStatus
from meshgate_gateway.hosts.provider import Host, HostsUnavailable, MeshIncomplete, OnLost, OnRestored
from meshgate_gateway.logs import EventLog
from meshgate_gateway.supervisor.link import SupervisedProcess, SupervisorLink
from meshgate_processes.identity import last_output
from meshgate_processes.marks import end_processes

log = EventLog()

KEPT = "hosts"  # the key of what the supervisor keeps of them
READY_TIMEOUT = 60.0
STOP_TIMEOUT = 4.0  # a host in turn gives its processes two seconds
COOKIE_VARIABLE = "MESHGATE_HOST_COOKIE"  # as meshgate_worker.host sets it


@dataclass(slots=True)
class _LocalHost:
    """``ready`` resolves when the host is ready to attach to, or fails with HostsUnavailable. ``mark`` is in the
    environment of each of its processes."""

    host: Host
    child: ChildProcess
    ready: asyncio.Future[None]
    mark: str
    ended: str | None = None
    last_line: str = ""

    @property
    def loss(self) -> str:
        """Why it has ended, for the sessions that used it."""
        return f"the host (pid {self.child.pid}) {self.ended}{self.last_line}"


class LocalHosts:
    """A HostProvider that starts its hosts on construction, without waiting for them, or takes over those of an earlier
    server."""

    def __init__(self, meshes: Mapping[str, int], environment: Mapping[str, str], supervisor: SupervisorLink) -> None:
        self._environment, self._supervisor = environment, supervisor
        self._meshes: dict[str, list[_LocalHost]] = {mesh: [] for mesh in meshes}
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_lost: OnLost = lambda mesh, host, reason: None
        self._closing = False
        self._adopted = KEPT in supervisor.kept
        if inherited := supervisor.kept.get(KEPT):
            self._directory = Path(inherited.note["directory"])
            for key, process in supervisor.children.items():
                if key.startswith(KEPT):
                    self._adopt(process)
        else:
            self._directory = Path(tempfile.mkdtemp(prefix="h"))
            self._start_all(meshes)

    def _start_all(self, meshes: Mapping[str, int]) -> None:
        lifetime, writer = os.pipe()
        try:
            self._supervisor.keep(KEPT, {"directory": str(self._directory)}, [writer])
            for mesh, count in meshes.items():
                for rank in range(count):
                    self._start(mesh, rank, lifetime)
        finally:
            os.close(writer)
            os.close(lifetime)

    def meshes(self) -> Mapping[str, int]:
        return {mesh: len(hosts) for mesh, hosts in self._meshes.items()}

    async def hosts(self, mesh: str) -> tuple[Host, ...]:
        hosts = self._meshes[mesh]
        await asyncio.wait([host.ready for host in hosts])
        found, lost = [host.host for host in hosts], [host for host in hosts if host.ended is not None]
        if len(lost) == len(hosts):
            raise HostsUnavailable(_unavailable(mesh, lost[0]))
        if lost:
            raise MeshIncomplete(_unavailable(mesh, lost[0]), found, {host.host.name: host.loss for host in lost})
        return tuple(found)

    def present(self, mesh: str) -> Mapping[int, Host]:
        hosts = enumerate(self._meshes[mesh])
        return {rank: host.host for rank, host in hosts if host.ready.done() and host.ended is None}

    def replaces_hosts(self, mesh: str) -> bool:
        return False

    def all_lost(self) -> bool:
        return all(host.ended is not None for hosts in self._meshes.values() for host in hosts)

    async def wait_ready(self) -> None:
        """Returns at once: only ``hosts`` waits for local hosts."""

    def watch(self, on_lost: OnLost, on_restored: OnRestored) -> None:
        self._on_lost = on_lost

    async def close(self) -> None:
        """Stops all hosts concurrently and removes their directory. Idempotent."""
        self._closing = True
        all_hosts = [host for hosts in self._meshes.values() for host in hosts]
        for host in all_hosts:
            host.child.signal(signal.SIGTERM)
        await asyncio.gather(*(host.child.stop(STOP_TIMEOUT) for host in all_hosts))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, mesh: str, rank: int, lifetime: int) -> None:
        name, cookie = f"{mesh}-{rank}", uuid.uuid4().hex
        address = f"ipc://{self._directory / f'{mesh}_{rank}'}"
        described = Host(name=name, address=address, identity=str(uuid.uuid4()))
        ready, ready_there = os.pipe()
        try:
            process = self._supervisor.start(
                f"{KEPT}/{name}",
                {"mesh": mesh, "host": described.model_dump(), "cookie": cookie},
                [
                    *(sys.executable, "-m", "meshgate_worker", "--address", address, "--name", name),
                    *("--identity", described.identity, "--cookie", cookie, "--lifetime-fd", "fd:0"),
                    *("--ready-fd", "fd:1", "--remove-directory", "--notice", "0"),
                ],
                {**self._environment, **self._host_variables(name)},
                descriptors=(lifetime, ready_there),
                kept=(ready,),
            )
        except OSError:
            os.close(ready)
            raise
        finally:
            os.close(ready_there)
        self._follow(process, ready)

    def _adopt(self, process: SupervisedProcess) -> None:
        self._follow(process, process.kept[0])

    def _follow(self, process: SupervisedProcess, ready: int) -> None:
        """Watches a host. ``ready`` is a pipe that the host reports to."""
        mesh, described = process.note["mesh"], Host.model_validate(process.note["host"])
        logger = log.bind(host=described.name)
        child = ChildProcess(process, on_line=lambda line: logger.debug("host output", line=line))
        mark = f"{COOKIE_VARIABLE}={process.note['cookie']}"
        host = _LocalHost(described, child, asyncio.get_running_loop().create_future(), mark)
        self._meshes[mesh].append(host)
        host.ready.add_done_callback(
            lambda future: future.cancelled() or future.exception()
        )  # avoids a warning if it is never awaited
        for work in (self._await_ready(mesh, host, ready), self._watch(mesh, host)):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _host_variables(self, name: str) -> dict[str, str]:
        """Separate directories for the code, image steps and files of each host on this machine."""
        home = self._directory / "homes" / name
        return {
            "MESHGATE_HOME": str(home),
            "MESHGATE_HOST_NAME": name,
            "MESHGATE_IMAGE_DIRECTORY": str(home / "files"),
        }

    async def _await_ready(self, mesh: str, host: _LocalHost, descriptor: int) -> None:
        try:
            async with async_timeout.timeout(READY_TIMEOUT):
                line = await _read_line(descriptor)
        except asyncio.TimeoutError:
            log.warning("host not ready in time; killing it", host=host.host.name, seconds=READY_TIMEOUT)
            host.child.signal(signal.SIGKILL)
            return
        # Without a line, the host has exited, which _watch reports, or an earlier server has read the line.
        if line or (self._adopted and host.child.running):
            log.debug("host ready", host=host.host.name, pid=host.child.pid, address=host.host.address)
            if not host.ready.done():
                host.ready.set_result(None)

    async def _watch(self, mesh: str, host: _LocalHost) -> None:
        status = await host.child.wait()
        await asyncio.to_thread(end_processes, host.mark, session=host.child.pid)
        host.ended, host.last_line = status.reason, _last_line(status)
        if not self._closing:
            tail = last_output(status.output.strip(), 2000)
            log.warning("host ended", host=host.host.name, pid=host.child.pid, reason=status.reason, output=tail)
            self._on_lost(mesh, host.host.name, host.loss)
        if not host.ready.done():
            host.ready.set_exception(HostsUnavailable(_unavailable(mesh, host)))


def _unavailable(mesh: str, host: _LocalHost) -> str:
    return (
        f"mesh {mesh!r} is incomplete: its host {host.host.name} (pid {host.child.pid}) {host.ended}; "
        f"end this job and start it again{host.last_line}"
    )


def _last_line(status: ExitStatus) -> str:
    """The last line of output of a host that exited by itself; "" for one that a signal killed."""
    line = status.output.strip().rpartition("\n")[2]
    return f". Its last output: {line}" if line and status.code >= 0 else ""


async def _read_line(descriptor: int) -> bytes:
    """Reads to the end of file without blocking the event loop. Owns the descriptor."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    data = b""
    try:
        while True:
            await readable.wait()
            readable.clear()
            try:
                more = os.read(descriptor, 4096)
            except BlockingIOError:
                continue
            data += more
            if not more:
                return data
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
