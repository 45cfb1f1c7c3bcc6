"""The laptop's side of the streams of one host: reads in flight, and their events in order."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from meshgate.errors import JobError, MeshgateError
from meshgate.ranks import spawn_alone
from meshgate.ranks.on_host import StreamReader, StreamWriter
from meshgate.ranks.streams import Event
from meshgate.session.futures import FutureProxy

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy

READS_IN_FLIGHT = 2


@dataclass(slots=True, eq=False)
class HostStreams:
    """``writer`` is the actor that causes what the reads report."""

    rank: int
    reader: Any
    writer: Any
    arrivals: Arrivals
    _next: int = 0
    _early: dict[int, list[Event]] = field(default_factory=dict)  # replies of later reads may overtake earlier ones

    def start(self) -> None:
        for _ in range(READS_IN_FLIGHT):
            self._read()

    def take(self, future: FutureProxy[Any]) -> list[Event]:
        """The events of a read that has arrived, and of later ones that follow it; none if an earlier one is missing.

        Reads on. Raises the session's or the host's error.
        """
        try:
            number, events = future.get()
        except MeshgateError:
            raise
        except RuntimeError as error:  # Monarch's type if processes were stopped
            raise JobError(f"the process that serves rank {self.rank} was stopped: {error}") from error
        self._early[number] = [Event(*event) for event in events]
        self._read()
        found: list[Event] = []
        while self._next in self._early:
            found += self._early.pop(self._next)
            self._next += 1
        return found

    def _read(self) -> None:
        future = self.reader.read.call_one()
        future.when_settled(lambda: self.arrivals.put((self, future)))


Arrivals: TypeAlias = "queue.SimpleQueue[tuple[HostStreams, FutureProxy[Any]]]"


def check_ranks(ranks: Sequence[int] | int | None, count: int) -> list[int]:
    """The ranks without duplicates. Raises ValueError on an unknown rank and on an empty sequence."""
    if ranks is None:
        ranks = range(count)
    chosen = [ranks] if isinstance(ranks, int) else list(dict.fromkeys(ranks))
    if not chosen or any(not isinstance(rank, int) or rank not in range(count) for rank in chosen):
        raise ValueError(f"ranks={ranks!r}: the mesh has ranks 0 to {count - 1}")
    return chosen


def spawn_streams(
    hosts: HostMeshProxy, ranks: Iterable[int], name: str, stack: contextlib.ExitStack
) -> dict[int, HostStreams]:
    """The streams of the hosts ``ranks``, in processes named ``name`` that end with ``stack``.

    Each host has a proc mesh of its own, so that a lost host does not concern the others.
    """
    arrivals: Arrivals = queue.SimpleQueue()
    found = {}
    for rank in ranks:
        procs = spawn_alone(hosts, rank, name)
        stack.callback(procs.stop)
        found[rank] = HostStreams(rank, procs.spawn(name, StreamReader), procs.spawn(name, StreamWriter), arrivals)
    return found
