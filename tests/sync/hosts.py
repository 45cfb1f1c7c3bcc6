"""Hosts as local processes, each with a store of its own, and a gateway in the test's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import meshgate_sync
from meshgate_sync.distribution.distributor import Distributor, Progress
from meshgate_sync.relay.plan import GATEWAY, HostSlot, Routes
from meshgate_sync.store.home import snapshot_path
from meshgate_sync.transport.runner import Address
from meshgate_sync.tree.delta import diff, encode
from meshgate_sync.tree.tree import EMPTY, Directory
from tests.sync.trees import Content

SECRET = b"a secret of the tests"
_SOURCES = str(Path(meshgate_sync.__file__).parent.parent)

SMALL_DISK = """
mkdir -p "$1" && mount -t tmpfs -o "size=$2" none "$1" && exec "$3" -m meshgate_sync.distribution.agent
"""
"""Runs a host with a private disk of a given size, which disappears with its process."""


class HostProcess:
    """``python -m meshgate_sync.distribution.agent``, or with ``space`` the same on a disk of that size."""

    def __init__(self, name: str, home: Path, process: asyncio.subprocess.Process, address: Address) -> None:
        self.name = name
        self.home = home
        self.address = address
        self._process = process

    @classmethod
    async def start(cls, name: str, home: Path, *, owner: str = "driver", space: int | None = None) -> HostProcess:
        program = [sys.executable, "-m", "meshgate_sync.distribution.agent"]
        if space is not None:
            arguments = (SMALL_DISK, "sh", str(home), str(space), sys.executable)
            program = ["unshare", "--mount", "--map-root-user", "sh", "-c", *arguments]
        process = await asyncio.create_subprocess_exec(
            *program,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": _SOURCES},
        )  # fmt: skip
        host = cls(name, home, process, ("", 0))
        answer = await host._request({"name": name, "secret": SECRET.hex(), "owner": owner, "home": str(home)})
        host.address = (answer["address"][0], answer["address"][1])
        return host

    async def configure(self, routes: Routes, addresses: Mapping[str, Address]) -> None:
        plain = {"control": routes.control, "stripes": routes.stripes}
        await self._request({"routes": plain, "addresses": dict(addresses)})

    async def _request(self, message: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()
        return json.loads(await self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def stop(self) -> None:
        """Ends the process by closing its input, and waits for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        # The pipes of the transport are closed in the next iterations of the loop.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await self._process.stdin.wait_closed()

    def snapshot(self, tree: Directory) -> str:
        return snapshot_path(str(self.home), tree.digest.hex())


class Job:
    """A distributor and its hosts. The client's pieces come from ``content``, unless ``withhold`` is set."""

    def __init__(self, content: Content, distributor: Distributor) -> None:
        self.content = content
        self.distributor = distributor
        self.addresses: dict[str, Address] = {}
        self.hosts: dict[str, HostProcess] = {}
        self.requested = 0
        self.progressed = asyncio.Event()
        self.last: Progress | None = None
        self.withhold = False
        self.client = True
        self.looks = 0
        self._withheld: list[bytes] = []

    async def add(self, hosts: Sequence[HostProcess]) -> None:
        routes = self.distributor.add_hosts([HostSlot(host.name) for host in hosts])
        for host in hosts:
            self.hosts[host.name] = host
            self.addresses[host.name] = host.address
        await asyncio.gather(*(host.configure(routes[host.name], self.addresses) for host in hosts))

    def publish(self, tree: Directory, base: Directory = EMPTY, *, inline: bool = False) -> None:
        pieces = tuple(self.content.pieces.items()) if inline else ()
        self.distributor.publish(tree.digest, encode(diff(base, tree)), pieces)

    async def distribute(self, tree: Directory, base: Directory = EMPTY, *, timeout: float = 60) -> None:
        self.publish(tree, base)
        await self.distributor.wait(tree.digest, self.hosts, timeout)

    # --- distributor.Uploader -----------------------------------------------------------------------------

    def connected(self) -> bool:
        self.looks += 1
        return self.client

    def request_pieces(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        self.requested += len(digests)
        self._withheld += digests
        if not self.withhold:
            self.release()

    def release(self, share: float = 1.0) -> None:
        """Supplies what was requested, or the first part of it."""
        count = round(share * len(self._withheld))
        now, self._withheld = self._withheld[:count], self._withheld[count:]
        asyncio.get_running_loop().call_soon(
            self.distributor.supply, [(digest, self.content.pieces[digest]) for digest in now]
        )

    def report_progress(self, progress: Progress) -> None:
        self.last = progress
        self.progressed.set()


@contextlib.asynccontextmanager
async def job(home: Path, content: Content, *, owner: str = "driver") -> AsyncIterator[Job]:
    made = Job.__new__(Job)
    distributor = Distributor(str(home), secret=SECRET, owner=owner, uploader=made)
    made.__init__(content, distributor)  # type: ignore[misc]
    made.addresses[GATEWAY] = await distributor.start()
    try:
        yield made
    finally:
        for host in made.hosts.values():
            await host.stop()
        await distributor.close()
