"""Reads in flight of one host, with futures in place of hosts."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from meshgate.errors import GatewayLostError, JobError
from meshgate.ranks.host_streams import READS_IN_FLIGHT, HostStreams, check_ranks
from meshgate.ranks.streams import Event
from meshgate.session.futures import FutureProxy


class Reader:
    def __init__(self) -> None:
        self.read = self
        self.calls: list[FutureProxy[Any]] = []

    def call_one(self) -> FutureProxy[Any]:
        self.calls.append(FutureProxy())
        return self.calls[-1]


def data(text: bytes) -> list[tuple[int, str, bytes, int]]:
    return [(1, "data", text, 0)]


def test_replies_that_overtake_others_are_put_in_order() -> None:
    reader = Reader()
    streams = HostStreams(3, reader, None, queue.SimpleQueue())
    streams.start()
    assert len(reader.calls) == READS_IN_FLIGHT
    found = []
    for index, number in ((1, 1), (0, 0), (2, 2)):
        reader.calls[index].settle(lambda number=number: (number, data(b"%d" % number)))
        host, future = streams.arrivals.get(timeout=30)
        assert host is streams
        found.append(streams.take(future))
    assert found == [[], [Event(1, "data", b"0"), Event(1, "data", b"1")], [Event(1, "data", b"2")]]
    assert len(reader.calls) == READS_IN_FLIGHT + 3


def test_an_error_is_raised_and_followed_by_no_other_read() -> None:
    reader = Reader()
    streams = HostStreams(3, reader, None, queue.SimpleQueue())
    streams.start()
    reader.calls[0].fail(GatewayLostError("gone"))
    with pytest.raises(GatewayLostError):
        streams.take(streams.arrivals.get(timeout=30)[1])
    assert len(reader.calls) == READS_IN_FLIGHT


def test_processes_that_were_stopped_are_an_error_of_meshgates() -> None:
    reader = Reader()
    streams = HostStreams(3, reader, None, queue.SimpleQueue())
    streams.start()
    reader.calls[0].fail(RuntimeError("`ProcMesh` has already been stopped"))
    with pytest.raises(JobError, match="the process that serves rank 3 was stopped: `ProcMesh`"):
        streams.take(streams.arrivals.get(timeout=30)[1])


@pytest.mark.parametrize(("ranks", "chosen"), [(None, [0, 1, 2]), (1, [1]), ([2, 0, 2], [2, 0])])
def test_ranks_are_chosen_once(ranks: Any, chosen: list[int]) -> None:
    assert check_ranks(ranks, 3) == chosen


@pytest.mark.parametrize("ranks", [[], 3, [-1], "1"])
def test_unknown_ranks_are_refused(ranks: Any) -> None:
    with pytest.raises(ValueError, match="the mesh has ranks 0 to 2"):
        check_ranks(ranks, 3)
