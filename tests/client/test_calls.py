from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from meshgate.calls import Acknowledgement, Calls, Gathering, Single, Stream
from meshgate.errors import GatewayError, MeshgateError, SupervisionError
from meshgate.extent import Extent
from meshgate_wire import Fragments
from meshgate_wire.messages import Adopted, Failed, Failure, Item, Values

PAIR = Extent(["hosts"], [2]).region.as_shape()


class PlainReader:
    """Reads plain pickles, and counts."""

    def __init__(self) -> None:
        self.read = 0

    def value(self, buffer: Fragments, objects: Adopted, endpoint: str) -> Any:
        self.read += 1
        return pickle.loads(buffer.join())

    def error(self, failure: Failure, buffers: Sequence[Fragments], endpoint: str) -> MeshgateError:
        return SupervisionError(f"{endpoint}: {failure.message}")


def pickled(value: object) -> Fragments:
    return Fragments((pickle.dumps(value),))


FAILURE = Failure(kind="supervision", message="died")


def test_nothing_is_read_before_somebody_looks() -> None:
    reader = PlainReader()
    single, gathering = Single(1, "a.f"), Gathering(1, "a.f", PAIR)
    single.values(reader, Values(call=1), [pickled(5)])
    gathering.values(reader, Values(call=2), [pickled(6), pickled(7)])
    assert reader.read == 0
    assert single.future.get() == 5
    assert gathering.future.get().item(hosts=1) == 7
    assert reader.read == 2


def test_a_failure_settles_the_future_with_its_error() -> None:
    single = Single(1, "a.f")
    assert single.failed(PlainReader(), Failed(call=1, failure=FAILURE), []) is True
    with pytest.raises(SupervisionError, match=r"a\.f: died"):
        single.future.get()


def test_a_stream_is_over_with_its_last_item() -> None:
    reader, stream = PlainReader(), Stream(1, "a.f", 3)
    assert stream.item(reader, Item(call=1, rank=2), [pickled("c")]) is False
    assert stream.failed(reader, Failed(call=1, rank=0, failure=FAILURE), []) is False
    assert stream.item(reader, Item(call=1, rank=1), [pickled("b")]) is True
    assert stream.futures[0].get() == "c"
    assert isinstance(stream.futures[1].exception(), SupervisionError)
    assert stream.futures[2].get() == "b"


def test_the_failure_of_a_whole_stream_leaves_what_came_before() -> None:
    reader, stream = PlainReader(), Stream(1, "a.f", 3)
    stream.item(reader, Item(call=1, rank=0), [pickled(1)])
    assert stream.failed(reader, Failed(call=1, failure=FAILURE), []) is True
    assert stream.futures[0].get() == 1
    assert [type(future.exception()) for future in stream.futures[1:]] == [SupervisionError] * 2


def test_an_acknowledgement_has_its_own_value() -> None:
    answer = Acknowledgement(1, "a.initialized", True)
    answer.done()
    assert answer.future.get() is True


def test_an_answer_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(NotImplementedError):
        Stream(1, "a.f", 1).values(PlainReader(), Values(call=1), [])
    with pytest.raises(NotImplementedError):
        Single(1, "a.f").item(PlainReader(), Item(call=1, rank=0), [])


def test_each_who_looks_at_a_lost_call_gets_the_error() -> None:
    single = Single(1, "a.f")
    single.fail(lambda: GatewayError("gone"))
    for _ in range(2):
        with pytest.raises(GatewayError, match="gone"):
            single.future.get()


def test_numbers_are_never_reused() -> None:
    calls = Calls()
    first = calls.add(Single(1, "a.f"))
    calls.end(first)
    assert calls.get(first) is None
    assert calls.end(first) is None
    assert len({first, calls.number(), calls.add(Single(1, "a.f"))}) == 3


def test_the_calls_that_are_concerned_are_taken_out() -> None:
    calls = Calls()
    one, two = Single(1, "a.f"), Single(2, "b.f")
    calls.add(one)
    number = calls.add(two)
    assert calls.end_where(lambda answer: answer.target == 1) == [one]
    assert len(calls) == 1
    assert calls.get(number) is two
