"""FakeProcess runs tasks in order, and unpickles as a worker does."""

from __future__ import annotations

import io
import pickle
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from meshgate.errors import ActorError
from meshgate.serialization.pickling import dump_class, dumps_call
from meshgate.shapes.shape import Extent, Point
from meshgate.testing.fake_process import (
    FakeCall,
    FakeMesh,
    FakeProcess,
    Message,
    _ResponsePort,
    pickled_error,
    unpickle,
)
from meshgate_wire.messages import Call, ErrorGroup, Failed, Failure, Item, MeshRef, Values
from tests.client.testing.actors import Counter

POINT = Point(0, Extent(("hosts",), (1,)))


@pytest.fixture
def process() -> Iterator[FakeProcess]:
    process = FakeProcess("test", "workers-0")
    yield process
    process.stop()
    process.join(10)


def test_calls_run_in_order_and_reply_with_pickles(process: FakeProcess) -> None:
    replies: queue.Queue[tuple[bytes, bool]] = queue.Queue()
    process.spawn(3, [dump_class(Counter, False), dumps_call((5,), {}).data], (), POINT, pytest.fail)
    for amount in (1, 2):
        message = Message("add", [dumps_call((amount,), {}).data], (), POINT)
        process.call(3, message, lambda data, is_error: replies.put((data, is_error)))
    assert [replies.get(timeout=10) for _ in range(2)] == [(pickle.dumps(6, 5), False), (pickle.dumps(8, 5), False)]


def test_a_stopped_process_ignores_work(process: FakeProcess) -> None:
    process.spawn(3, [dump_class(Counter, False), dumps_call((5,), {}).data], (), POINT, pytest.fail)
    process.stop()
    process.join(10)
    process.call(3, Message("add", [dumps_call((1,), {}).data], (), POINT), pytest.fail)  # does not raise
    created = threading.Event()
    process.when_created(3, created.set)
    assert created.is_set()
    process.stop()


def test_what_has_not_been_spawned_counts_as_created(process: FakeProcess) -> None:
    created = threading.Event()
    process.when_created(None, created.set)
    assert created.is_set()


def test_references_become_objects_and_unsupported_ones_raise() -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            return 0 if obj == "reference" else None

    file = io.BytesIO()
    Pickler(file, 5).dump(["reference"])
    assert unpickle([file.getvalue()], ["port"]) == ["port"]
    with pytest.raises(NotImplementedError, match="meshes"):
        unpickle([file.getvalue()], [NotImplementedError("no meshes")])


def test_a_class_pickled_by_value_is_the_class_itself() -> None:
    method = Counter.__init__
    Class = unpickle([dump_class(Counter, True)], ())
    assert Class is Counter
    assert Counter.__init__ is method


def test_an_error_is_pickled_without_the_frame_of_the_fake() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        raised = pickle.loads(pickled_error(error))
    assert isinstance(raised, ActorError)
    assert isinstance(raised.exception, ValueError)
    assert "in test_an_error" not in raised.exception_formatted  # the outermost frame


def test_an_error_that_cannot_be_pickled_is_replaced_by_one_with_its_text() -> None:
    error = ValueError("no", threading.Lock())
    raised = pickle.loads(pickled_error(error))
    assert isinstance(raised, ActorError)
    assert isinstance(raised.exception, RuntimeError)
    assert "ValueError: ('no', <unlocked" in str(raised.exception)
    assert "cannot pickle '_thread.lock' object" in str(raised.exception)
    assert "ValueError: ('no'" in raised.exception_formatted


def test_an_error_of_a_port_that_cannot_be_pickled_is_replaced_too() -> None:
    replies: list[tuple[bytes, bool]] = []
    _ResponsePort(lambda data, failed: replies.append((data, failed)), False).exception(ValueError(threading.Lock()))
    ((data, failed),) = replies
    assert failed
    assert "cannot be pickled" in str(pickle.loads(data))


class Sent:
    def __init__(self, adverb: Any = "call") -> None:
        region = Extent(("hosts",), (3,)).region
        self.mesh = FakeMesh(2, "actors", "trainers", region, ["a", "b", "c"])
        header = Call(call=7, target=MeshRef(object=2), endpoint="step", adverb=adverb)
        self.messages: list[tuple[Any, tuple[bytes, ...]]] = []
        ranks = [0] if adverb == "choose" else [0, 1, 2]
        self.pending = FakeCall(header, self.mesh, ranks, lambda answer, *data: self.messages.append((answer, data)))


def test_values_are_sent_in_rank_order_when_all_have_replied() -> None:
    sent = Sent()
    for rank in (2, 0):
        sent.pending.reply(rank, b"%d" % rank, False)
    assert sent.messages == []
    sent.pending.reply(1, b"1", False)
    assert sent.messages == [(Values(call=7), (b"0", b"1", b"2"))]
    assert sent.pending.done


def test_equal_errors_are_one_group() -> None:
    sent = Sent()
    for rank, data in enumerate((b"x", b"y", b"x")):
        sent.pending.reply(rank, data, True)
    ((message, data),) = sent.messages
    assert data == (b"x", b"y")
    assert message.failure.errors == (
        ErrorGroup(ranks=(0, 2), count=2, buffer=0),
        ErrorGroup(ranks=(1,), count=1, buffer=1),
    )
    assert message.failure.hosts == {0: "a", 1: "b", 2: "c"}


def test_choose_names_the_rank() -> None:
    sent = Sent("choose")
    sent.pending.reply(0, b"x", False)
    assert sent.messages == [(Values(call=7, ranks=(0,)), (b"x",))]


def test_a_stream_sends_each_reply() -> None:
    sent = Sent("stream")
    sent.pending.reply(1, b"1", False)
    sent.pending.reply(0, b"0", True)
    assert [type(message) for message, _ in sent.messages] == [Item, Failed]
    assert [message.rank for message, _ in sent.messages] == [1, 0]
    assert not sent.pending.done


def test_a_dead_rank_fails_the_call_once() -> None:
    sent = Sent()
    sent.pending.reply(1, b"1", False)
    sent.mesh.dead[1] = "has replied, so this does not matter"
    sent.pending.fail_if_dead()
    assert sent.messages == []
    sent.mesh.dead[2] = "killed"
    sent.pending.fail_if_dead()
    sent.pending.fail_if_dead()
    sent.pending.reply(0, b"0", False)
    ((message, _),) = sent.messages
    assert (message.failure.kind, message.failure.message, message.failure.ranks) == ("supervision", "killed", (2,))
    assert message.failure.unanswered == 2


@pytest.mark.parametrize(("adverb", "answers"), [("call", 1), ("broadcast", 0)])
def test_a_failed_broadcast_has_no_answer(adverb: str, answers: int) -> None:
    sent = Sent(adverb)
    sent.pending.fail(Failure(kind="invalid", message="no"))
    assert len(sent.messages) == answers
    assert sent.pending.done
