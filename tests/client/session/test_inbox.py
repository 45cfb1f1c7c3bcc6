from __future__ import annotations

from typing import Any

import pytest

from meshgate.errors import GatewayError
from meshgate.session.futures import FutureProxy
from meshgate.session.inbox import Inbox
from meshgate_wire import MessageReceived
from meshgate_wire.messages import PortMessage


@pytest.fixture
def consumed() -> list[MessageReceived]:
    """The messages whose credit was returned."""
    return []


@pytest.fixture
def inbox(consumed: list[MessageReceived]) -> Inbox:
    return Inbox(consumed.append)


def message(number: int) -> MessageReceived:
    return MessageReceived(header=PortMessage(port=1, rank=number), buffers=(), stream=1, nbytes=1, held=1)


def rank(received: MessageReceived) -> Any:
    header = received.header
    assert isinstance(header, PortMessage)
    return header.rank


def take(inbox: Inbox) -> FutureProxy[Any]:
    future: FutureProxy[Any] = FutureProxy()
    inbox.take(future, rank)
    return future


def test_messages_are_taken_in_order(inbox: Inbox) -> None:
    inbox.put(message(1))
    inbox.put(message(2))
    assert [take(inbox).get(0), take(inbox).get(0)] == [1, 2]


def test_waiting_futures_receive_messages_in_order(inbox: Inbox) -> None:
    first, second = take(inbox), take(inbox)
    inbox.put(message(1))
    assert not second.done()
    inbox.put(message(2))
    assert [first.get(0), second.get(0)] == [1, 2]


def test_credit_is_returned_when_a_message_is_taken_and_not_before(
    inbox: Inbox, consumed: list[MessageReceived]
) -> None:
    inbox.put(message(1))
    assert consumed == []
    take(inbox)
    assert len(consumed) == 1


def test_closing_fails_waiting_futures(inbox: Inbox) -> None:
    waiting = take(inbox)
    inbox.close(lambda: GatewayError("closed"))
    assert str(waiting.exception(0)) == str(take(inbox).exception(0)) == "closed"


def test_received_messages_can_be_taken_after_closing(inbox: Inbox) -> None:
    inbox.put(message(1))
    inbox.close(lambda: GatewayError("closed"))
    assert take(inbox).get(0) == 1
    assert isinstance(take(inbox).exception(0), GatewayError)


def test_a_lock_that_another_thread_held_at_the_fork_does_not_block_the_child(inbox: Inbox) -> None:
    waiting = take(inbox)
    inbox._lock.acquire()
    inbox.close_after_fork(GatewayError("forked"))
    assert str(waiting.exception(0)) == str(take(inbox).exception(0)) == "forked"
