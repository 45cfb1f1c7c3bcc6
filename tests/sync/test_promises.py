"""What is promised in numbers, counted and not timed: from files on a laptop's disk to snapshots on real hosts."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshgate_sync.compress import unsqueeze
from meshgate_sync.distributor import Distributor, Progress
from meshgate_sync.errors import BaseUnknown
from meshgate_sync.plan import CONTROL_FANOUT, GATEWAY, HostSlot
from meshgate_sync.protocol import SyncNeed, SyncOffer, SyncPieces, SyncWants, join_digests, unpack
from meshgate_sync.runner import Address
from meshgate_sync.scan import Scanner
from meshgate_sync.sender import Message, Sender
from meshgate_sync.tree import MAX_PIECE
from tests.sync.hosts import SECRET, HostProcess
from tests.sync.trees import on_disk

ANNOUNCEMENT = 600
"""More than a version of one change takes to be told: operations, digests, and the frames around them."""


@dataclass(frozen=True)
class Moved:
    laptop: int
    gateway: int
    pieces: int  # bytes of pieces alone that left the gateway


class Laptop:
    """Scans ``top``, and talks to a gateway in this process in the messages of the protocol."""

    def __init__(self, top: Path, home: Path) -> None:
        self.top = top
        self.hosts: list[HostProcess] = []
        self._scanner, self._sender = Scanner(top), Sender(top)
        self._distributor = Distributor(str(home / "gateway"), secret=SECRET, owner="driver", laptop=self)
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
        """Until every host has what is on disk now, and holds just that."""
        relay = self._distributor._runner.relay
        assert relay is not None
        before = self._sender.bytes_sent, relay.bytes_sent, relay.piece_bytes_sent
        tree = self._scanner.scan().tree
        self._deliver(self._sender.offer(tree).messages)
        await self._distributor.board.wait(tree.digest, [host.name for host in self.hosts], 60)
        for host in self.hosts:
            assert on_disk(host.snapshot(tree)) == on_disk(self.top)
        now = self._sender.bytes_sent, relay.bytes_sent, relay.piece_bytes_sent
        return Moved(*(after - earlier for earlier, after in zip(before, now, strict=True)))

    def _deliver(self, messages: Iterable[Message]) -> None:
        for header, buffers in messages:
            if isinstance(header, SyncPieces):
                self._distributor.supply(unpack(unsqueeze(buffers[0], header.size)))
                continue
            assert isinstance(header, SyncOffer)
            delta = unsqueeze(buffers[0], header.delta_size) if header.delta_size else None
            pieces = unpack(unsqueeze(buffers[1], header.pack_size)) if header.pack_size else ()
            try:
                self._distributor.publish(bytes.fromhex(header.root), delta, pieces)
            except BaseUnknown:
                self._deliver(self._sender.needed(SyncNeed(root=header.root)))

    # --- distributor.Laptop

    def ask(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        wants = SyncWants(root=root.hex())
        asyncio.get_running_loop().call_soon(lambda: self._deliver(self._sender.wanted(wants, join_digests(digests))))

    def progress(self, progress: Progress) -> None:
        """Nobody looks."""


def run(top: Path, home: Path, count: int, scenario: Callable[[Laptop], Awaitable[None]]) -> None:
    async def main() -> None:
        laptop = Laptop(top, home)
        await laptop.start(count)
        try:
            await scenario(laptop)
        finally:
            await laptop.stop()

    asyncio.run(main())


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


def test_an_unchanged_tree_sends_nothing(top: Path, home: Path) -> None:
    async def scenario(laptop: Laptop) -> None:
        await laptop.sync()
        for number in range(20):
            os.utime(top / "package" / f"module{number}.py")  # a touch is no change
        assert await laptop.sync() == Moved(0, 0, 0)

    run(top, home, 4, scenario)


def test_a_rename_and_a_copy_move_no_content(top: Path, home: Path) -> None:
    async def scenario(laptop: Laptop) -> None:
        await laptop.sync()
        (top / "large.bin").rename(top / "renamed.bin")
        (top / "package").rename(top / "moved")
        (top / "copy.bin").write_bytes((top / "renamed.bin").read_bytes())
        moved = await laptop.sync()
        pieces = 3_000_000 // (16 * 1024)
        # What the tree looks like now is told, 36 bytes a piece; asked for, and sent, is nothing.
        assert moved.laptop <= 22 * ANNOUNCEMENT + 2 * 36 * pieces
        assert moved.pieces == 0

    run(top, home, 4, scenario)


def test_one_byte_of_a_large_file_moves_one_piece(top: Path, home: Path) -> None:
    async def scenario(laptop: Laptop) -> None:
        await laptop.sync()
        with (top / "large.bin").open("r+b") as file:
            file.seek(1_500_000)
            byte = file.read(1)[0]
            file.seek(1_500_000)
            file.write(bytes([byte ^ 1]))
        moved = await laptop.sync()
        assert 0 < moved.laptop <= MAX_PIECE + ANNOUNCEMENT
        assert moved.gateway <= CONTROL_FANOUT * (MAX_PIECE + ANNOUNCEMENT)
        assert moved.pieces <= CONTROL_FANOUT * MAX_PIECE

    run(top, home, 16, scenario)


def test_one_line_of_many_files_moves_one_file(top: Path, home: Path) -> None:
    async def scenario(laptop: Laptop) -> None:
        await laptop.sync()
        with (top / "package" / "module19.py").open("a") as file:
            file.write("changed = 1\n")
        size = (top / "package" / "module19.py").stat().st_size
        moved = await laptop.sync()
        assert moved.laptop <= size + ANNOUNCEMENT
        assert size <= moved.pieces <= CONTROL_FANOUT * size

    run(top, home, 16, scenario)


def test_what_leaves_the_gateway_for_sixteen_hosts_is_at_most_its_fan_out(top: Path, home: Path) -> None:
    size = sum(path.stat().st_size for path in top.rglob("*") if path.is_file())

    async def scenario(laptop: Laptop) -> None:
        moved = await laptop.sync()
        assert moved.laptop <= size + 36 * (3_000_000 // (16 * 1024)) + 21 * ANNOUNCEMENT
        assert moved.pieces <= CONTROL_FANOUT * size

    run(top, home, 16, scenario)
