"""Runs peers in turns: A B C A B C, so that what disturbs the machine disturbs all of them."""

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
from benchmarks.processes import Others

__all__ = ["Peers", "Run"]

T = TypeVar("T")
PATIENCE = 8

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
    """One run: where logs go, how many rounds, which Python has Ray (None: no Ray here)."""

    logs: Path
    rounds: int
    ray_python: str | None
    quiet: float | None = None  # repeat a round in which other processes took more cores
    troubles: list[str] = field(default_factory=list)
    others: list[float] = field(default_factory=list)  # cores that other processes took, by round
    ray_address: str | None = None

    @contextmanager
    def ray(self) -> Iterator[None]:
        """A Ray cluster for as long as the block lasts; nothing where Ray is not installed."""
        with ExitStack() as stack:
            if self.ray_python is not None:
                try:
                    self.ray_address = stack.enter_context(cluster(self.ray_python, self.logs / "ray-cluster.log"))
                except (OSError, RuntimeError) as error:
                    self.trouble(f"Ray: {error}")
            yield
        self.ray_address = None

    @contextmanager
    def peers(self, **options: Mapping[str, Any]) -> Iterator[Peers]:
        """Peers by name, opened with the options given for each. Ends them with the block."""
        with ExitStack() as stack:
            running: dict[str, RunningPeer] = {}
            for name, arguments in options.items():
                if name == "ray" and self.ray_address is None:
                    continue
                given = {**arguments, "address": self.ray_address} if name == "ray" else dict(arguments)
                python = self.ray_python if name == "ray" else None
                peer = RunningPeer(MODULES[name], self.logs / f"{name}.log", python=python or sys.executable)
                stack.enter_context(peer)
                try:
                    peer.ask("open", **given)
                    running[name] = peer
                except PeerFailed as error:
                    self.trouble(f"{name} did not open: {error}")
            yield Peers(self, running)

    def undisturbed(self, measure: Callable[[], T]) -> T:
        """What ``measure`` gives; notes what other processes took meanwhile, and repeats it where that was too much."""
        for _ in range(PATIENCE):
            if self.quiet is not None:
                _wait_quiet(self.quiet)
            others = Others()
            value = measure()
            taken = others.taken()
            if self.quiet is None or taken <= self.quiet:
                break
        self.others.append(taken)
        return value

    def noted(self, measure: Callable[[], T]) -> T:
        """What ``measure``, which cannot be repeated, gives; notes what other processes took meanwhile."""
        others = Others()
        value = measure()
        self.others.append(others.taken())
        return value

    def trouble(self, what: str) -> None:
        """Something was not measured; the run goes on."""
        self.troubles.append(what)
        print(f"!! {what}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Peers:
    """Open peers. One that fails drops out of the case at hand."""

    run: Run
    running: dict[str, RunningPeer]

    def turns(
        self, *names: str, method: str, rounds: int | None = None, warm: bool = True, **arguments: Any
    ) -> dict[str, list[Any]]:
        """What ``method(**arguments)`` gave, a list of rounds by peer; the first, warming, round is not among them."""
        return self.turns_of(lambda peer: peer.ask(method, **arguments), names, rounds, warm=warm)

    def turns_of(
        self, ask: Callable[[RunningPeer], Any], names: tuple[str, ...], rounds: int | None, *, warm: bool
    ) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {name: [] for name in names if name in self.running}
        for turn in range(-int(warm), rounds or self.run.rounds):
            for name in list(found):
                try:
                    value = self.run.undisturbed(partial(ask, self.running[name]))
                except PeerFailed as error:
                    self.run.trouble(str(error))
                    del found[name]
                    continue
                if turn >= 0:
                    found[name].append(value)
        return found


def _wait_quiet(cores: float) -> None:
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        others = Others()
        time.sleep(0.2)
        if others.taken() <= max(cores, 0.15):
            return


def settle() -> None:
    """Lets what was just ended be gone before the next measurement."""
    time.sleep(1.0)
