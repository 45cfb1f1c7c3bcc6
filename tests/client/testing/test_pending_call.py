"""Replies of ranks become one answer."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate.shapes.shape import Extent
from meshgate.testing.pending_call import FakeMesh, PendingCall
from meshgate_wire.messages import Call, ErrorGroup, Failed, Failure, Item, MeshRef, Values


class Sent:
    def __init__(self, adverb: Any = "call") -> None:
        region = Extent(("hosts",), (3,)).region
        self.mesh = FakeMesh(2, "actors", "trainers", region, ["a", "b", "c"])
        header = Call(call=7, target=MeshRef(object=2), endpoint="step", adverb=adverb)
        self.messages: list[tuple[Any, tuple[bytes, ...]]] = []
        ranks = [0] if adverb == "choose" else [0, 1, 2]
        self.pending = PendingCall(header, self.mesh, ranks, lambda answer, *data: self.messages.append((answer, data)))


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
