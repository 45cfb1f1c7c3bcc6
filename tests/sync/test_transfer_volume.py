"""How many bytes leave client and gateway: from files on the client's disk to snapshots of host processes."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshgate_sync.distribution.distributor import Distributor, Progress
from meshgate_sync.errors import BaseUnknown
from meshgate_sync.relay.plan import CONTROL_FANOUT, GATEWAY, HostSlot
from meshgate_sync.transport.runner import Address
from meshgate_sync.tree.scan import Scanner
from meshgate_sync.tree.tree import MAX_PIECE
from meshgate_sync.upload import (
    Message,
    Sender,
    SyncNeed,
    SyncOffer,
    SyncPieces,
    SyncWants,
    decompress,
    join_digests,
    unpack,
)
from tests.sync.hosts import SECRET, HostProcess
from tests.sync.trees import on_disk

ANNOUNCEMENT = 600
"""More bytes than the announcement of one change takes: operations, digests, and the frames around them."""


@dataclass(frozen=True)
class Moved:
    client: int
    gateway: int
    pieces: int  # bytes of pieces alone that left the gateway


class Client:
    """Scans ``top`` and exchanges the messages of the protocol with a gateway in this process."""

    def __init__(self, top: Path, home: Path) -> None:
        self.top = top
        self.hosts: list[HostProcess] = []
        self._scanner, self._sender = Scanner(top), Sender(top)
        self._distributor = Distributor(str(home / "gateway"), secret=SECRET, owner="driver", uploader=self)
        self._home = home

    async def start(self, count: int) -> None:
        addresses: dict[str, Address] = {GATEWAY: await self._distributor.start()}
        names = [f"h{number}" for number in range(count)]
        self.hosts = await asyncio.gather(*(HostProcess.start(name, self._home / name) for name in names))
        addresses.update((host.name, host.address) for host in self.hosts)
        routes = self._distributor.add_hosts([HostSlot(name) for name in names])
        await asyncio.gather(*(host.configure(routes[host.name], addresses) for host in self.hosts))

    async def stop(self) -> None:
        await asyncio.gather(*(host.stop() for host in self.hosts))
        await self._distributor.close()

    async def sync(self) -> Moved:
        """Syncs until the snapshot on every host equals what is on disk."""
        relay = self._distributor._runner.relay
        assert relay is not None
        before = self._sender.bytes_sent, relay.bytes_sent, relay.piece_bytes_sent
        tree = self._scanner.scan().tree
        self._deliver(self._sender.offer(tree).messages)
        await self._distributor.tracker.wait(tree.digest, [host.name for host in self.hosts], 60)
        for host in self.hosts:
            assert on_disk(host.snapshot(tree)) == on_disk(self.top)
        now = self._sender.bytes_sent, relay.bytes_sent, relay.piece_bytes_sent
        return Moved(*(after - earlier for earlier, after in zip(before, now, strict=True)))

    def _deliver(self, messages: Iterable[Message]) -> None:
        for header, buffers in messages:
            if isinstance(header, SyncPieces):
                self._distributor.supply(unpack(decompress(buffers[0], header.size)))
                continue
            assert isinstance(header, SyncOffer)
            delta = decompress(buffers[0], header.delta_size) if header.delta_size else None
            pieces = unpack(decompress(buffers[1], header.pack_size)) if header.pack_size else ()
            try:
                self._distributor.publish(bytes.fromhex(header.root), delta, pieces)
            except BaseUnknown:
                self._deliver(self._sender.answer_need(SyncNeed(root=header.root)))

    # --- distributor.Uploader

    def connected(self) -> bool:
        return True

    def request_pieces(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        answers = self._sender.answer_wants(SyncWants(root=root.hex()), join_digests(digests))
        asyncio.get_running_loop().call_soon(lambda: self._deliver(answers))

    def report_progress(self, progress: Progress) -> None:
        """Ignored."""


@asynccontextmanager
async def running(top: Path, home: Path, count: int) -> AsyncIterator[Client]:
    client = Client(top, home)
    await client.start(count)
    try:
        yield client
    finally:
        await client.stop()


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """Twenty modules, and a file of 3 MB that does not compress."""
    rng = random.Random(0)
    top = tmp_path / "tree"
    (top / "package").mkdir(parents=True)
    for number in range(20):
        (top / "package" / f"module{number}.py").write_text(f"number = {number}\n" * (number + 1))
    (top / "large.bin").write_bytes(rng.randbytes(3_000_000))
    return top


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "homes"


async def test_an_unchanged_tree_sends_nothing(top: Path, home: Path) -> None:
    async with running(top, home, 4) as client:
        await client.sync()
        for number in range(20):
            os.utime(top / "package" / f"module{number}.py")  # changes the time alone
        assert await client.sync() == Moved(0, 0, 0)


async def test_a_rename_and_a_copy_move_no_content(top: Path, home: Path) -> None:
    async with running(top, home, 4) as client:
        await client.sync()
        (top / "large.bin").rename(top / "renamed.bin")
        (top / "package").rename(top / "moved")
        (top / "copy.bin").write_bytes((top / "renamed.bin").read_bytes())
        moved = await client.sync()
        pieces = 3_000_000 // (16 * 1024)
        # The new tree is described, with 36 bytes for each piece; no piece is requested or sent.
        assert moved.client <= 22 * ANNOUNCEMENT + 2 * 36 * pieces
        assert moved.pieces == 0


async def test_one_changed_byte_of_a_large_file_moves_one_piece(top: Path, home: Path) -> None:
    async with running(top, home, 16) as client:
        await client.sync()
        with (top / "large.bin").open("r+b") as file:
            file.seek(1_500_000)
            byte = file.read(1)[0]
            file.seek(1_500_000)
            file.write(bytes([byte ^ 1]))
        moved = await client.sync()
        assert 0 < moved.client <= MAX_PIECE + ANNOUNCEMENT
        assert moved.gateway <= CONTROL_FANOUT * (MAX_PIECE + ANNOUNCEMENT)
        assert moved.pieces <= CONTROL_FANOUT * MAX_PIECE


async def test_one_changed_line_in_many_files_moves_one_file(top: Path, home: Path) -> None:
    async with running(top, home, 16) as client:
        await client.sync()
        with (top / "package" / "module19.py").open("a") as file:
            file.write("changed = 1\n")
        size = (top / "package" / "module19.py").stat().st_size
        moved = await client.sync()
        assert moved.client <= size + ANNOUNCEMENT
        assert size <= moved.pieces <= CONTROL_FANOUT * size


async def test_the_gateway_sends_a_version_at_most_fan_out_times(top: Path, home: Path) -> None:
    size = sum(path.stat().st_size for path in top.rglob("*") if path.is_file())  # noqa: ASYNC240
    async with running(top, home, 16) as client:
        moved = await client.sync()
        assert moved.client <= size + 36 * (3_000_000 // (16 * 1024)) + 21 * ANNOUNCEMENT
        assert moved.pieces <= CONTROL_FANOUT * size
