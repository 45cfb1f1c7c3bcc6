"""What has happened in all sessions of this server, ended ones included. Pure.

A further server of the gateway starts from zero, as the counters of Prometheus may.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from meshgate_gateway.control.counts import CALL_BOUNDS, SYNC_BOUNDS, EngineCounts, Outcome, Samples
from meshgate_gateway.sessions.session_table import Kind


@dataclass(slots=True)
class Durations:
    """A histogram. ``buckets`` has one count more than ``bounds``, which are in seconds."""

    bounds: tuple[float, ...]
    buckets: list[int] = field(init=False)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.buckets = [0] * (len(self.bounds) + 1)

    def add(self, samples: Samples) -> None:
        for index, count in enumerate(samples.buckets[: len(self.buckets)]):
            self.buckets[index] += count
        self.seconds += samples.seconds


@dataclass(slots=True)
class Totals:
    """``reconnections`` are further connections of a session; ``ended`` counts sessions by how they ended."""

    started: int = 0
    reconnections: int = 0
    ended: Counter[Kind] = field(default_factory=Counter)
    calls: Counter[Outcome] = field(default_factory=Counter)
    call_times: Durations = field(default_factory=lambda: Durations(CALL_BOUNDS))
    casts: int = 0
    sync_times: Durations = field(default_factory=lambda: Durations(SYNC_BOUNDS))
    bytes_received: int = 0
    bytes_sent: int = 0
    lines: int = 0

    def add(self, counts: EngineCounts) -> None:
        """Adds what an engine has counted since its last message."""
        self.calls.update(counts.calls)
        self.call_times.add(counts.call_times)
        self.casts += counts.casts
        self.sync_times.add(counts.sync_times)
        self.bytes_received += counts.bytes_received
        self.bytes_sent += counts.bytes_sent
        self.lines += counts.lines
