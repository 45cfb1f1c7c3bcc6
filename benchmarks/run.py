"""Runs peers in turns (A B C A B C), so that disturbances of the machine affect all of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.peer import PeerFailed, RunningPeer
from benchmarks.peers.ray_client import cluster
from benchmarks.processes import OtherProcesses

T = TypeVar("T")
MAX_ATTEMPTS = 8

MODULES = {
    "direct": "benchmarks.peers.monarch_direct",
    "meshgate": "benchmarks.peers.gateway",
    "tcp": "benchmarks.peers.gateway",
    "attach": "benchmarks.peers.monarch_attach",
    "ray": "benchmarks.peers.ray_client",
    "websocket": "benchmarks.peers.websocket",
    "saving": "benchmarks.peers.saving",
}


@dataclass(slots=True)
class Run:
    """One run of the benchmarks. ``ray_python``: a Python with Ray installed, or None."""

    logs: Path
    rounds: int
    ray_python: str | None
    quiet: float | None = None  # repeat a round in which other processes used more CPU cores
    problems: list[str] = field(default_factory=list)
    others: list[float] = field(default_factory=list)  # CPU cores used by other processes, by round
    ray_address: str | None = None

    @contextmanager
    def ray(self) -> Iterator[None]:
        """Runs a Ray cluster during the block, if Ray is installed."""
        with ExitStack() as stack:
            if self.ray_python is not None:
                try:
                    self.ray_address = stack.enter_context(cluster(self.ray_python, self.logs / "ray-cluster.log"))
                except (OSError, RuntimeError) as error:
                    self.report_problem(f"Ray: {error}")
            yield
        self.ray_address = None

    @contextmanager
    def peers(self, **options: Mapping[str, Any]) -> Iterator[Peers]:
        """Starts peers by name, with the options of each, and ends them after the block."""
        with ExitStack() as stack:
            running: dict[str, RunningPeer] = {}
            for name, arguments in options.items():
                if name == "ray" and self.ray_address is None:
                    continue
                opening = {**arguments, "address": self.ray_address} if name == "ray" else dict(arguments)
                python = self.ray_python if name == "ray" else None
                peer = RunningPeer(MODULES[name], self.logs / f"{name}.log", python=python or sys.executable)
                stack.enter_context(peer)
                try:
                    peer.ask("open", **opening)
                    running[name] = peer
                except PeerFailed as error:
                    self.report_problem(f"{name} could not be started: {error}")
            yield Peers(self, running)

    def measure(self, measure: Callable[[], T]) -> T:
        """Returns ``measure()``. Records the CPU use of other processes, and repeats if it was too high."""
        for _ in range(MAX_ATTEMPTS):
            if self.quiet is not None:
                _wait_quiet(self.quiet)
            others = OtherProcesses()
            value = measure()
            cores = others.cores_used()
            if self.quiet is None or cores <= self.quiet:
                break
        self.others.append(cores)
        return value

    def measure_once(self, measure: Callable[[], T]) -> T:
        """Returns ``measure()``, which cannot be repeated. Records the CPU use of other processes."""
        others = OtherProcesses()
        value = measure()
        self.others.append(others.cores_used())
        return value

    def report_problem(self, what: str) -> None:
        """Reports something that could not be measured; the run continues."""
        self.problems.append(what)
        print(f"!! {what}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Peers:
    """Running peers. A peer that fails is left out of the current case."""

    run: Run
    running: dict[str, RunningPeer]

    def turns(
        self, *names: str, method: str, rounds: int | None = None, warm: bool = True, **arguments: Any
    ) -> dict[str, list[Any]]:
        """The results of ``method(**arguments)``: by peer, one for each round after the warm-up round."""
        return self.turns_of(lambda peer: peer.ask(method, **arguments), names, rounds, warm=warm)

    def turns_of(
        self, ask: Callable[[RunningPeer], Any], names: tuple[str, ...], rounds: int | None, *, warm: bool
    ) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {name: [] for name in names if name in self.running}
        for turn in range(-int(warm), rounds or self.run.rounds):
            for name in list(found):
                try:
                    value = self.run.measure(partial(ask, self.running[name]))
                except PeerFailed as error:
                    self.run.report_problem(str(error))
                    del found[name]
                    continue
                if turn >= 0:
                    found[name].append(value)
        return found


def _wait_quiet(cores: float) -> None:
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        others = OtherProcesses()
        time.sleep(0.2)
        if others.cores_used() <= max(cores, 0.15):
            return


def settle() -> None:
    """Waits for processes that were just ended, before the next measurement."""
    time.sleep(1.0)
