"""Monarch hosts as processes of this machine: started together, watched, and ended without remains.

Each holds one end of a pipe: were this process killed, its hosts would see the end of file and end themselves
and all they started.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from meshgate_gateway.hosts import Host, HostsUnavailable, OnBack, OnLost
from meshgate_gateway.processes import Child, Exit, kill_session

__all__ = ["LocalHosts"]

log = structlog.get_logger()

READY_TIMEOUT = 60.0
END_GRACE = 4.0  # a host gives what it started two seconds
COOKIE_VARIABLE = "MESHGATE_HOST_COOKIE"  # as meshgate_worker.descendants sets it


@dataclass(slots=True)
class _LocalHost:
    """``ready`` is resolved when the host can be attached to, or fails with HostsUnavailable."""

    host: Host
    child: Child
    ready: asyncio.Future[None]
    mark: str | None = None
    ended: str | None = None
    last_words: str = ""


class LocalHosts:
    """A HostProvider that starts its hosts on construction, all at once, and does not wait for them."""

    def __init__(self, meshes: Mapping[str, int], environment: Mapping[str, str]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="meshgate_"))
        self._lifetime_there, self._lifetime = os.pipe()
        self._environment = environment
        self._meshes: dict[str, list[_LocalHost]] = {mesh: [] for mesh in meshes}
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_lost: OnLost = lambda mesh, host, why: None
        self._closing = False
        for mesh, count in meshes.items():
            for rank in range(count):
                self._meshes[mesh].append(self._start(mesh, rank))

    def meshes(self) -> Mapping[str, int]:
        return {mesh: len(hosts) for mesh, hosts in self._meshes.items()}

    async def hosts(self, mesh: str) -> tuple[Host, ...]:
        for host in self._meshes[mesh]:
            await asyncio.shield(host.ready)
            if host.ended is not None:
                raise HostsUnavailable(_unavailable(mesh, host))
        return tuple(host.host for host in self._meshes[mesh])

    def present(self, mesh: str) -> tuple[Host, ...]:
        return tuple(host.host for host in self._meshes[mesh] if host.mark is not None and host.ended is None)

    def made_anew(self, mesh: str) -> bool:
        return False

    async def came_up(self) -> None:
        """At once: whoever asked for them waits for them."""

    def watch(self, on_lost: OnLost, on_back: OnBack) -> None:
        self._on_lost = on_lost

    async def close(self) -> None:
        """Ends all hosts at once, in seconds, and removes their directory. Idempotent."""
        self._closing = True
        everyone = [host for hosts in self._meshes.values() for host in hosts]
        for host in everyone:
            host.child.signal(signal.SIGTERM)
        await asyncio.gather(*(host.child.end(END_GRACE) for host in everyone))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for end in (self._lifetime, self._lifetime_there):
            if end >= 0:
                os.close(end)
        self._lifetime = self._lifetime_there = -1
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, mesh: str, rank: int) -> _LocalHost:
        name = f"{mesh}-{rank}"
        address = f"ipc://{self._directory / f'{mesh}_{rank}'}"
        logger = log.bind(host=name)
        ready, ready_there = os.pipe()
        lifetime = self._lifetime_there
        try:
            child = Child(
                [
                    *(sys.executable, "-m", "meshgate_worker", "--address", address, "--name", name),
                    *("--lifetime-fd", str(lifetime), "--ready-fd", str(ready_there), "--remove-directory"),
                ],
                environment={**self._environment, **self._own(name)},
                descriptors=(lifetime, ready_there),
                on_line=lambda line: logger.debug("host output", line=line),
            )
        finally:
            os.close(ready_there)
        host = _LocalHost(Host(name=name, address=address), child, asyncio.get_running_loop().create_future())
        host.ready.add_done_callback(lambda future: future.cancelled() or future.exception())  # may be no one's
        for work in (self._await_ready(mesh, host, ready), self._watch(mesh, host)):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return host

    def _own(self, name: str) -> dict[str, str]:
        """What hosts of one machine must not share: where each keeps its code, its image steps and their files."""
        home = self._directory / "homes" / name
        return {
            "MESHGATE_HOME": str(home),
            "MESHGATE_HOST_NAME": name,
            "MESHGATE_IMAGE_DIRECTORY": str(home / "files"),
        }

    async def _await_ready(self, mesh: str, host: _LocalHost, descriptor: int) -> None:
        try:
            line = await asyncio.wait_for(_read_line(descriptor), READY_TIMEOUT)
        except asyncio.TimeoutError:
            log.warning("a host did not come up", host=host.host.name, seconds=READY_TIMEOUT)
            host.child.signal(signal.SIGKILL)
            return
        if line:  # end of file without a line: it has ended, and _watch says why
            host.mark = f"{COOKIE_VARIABLE}={json.loads(line)['cookie']}"
            log.debug("host ready", host=host.host.name, pid=host.child.pid, address=host.host.address)
            if not host.ready.done():
                host.ready.set_result(None)

    async def _watch(self, mesh: str, host: _LocalHost) -> None:
        exited = await host.child.wait()
        kill_session(host.child.pid, host.mark)
        host.ended, host.last_words = exited.reason, _last_words(exited)
        if not self._closing:
            tail = exited.output.strip()[-2000:]
            log.warning("host ended", host=host.host.name, pid=host.child.pid, reason=exited.reason, output=tail)
            self._on_lost(mesh, host.host.name, f"the host (pid {host.child.pid}) {exited.reason}{host.last_words}")
        if not host.ready.done():
            host.ready.set_exception(HostsUnavailable(_unavailable(mesh, host)))


def _unavailable(mesh: str, host: _LocalHost) -> str:
    return (
        f"mesh {mesh!r} is incomplete: its host {host.host.name} (pid {host.child.pid}) {host.ended}; "
        f"end this job and start it again{host.last_words}"
    )


def _last_words(exited: Exit) -> str:
    """Where it ended by itself: a signal says all there is to say."""
    words = exited.output.strip().rpartition("\n")[2]
    return f". Its last words: {words}" if words and exited.code >= 0 else ""


async def _read_line(descriptor: int) -> bytes:
    """Reads to the end of file without blocking the loop. Owns the descriptor."""
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
