from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from meshgate.errors import GatewayError
from meshgate.session.futures import FutureProxy
from meshgate.session.inbox import Inbox, Receive
from meshgate_wire import MessageReceived
from meshgate_wire.messages import PortMessage
from tests.waiting import wait_for


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
    """A future that waits for the next message."""
    future = inbox.recv(rank)
    future.when_settled(lambda: None)
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
    waiting._lock = threading.Lock()  # type: ignore[assignment]
    waiting._lock.acquire()
    inbox.close_after_fork(GatewayError("forked"))
    assert str(waiting.exception(0)) == str(take(inbox).exception(0)) == "forked"


def test_a_receive_takes_its_message_when_it_is_observed(inbox: Inbox) -> None:
    first, second = inbox.recv(rank), inbox.recv(rank)
    inbox.put(message(1))
    inbox.put(message(2))
    assert [second.get(0), first.get(0)] == [1, 2]


def test_receives_that_time_out_take_no_message(inbox: Inbox, consumed: list[MessageReceived]) -> None:
    timed_out = [inbox.recv(rank) for _ in range(20)]
    for future in timed_out:
        assert isinstance(future.exception(0), TimeoutError)
    for number in range(20):
        inbox.put(message(number))
    assert consumed == []
    assert [inbox.recv(rank).get(0) for _ in range(19)] == list(range(19))
    assert timed_out[3].get(0) == 19


def test_a_timeout_gives_up_the_place(inbox: Inbox) -> None:
    first = inbox.recv(rank)
    assert isinstance(first.exception(0), TimeoutError)
    second = take(inbox)
    again = threading.Thread(target=first.get, args=(10,))
    again.start()
    wait_for(lambda: len(inbox._waiting) == 2, "the second wait of the first future")
    inbox.put(message(1))
    inbox.put(message(2))
    again.join()
    assert [second.get(0), first.get(0)] == [1, 2]


def test_a_message_whose_future_is_dropped_unread_returns_to_its_place(
    inbox: Inbox, consumed: list[MessageReceived]
) -> None:
    for number in range(3):
        inbox.put(message(number))
    dropped, read = inbox.recv(rank), inbox.recv(rank)
    assert dropped.done()
    assert read.get(0) == 1
    del dropped
    gc.collect()
    assert [inbox.recv(rank).get(0), inbox.recv(rank).get(0)] == [0, 2]


def test_a_message_arrives_although_the_await_is_cancelled_in_the_same_moment(inbox: Inbox) -> None:
    async def receive() -> Any:
        return await inbox.recv(rank)

    async def cancel_when_it_arrives(wrap: Callable[[], asyncio.Future[Any]]) -> None:
        receiving = wrap()
        await asyncio.sleep(0)
        assert inbox._waiting
        inbox.put(message(1))
        inbox.put(message(2))
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        await asyncio.sleep(0)
        assert [inbox.recv(rank).get(0), await inbox.recv(rank)] == [1, 2]

    asyncio.run(cancel_when_it_arrives(lambda: asyncio.ensure_future(receive())))
    asyncio.run(cancel_when_it_arrives(lambda: inbox.recv(rank).as_asyncio()))


def test_a_wait_keeps_the_inbox_although_nothing_else_refers_to_it() -> None:
    waited_for: set[Inbox] = set()
    inboxes: weakref.WeakSet[Inbox] = weakref.WeakSet()
    arrived: list[Any] = []

    def wait() -> None:
        inbox = Inbox(lambda message: None, waited_for=waited_for)
        inboxes.add(inbox)
        future = inbox.recv(rank)
        future.when_settled(lambda: arrived.append(1))

    wait()
    gc.collect()
    (inbox,) = inboxes
    inbox.put(message(1))
    assert arrived == [1]
    del inbox
    gc.collect()
    assert (waited_for, len(inboxes)) == (set(), 0)


def test_a_dropped_inbox_returns_the_credit_of_unread_messages(consumed: list[MessageReceived]) -> None:
    inbox = Inbox(consumed.append)
    inbox.consume_when_dropped()
    messages = [message(number) for number in range(3)]
    for each in messages:
        inbox.put(each)
    taken = inbox.recv(rank)
    assert taken.done()
    assert consumed == messages[:1]
    del taken  # unread, so its message goes back
    del inbox
    assert {id(each) for each in consumed} == {id(each) for each in messages}


def test_a_future_in_the_same_garbage_as_its_inbox_returns_its_credit_too(consumed: list[MessageReceived]) -> None:
    later: list[Callable[[], object]] = []
    inbox = Inbox(consumed.append, call_soon=later.append)
    inbox.consume_when_dropped()
    inbox.put(first := message(1))
    future = inbox.recv(rank)
    future._assigned.append(inbox._messages.popleft())
    inbox.__dict__["cycle"] = future
    del inbox, future
    gc.collect()
    later.pop()()
    assert consumed == [first]


def test_a_future_keeps_its_inbox() -> None:
    future = Inbox(lambda message: None).recv(rank)
    gc.collect()
    future._inbox.put(message(1))
    assert future.get(0) == 1


def test_messages_return_to_their_places_in_any_order(inbox: Inbox) -> None:
    for number in range(4):
        inbox.put(message(number))
    dropped = [inbox.recv(rank) for _ in range(3)]
    assert all(future.done() for future in dropped)
    for position in (1, 0, 0):
        del dropped[position]
    assert [inbox.recv(rank).get(0) for _ in range(4)] == [0, 1, 2, 3]


class Interrupting(deque[Any]):
    """Runs ``handler`` once, as a signal would, at each step of code that uses the inbox."""

    handler: Callable[[], object] = staticmethod(lambda: None)

    def __bool__(self) -> bool:
        handler, self.handler = self.handler, lambda: None
        handler()
        return len(self) > 0


@pytest.mark.parametrize("deque_of", ["_waiting", "_returned"])
def test_a_signal_handler_that_interrupts_a_receive_receives_the_next_message(inbox: Inbox, deque_of: str) -> None:
    received: list[Any] = []
    interrupting = Interrupting()
    interrupting.handler = lambda: received.append(inbox.recv(rank).get(0))
    inbox.put(message(1))
    inbox.put(message(2))
    interrupting.extend(getattr(inbox, deque_of))
    setattr(inbox, deque_of, interrupting)
    received.append(inbox.recv(rank).get(0))
    assert sorted(received) == [1, 2]


class Woken:
    """A waker that counts its calls."""

    count = 0

    def __call__(self) -> None:
        self.count += 1


class MeanwhileWhenPopped(list[Any]):
    """Runs ``meanwhile`` once, before an item is popped."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def pop(self, *position: Any) -> Any:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return super().pop(*position)


def test_an_observer_that_comes_as_the_last_one_leaves_is_woken(inbox: Inbox) -> None:
    future, woken = inbox.recv(rank), Woken()

    def second_comes() -> None:
        FutureProxy._add_waker(future, woken)
        future._join()  # does not queue, as a message is assigned

    future._add_waker(future._wakers.clear)  # the first leaves when it is woken
    future._assigned = assigned = MeanwhileWhenPopped()
    assigned.meanwhile = second_comes
    inbox.put(message(1))
    assert woken.count == 1
    assert future.get(0) == 1


class Rounds(RuleBasedStateMachine):
    """Futures wait, give up and are dropped while messages arrive: each message arrives once, and in order."""

    def __init__(self) -> None:
        super().__init__()
        self.later: deque[Callable[[], object]] = deque()
        self.inbox = Inbox(lambda message: None, call_soon=self.later.append)
        self.waiting: list[tuple[Receive[Any], Woken]] = []
        self.sent = 0
        self.received: list[int] = []

    def run_later(self) -> None:
        while self.later:
            self.later.popleft()()

    @rule()
    def put(self) -> None:
        self.sent += 1
        self.inbox.put(message(self.sent))

    @rule()
    def run(self) -> None:
        self.run_later()

    @rule()
    def wait(self) -> None:
        future, woken = self.inbox.recv(rank), Woken()
        self.waiting.append((future, woken))
        if not future._add_waker(woken):
            woken()

    @precondition(lambda self: any(woken.count for _, woken in self.waiting))
    @rule()
    def finish(self) -> None:
        """The first observer that was woken reads."""
        future, woken = next(each for each in self.waiting if each[1].count)
        settled = future._claim()
        future._remove_waker(woken)
        self.waiting.remove((future, woken))
        assert settled
        self.received.append(future.get(0))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        future, woken = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        future._remove_waker(woken)

    @rule()
    def take_and_drop(self) -> None:
        self.inbox.recv(rank).done()

    @rule()
    def receive_now(self) -> None:
        with contextlib.suppress(TimeoutError):
            self.received.append(self.inbox.recv(rank).get(0))

    def teardown(self) -> None:
        while self.waiting:
            future, woken = self.waiting.pop()
            future._remove_waker(woken)
            del future
        self.run_later()
        rest = [self.inbox.recv(rank).get(0) for _ in range(self.sent - len(self.received))]
        assert rest == sorted(rest)
        assert sorted(self.received + rest) == list(range(1, self.sent + 1))
        assert self.inbox._waited_for == set()
        assert [*self.inbox._messages, *self.inbox._returned, *self.inbox._waiting] == []


test_every_message_arrives_once = Rounds.TestCase


def test_threads_that_time_out_and_receive_get_each_message_once() -> None:
    """Takes 1 s or 2: the threads switch often, and thousands of messages make each of the races happen."""
    count = 3000
    later: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
    inbox = Inbox(lambda message: None, call_soon=later.put)
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    stop = threading.Event()

    def connection() -> None:
        while (function := later.get()) is not None:
            function()

    def receive() -> None:
        timeout = 0.0
        while not stop.is_set():
            timeout = 0.002 - timeout
            with contextlib.suppress(TimeoutError):
                received.put(inbox.recv(rank).get(timeout))

    def send() -> None:
        for number in range(count):
            later.put(lambda number=number: inbox.put(message(number)))

    threads = [threading.Thread(target=each) for each in (connection, receive, receive, receive, send)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        got = sorted(received.get(timeout=60) for _ in range(count))
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for thread in threads[1:]:
            thread.join()
        later.put(None)
        threads[0].join()
    assert got == list(range(count))
    assert received.empty()
