"""The sync beside rsync: seconds from a change on disk to the last host's acknowledgement, and the bytes that moved.

    python -m benchmarks.sync_tree [--hosts 1 8 32] [--rounds 3] [--directory DIR]

Hosts are processes of this machine with a store each; laptop and gateway are this process, and talk to each other in
the messages of the protocol, compressed and packed as they would be on a websocket. rsync brings the same change to
each host's directory in parallel, with its delta algorithm on (``--no-whole-file``) and times compared to the
nanosecond. Neither crosses a network. The result goes to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import meshgate_sync
from meshgate_sync.compress import unsqueeze
from meshgate_sync.distributor import Distributor, Progress
from meshgate_sync.errors import BaseUnknown
from meshgate_sync.plan import GATEWAY, HostSlot, Routes
from meshgate_sync.protocol import SyncNeed, SyncOffer, SyncPieces, SyncWants, join_digests, unpack
from meshgate_sync.runner import Address
from meshgate_sync.scan import Scanner
from meshgate_sync.sender import Message, Sender

_SECRET = b"benchmark"
_SOURCES = str(Path(meshgate_sync.__file__).parent.parent)
_TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds. ``laptop`` and ``gateway``: bytes that left them."""

    case: str
    hosts: int
    seconds: float
    rsync_seconds: float
    laptop: float
    gateway: float
    rsync_bytes: float
    rounds: int


# --- ours ---------------------------------------------------------------------------------------------------


class Host:
    def __init__(self, name: str, home: Path, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.home = home
        self.process = process

    @classmethod
    async def start(cls, name: str, home: Path) -> tuple[Host, Address]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "meshgate_sync.serve", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": _SOURCES},
        )  # fmt: skip
        host = cls(name, home, process)
        answer = await host.ask({"name": name, "secret": _SECRET.hex(), "owner": "bench", "home": str(home)})
        return host, (answer["address"][0], answer["address"][1])

    async def configure(self, routes: Routes, addresses: Mapping[str, Address]) -> None:
        await self.ask({"routes": asdict(routes), "addresses": dict(addresses)})

    async def ask(self, message: Mapping[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        return json.loads(await self.process.stdout.readline())

    async def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()


class Side:
    """Laptop and gateway; hosts below."""

    def __init__(self, tree: Path, home: Path) -> None:
        self.scanner = Scanner(tree)
        self.sender = Sender(tree)
        self._home = home
        self._distributor = Distributor(str(home / "gateway"), secret=_SECRET, owner="bench", laptop=self)
        self._hosts: list[Host] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, count: int) -> None:
        gateway = await self._distributor.start()
        started = await asyncio.gather(
            *(Host.start(f"h{number}", self._home / f"h{number}") for number in range(count))
        )
        self._hosts = [host for host, _ in started]
        addresses = {GATEWAY: gateway, **{host.name: address for host, address in started}}
        routes = self._distributor.add_hosts([HostSlot(host.name) for host in self._hosts])
        await asyncio.gather(*(host.configure(routes[host.name], addresses) for host in self._hosts))

    async def stop(self) -> None:
        await asyncio.gather(*(host.stop() for host in self._hosts))
        await self._distributor.close()

    async def sync(self, changed: Sequence[Path] | None = None) -> tuple[float, int, int]:
        """Seconds from here to the last acknowledgement, bytes that left the laptop, bytes that left the gateway.
        ``changed``: what a watcher has reported."""
        relay = self._distributor._runner.relay
        assert relay is not None
        left_laptop, left_gateway = self.sender.bytes_sent, relay.bytes_sent
        started = time.perf_counter()
        scan = self.scanner.scan(changed)
        for message in self.sender.offer(scan.tree).messages:
            self._to_gateway(message)
        await self._distributor.board.wait(scan.tree.digest, [host.name for host in self._hosts], _TIMEOUT)
        seconds = time.perf_counter() - started
        return seconds, self.sender.bytes_sent - left_laptop, relay.bytes_sent - left_gateway

    def _to_gateway(self, message: Message) -> None:
        header, buffers = message
        if isinstance(header, SyncPieces):
            self._distributor.supply(unpack(unsqueeze(buffers[0], header.size)))
        elif isinstance(header, SyncOffer):
            delta = unsqueeze(buffers[0], header.delta_size) if buffers else None
            pieces = unpack(unsqueeze(buffers[1], header.pack_size)) if header.pack_size else ()
            try:
                self._distributor.publish(bytes.fromhex(header.root), delta, pieces)
            except BaseUnknown:
                for answer in self.sender.needed(SyncNeed(root=header.root)):
                    self._to_gateway(answer)

    def ask(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        task = asyncio.get_running_loop().create_task(self._supply(SyncWants(root=root.hex()), join_digests(digests)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _supply(self, wants: SyncWants, digests: bytes) -> None:
        messages = self.sender.wanted(wants, digests)
        while message := await asyncio.to_thread(next, messages, None):  # the laptop has a processor of its own
            self._to_gateway(message)

    def progress(self, progress: Progress) -> None:
        """Nothing here shows it."""


# --- rsync --------------------------------------------------------------------------------------------------


def rsync(tree: Path, homes: Sequence[Path]) -> tuple[float, int]:
    """Seconds until all are done, started at once, and the bytes that they moved altogether."""
    command = ["rsync", "-a", "--delete", "--no-whole-file", "--modify-window=-1", "--stats", f"{tree}/"]
    started = time.perf_counter()
    running = [
        subprocess.Popen([*command, str(home)], stdout=subprocess.PIPE, text=True, env={**os.environ, "LC_ALL": "C"})
        for home in homes
    ]
    outputs = [process.communicate()[0] for process in running]
    seconds = time.perf_counter() - started
    moved = sum(
        int(number.replace(",", "")) for out in outputs for number in re.findall(r"Total bytes \w+: ([\d,]+)", out)
    )
    return seconds, moved


# --- the cases ----------------------------------------------------------------------------------------------

_WORDS = [f"word{number}" for number in range(2000)]


def make_sources(tree: Path, rng: random.Random, files: int = 10_000) -> None:
    for number in range(files):
        path = tree / f"package{number // 1000}" / f"part{number // 100}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(" ".join(rng.choices(_WORDS, k=8)) for _ in range(rng.randrange(10, 90))))


def make_cold(tree: Path, rng: random.Random) -> None:
    """200 MB: half in small files of text, half in large ones that do not compress."""
    for number in range(1000):
        (tree / f"d{number // 100}").mkdir(parents=True, exist_ok=True)
        text = " ".join(rng.choices(_WORDS, k=13_000))
        (tree / f"d{number // 100}" / f"m{number}.txt").write_text(text[:100_000])
    for number in range(4):
        (tree / f"large{number}.bin").write_bytes(rng.randbytes(25_000_000))


def make_large(tree: Path, rng: random.Random) -> None:
    tree.mkdir(parents=True, exist_ok=True)
    (tree / "large.bin").write_bytes(rng.randbytes(100_000_000))


def change_nothing(tree: Path, rng: random.Random) -> None:
    """The tree stays as it is."""


def change_line(tree: Path, rng: random.Random) -> None:
    with (tree / "package4" / "part42" / "module4242.py").open("a") as out:
        out.write(f"\nchanged = {rng.random()}")


def save_line(tree: Path, rng: random.Random) -> list[Path]:
    """As ``change_line``, with a watcher that tells what was saved."""
    change_line(tree, rng)
    return [tree / "package4" / "part42" / "module4242.py"]


def change_500(tree: Path, rng: random.Random) -> None:
    for path in rng.sample(sorted(tree.glob("*/*/*.py")), 500):
        path.write_text(path.read_text() + f"\nchanged = {rng.random()}")


def change_byte(tree: Path, rng: random.Random) -> None:
    with (tree / "large.bin").open("r+b") as file:
        file.seek(rng.randrange(100_000_000))
        file.write(rng.randbytes(1))


Change = Callable[[Path, random.Random], Sequence[Path] | None]
CASES: tuple[tuple[Change, tuple[tuple[str, Change], ...]], ...] = (
    (
        make_sources,
        (
            ("10,000 files, unchanged", change_nothing),
            ("10,000 files, one line changed", change_line),
            ("10,000 files, one line, watched", save_line),
            ("10,000 files, 500 changed", change_500),
        ),
    ),
    (make_large, (("100 MB, one byte changed", change_byte),)),
    (make_cold, ()),
)
COLD: dict[Change, str] = {make_sources: "10,000 files, cold", make_large: "100 MB, cold", make_cold: "200 MB, cold"}


async def measure(make: Change, cases: Sequence[tuple[str, Change]], count: int, rounds: int, top: Path) -> list[Row]:
    rng = random.Random(1)
    tree = top / "tree"
    tree.mkdir()
    make(tree, rng)
    copies = [top / f"copy{number}" for number in range(count)]
    for copy in copies:
        copy.mkdir()
    side = Side(tree, top)
    await side.start(count)
    rows = []
    try:
        cold = await side.sync()
        rows.append(_row(COLD[make], count, [cold], [rsync(tree, copies)]))
        for name, change in cases:
            ours, theirs = [], []
            for turn in range(-1, rounds):
                changed = change(tree, rng)
                # Whichever goes first finds the change in the page cache for the other: they take turns.
                steps = [side.sync(changed), None] if turn % 2 else [None, side.sync(changed)]
                for step in steps:
                    mine = await step if step is not None else None
                    other = await asyncio.to_thread(rsync, tree, copies) if step is None else None
                    if turn >= 0 and mine is not None:
                        ours.append(mine)
                    if turn >= 0 and other is not None:
                        theirs.append(other)
            rows.append(_row(name, count, ours, theirs))
    finally:
        await side.stop()
    newest = side.sender.newest
    assert newest is not None
    for number in range(count):
        snapshot = top / f"h{number}" / "snapshots" / newest.digest.hex()
        assert Scanner(snapshot).scan().tree == newest, f"host {number} is not what it should be"
    return rows


def _row(case: str, hosts: int, ours: Sequence[tuple[float, int, int]], theirs: Sequence[tuple[float, int]]) -> Row:
    seconds, laptop, gateway = (statistics.median(column) for column in zip(*ours, strict=True))
    rsync_seconds, rsync_bytes = (statistics.median(column) for column in zip(*theirs, strict=True))
    row = Row(case, hosts, seconds, rsync_seconds, laptop, gateway, rsync_bytes, len(ours))
    print(show(row), flush=True)
    return row


HEAD = (
    f"{'case':<32}{'hosts':>6}{'meshgate':>12}{'rsync':>12}{'times':>8}"
    f"{'laptop MB':>12}{'gateway MB':>12}{'rsync MB':>12}"
)


def show(row: Row) -> str:
    return (
        f"{row.case:<32}{row.hosts:>6}{row.seconds * 1000:>9.1f} ms{row.rsync_seconds * 1000:>9.1f} ms"
        f"{row.rsync_seconds / row.seconds:>8.1f}"
        f"{row.laptop / 1e6:>12.3f}{row.gateway / 1e6:>12.3f}{row.rsync_bytes / 1e6:>12.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where trees and hosts are made; a temporary one by default")
    options = parser.parse_args()
    if shutil.which("rsync") is None:
        sys.exit("rsync is not installed: there is nothing to measure beside (apt-get install rsync)")
    print(HEAD)
    rows: list[Row] = []
    for make, cases in CASES:
        for count in options.hosts:
            with tempfile.TemporaryDirectory(dir=options.directory) as top:
                rows += asyncio.run(measure(make, cases, count, options.rounds, Path(top)))
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    path = results / f"sync-tree-{datetime.now(timezone.utc):%Y-%m-%dT%H%M%S}.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
