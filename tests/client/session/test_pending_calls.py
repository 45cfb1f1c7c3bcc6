from __future__ import annotations

import gc
import pickle
import re
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from meshgate.errors import GatewayError, MeshgateError, SupervisionError
from meshgate.session.pending_calls import (
    PendingAck,
    PendingCall,
    PendingCalls,
    PendingStream,
    PendingValue,
    PendingValueMesh,
    describe_progress,
)
from meshgate.shapes.shape import Extent
from meshgate_wire import Fragments
from meshgate_wire.messages import Adopted, CallProgress, Failed, Failure, Item, Values

PAIR = Extent(["hosts"], [2]).region.as_shape()


class PlainReader:
    """Reads plain pickles and counts them."""

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


def test_nothing_is_read_before_the_first_use() -> None:
    reader = PlainReader()
    single, value_mesh = PendingValue(1, "a.f"), PendingValueMesh(1, "a.f", PAIR)
    single.values_received(reader, Values(call=1), [pickled(5)])
    value_mesh.values_received(reader, Values(call=2), [pickled(6), pickled(7)])
    assert reader.read == 0
    assert single.future.get() == 5
    assert value_mesh.future.get().item(hosts=1) == 7
    assert reader.read == 2


def test_a_failure_settles_the_future_with_its_error() -> None:
    single = PendingValue(1, "a.f")
    assert single.failure_received(PlainReader(), Failed(call=1, failure=FAILURE), []) is True
    with pytest.raises(SupervisionError, match=r"a\.f: died"):
        single.future.get()


def test_a_stream_is_complete_with_its_last_item() -> None:
    reader, stream = PlainReader(), PendingStream(1, "a.f", 3)
    assert stream.item_received(reader, Item(call=1, rank=2), [pickled("c")]) is False
    assert stream.failure_received(reader, Failed(call=1, rank=0, failure=FAILURE), []) is False
    assert stream.item_received(reader, Item(call=1, rank=1), [pickled("b")]) is True
    assert stream.futures()[0].get() == "c"
    assert isinstance(stream.futures()[1].exception(), SupervisionError)
    assert stream.futures()[2].get() == "b"


def test_the_failure_of_a_stream_keeps_earlier_values() -> None:
    reader, stream = PlainReader(), PendingStream(1, "a.f", 3)
    stream.item_received(reader, Item(call=1, rank=0), [pickled(1)])
    assert stream.failure_received(reader, Failed(call=1, failure=FAILURE), []) is True
    assert stream.futures()[0].get() == 1
    assert [type(future.exception()) for future in stream.futures()[1:]] == [SupervisionError] * 2


def settled_value(reader: PlainReader) -> PendingValue:
    call = PendingValue(1, "a.f")
    call.values_received(reader, Values(call=1), [pickled(1)])
    return call


def settled_value_mesh(reader: PlainReader) -> PendingValueMesh:
    call = PendingValueMesh(1, "a.f", PAIR)
    call.values_received(reader, Values(call=1), [pickled(1), pickled(2)])
    return call


def settled_stream(reader: PlainReader) -> PendingStream:
    call = PendingStream(1, "a.f", 2)
    call.item_received(reader, Item(call=1, rank=0), [pickled(1)])
    call.failure_received(reader, Failed(call=1, rank=1, failure=FAILURE), [])
    return call


def acknowledged(reader: PlainReader) -> PendingAck:
    call = PendingAck(1, "stop()")
    call.done_received()
    return call


@pytest.mark.parametrize("settled", [settled_value, settled_value_mesh, settled_stream, acknowledged])
def test_a_result_that_is_dropped_unread_is_freed_at_once(settled: Callable[[PlainReader], PendingCall]) -> None:
    gc.disable()  # which would free it much later
    try:
        call = settled(PlainReader())
        futures = [weakref.ref(future) for future in call.futures()]
        del call
        assert [future() for future in futures] == [None] * len(futures)
    finally:
        gc.enable()


def test_an_acknowledgement_has_the_given_value() -> None:
    ack = PendingAck(1, "a.initialized", True)
    ack.done_received()
    assert ack.future.get() is True


def test_a_reply_of_the_wrong_kind_is_rejected() -> None:
    with pytest.raises(NotImplementedError):
        PendingStream(1, "a.f", 1).values_received(PlainReader(), Values(call=1), [])
    with pytest.raises(NotImplementedError):
        PendingValue(1, "a.f").item_received(PlainReader(), Item(call=1, rank=0), [])


def test_every_observer_of_a_failed_call_gets_the_error() -> None:
    single = PendingValue(1, "a.f")
    single.fail(lambda: GatewayError("gone"))
    for _ in range(2):
        with pytest.raises(GatewayError, match="gone"):
            single.future.get()


def test_numbers_are_never_reused() -> None:
    calls = PendingCalls()
    first = calls.add(PendingValue(1, "a.f"))
    calls.pop(first)
    assert calls.get(first) is None
    assert calls.pop(first) is None
    assert len({first, calls.next_number(), calls.add(PendingValue(1, "a.f"))}) == 3


def test_pop_where_removes_the_matching_calls() -> None:
    calls = PendingCalls()
    one, two = PendingValue(1, "a.f"), PendingValue(2, "b.f")
    calls.add(one)
    number = calls.add(two)
    assert calls.pop_where(lambda call: call.target == 1) == [one]
    assert len(calls) == 1
    assert calls.get(number) is two


def progress(answered: int, waiting: dict[int, str], *, total: int = 4, **states: bool) -> CallProgress:
    return CallProgress(call=1, total=total, answered=answered, age=31, waiting=waiting, **states)


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (progress(3, {1: "workers-0"}), "3 of 4 ranks answered; rank 1 on workers-0 has run step for 31 s"),
        (progress(2, {1: "w-0", 3: ""}), "2 of 4 ranks answered; rank 1 on w-0, rank 3 have run step for 31 s"),
        (
            progress(0, dict.fromkeys(range(64), "w"), total=80),
            "0 of 80 ranks answered; rank 0 on w, rank 1 on w, rank 2 on w, rank 3 on w and 76 others have run step "
            "for 31 s",
        ),
        (progress(0, {0: "w", 1: "w"}, total=1), "0 of 1 ranks answered; the chosen rank has run step for 31 s"),
        (
            progress(3, {1: "w"}, first=False),
            "3 of 4 ranks answered; rank 1 on w has other calls before step, and it has waited 31 s",
        ),
        (
            progress(3, {1: "w"}, untried=True),
            "3 of 4 ranks answered; rank 1 on w has run step for 31 s, or the constructor before it",
        ),
        (
            progress(3, {1: "w"}, untried=True, first=False),
            "3 of 4 ranks answered; rank 1 on w has other calls before step, and it has waited 31 s",
        ),
    ],
)
def test_the_progress_of_a_call_names_the_ranks_that_have_not_answered(known: CallProgress, text: str) -> None:
    assert describe_progress(known, "step", known.age) == text


def test_a_call_says_how_long_it_has_waited_since_the_last_report() -> None:
    call = PendingValue(3, "trainers.step")
    unknown = r"trainers\.step was called \d\.\d s ago, and the gateway has not reported on it"
    assert re.fullmatch(unknown, call.waits_for())
    call.progress = progress(3, {1: "workers-0"}), time.monotonic() - 29
    assert call.waits_for() == "3 of 4 ranks answered; rank 1 on workers-0 has run step for 60 s"
    assert repr(call.future) == f"<FutureProxy trainers.step: {call.waits_for()}>"
