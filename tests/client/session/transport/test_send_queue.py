from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from meshgate.errors import GatewayError
from meshgate.session.futures import FutureProxy
from meshgate.session.transport.send_queue import SendQueue
from meshgate_wire import Limits
from meshgate_wire.messages import Done

LIMIT, SMALL = 10_000, 1_000
LARGE_MESSAGE = [bytes(LIMIT)]  # exceeds the limit on its own
HEADER = Done(call=1)


@dataclass
class FakeSession:
    """The bytes that wait in the session below the queue."""

    queued_bytes: int = 0
    queued_small_bytes: int = 0
    allowed: Limits = field(default_factory=Limits)


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def queue(session: FakeSession) -> Iterator[SendQueue]:
    queue = SendQueue(LIMIT, SMALL, session, consumer=threading.Thread())
    yield queue
    queue.validate_state(update_due=False)


class Caller:
    """A thread that puts one message and records the error, if any."""

    def __init__(self, queue: SendQueue, buffers: list[bytes], *, last: bool = False) -> None:
        self.error: GatewayError | None = None
        self._queue = queue
        self._buffers = buffers
        self._last = last
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._queue.put(HEADER, self._buffers, 1, last=self._last)
        except GatewayError as error:
            self.error = error

    def is_blocked(self) -> bool:
        self._thread.join(0.05)
        return self._thread.is_alive()

    def returns(self) -> bool:
        self._thread.join(20)
        return not self._thread.is_alive()


def take_all(queue: SendQueue) -> list[int]:
    """Takes what a consumer would take, and returns the streams."""
    streams = [stream for _, stream in queue.take()]
    queue.update()
    return streams


def test_messages_are_taken_in_order(queue: SendQueue) -> None:
    for stream in range(5):
        queue.put(HEADER, [b"x"], stream)
    assert take_all(queue) == [0, 1, 2, 3, 4]


def test_messages_put_while_others_are_taken_are_taken_too(queue: SendQueue) -> None:
    queue.put(HEADER, [], 1)
    streams = []
    for _, stream in queue.take():
        streams.append(stream)
        if stream == 1:
            queue.put(HEADER, [], 2)
    queue.update()
    assert streams == [1, 2]


def test_one_message_may_exceed_the_limit_and_the_next_blocks(queue: SendQueue) -> None:
    queue.put(HEADER, LARGE_MESSAGE, 1)
    caller = Caller(queue, LARGE_MESSAGE)
    assert caller.is_blocked()
    take_all(queue)
    assert caller.returns()
    take_all(queue)


def test_a_caller_blocks_until_the_queue_is_below_the_limit(queue: SendQueue, session: FakeSession) -> None:
    session.queued_bytes = LIMIT + 1
    queue.update()
    caller = Caller(queue, LARGE_MESSAGE)
    assert caller.is_blocked()
    session.queued_bytes = LIMIT
    queue.update()
    assert caller.returns()
    take_all(queue)


def test_small_messages_wait_only_for_small_ones(queue: SendQueue, session: FakeSession) -> None:
    queue.put(HEADER, LARGE_MESSAGE, 1)
    assert Caller(queue, [b"x"]).returns()
    session.queued_bytes = session.queued_small_bytes = LIMIT + 1
    queue.update()
    caller = Caller(queue, [b"x"])
    assert caller.is_blocked()
    session.queued_bytes = session.queued_small_bytes = 0
    queue.update()
    assert caller.returns()
    take_all(queue)


def test_the_consumer_never_blocks() -> None:
    queue = SendQueue(LIMIT, SMALL, FakeSession(), consumer=threading.current_thread())
    queue.put(HEADER, LARGE_MESSAGE, 1)
    queue.put(HEADER, LARGE_MESSAGE, 1)
    assert len(take_all(queue)) == 2


@pytest.mark.parametrize(("posted", "queued_bytes"), [(1, 0), (0, 1), (1, 1)])
def test_drained_settles_only_when_nothing_waits(
    queue: SendQueue, session: FakeSession, posted: int, queued_bytes: int
) -> None:
    for _ in range(posted):
        queue.put(HEADER, [b"x"], 1)
    session.queued_bytes = queued_bytes
    drained = queue.drained()
    queue.update()
    assert not drained.done()
    take_all(queue)
    session.queued_bytes = 0
    queue.update()
    assert drained.done()


@pytest.mark.parametrize("close", [SendQueue.close, SendQueue.close_after_fork])
@pytest.mark.parametrize("buffers", [LARGE_MESSAGE, [b"x"]])
def test_no_caller_blocks_on_a_closed_queue(
    session: FakeSession, close: Callable[[SendQueue, GatewayError], None], buffers: list[bytes]
) -> None:
    queue = SendQueue(LIMIT, SMALL, session, consumer=threading.Thread())
    session.queued_bytes = session.queued_small_bytes = LIMIT + 1
    queue.update()
    close(queue, GatewayError("closed"))
    caller = Caller(queue, buffers)
    assert caller.returns()
    assert str(caller.error) == "closed"
    queue.validate_state(update_due=False)


def test_closing_fails_blocked_callers_and_drained_futures(queue: SendQueue, session: FakeSession) -> None:
    session.queued_bytes = LIMIT + 1
    queue.update()
    caller, drained = Caller(queue, LARGE_MESSAGE), queue.drained()
    assert caller.is_blocked()
    queue.close(GatewayError("closed"))
    assert caller.returns()
    assert str(caller.error) == str(drained.exception(0)) == str(queue.drained().exception(0)) == "closed"


def test_a_lock_that_another_thread_held_at_the_fork_does_not_block_the_child(queue: SendQueue) -> None:
    holder = threading.Thread(target=queue._lock.acquire)
    holder.start()
    holder.join()
    queue.close_after_fork(GatewayError("forked"))
    with pytest.raises(GatewayError, match="forked"):
        queue.put(HEADER, [], 1)


def test_each_caller_raises_an_error_of_its_own(queue: SendQueue) -> None:
    queue.close(GatewayError("closed"))
    assert queue.copy_error() is not queue.copy_error()


def test_validation_finds_callers_that_wait_without_need(session: FakeSession) -> None:
    queue = SendQueue(LIMIT, SMALL, session, consumer=threading.Thread())
    queue._gate.clear()
    with pytest.raises(AssertionError, match="callers wait without need"):
        queue.validate_state(update_due=False)


def test_after_a_refusal_only_the_last_message_is_accepted(queue: SendQueue) -> None:
    queue.put(HEADER, [], 1)
    queue.refuse(GatewayError("closing"))
    with pytest.raises(GatewayError, match="closing"):
        queue.put(HEADER, [], 2)
    queue.put(HEADER, [], 3, last=True)
    assert take_all(queue) == [1, 3]


def test_the_last_message_never_blocks(queue: SendQueue, session: FakeSession) -> None:
    session.queued_bytes = session.queued_small_bytes = LIMIT + 1
    queue.update()
    caller = Caller(queue, [b"x"])
    assert caller.is_blocked()
    last = Caller(queue, [], last=True)
    assert last.returns()
    session.queued_bytes = session.queued_small_bytes = 0
    queue.update()
    assert caller.returns()
    take_all(queue)


def test_a_message_that_does_not_wait_is_taken_behind_those_that_fill_the_queue(
    queue: SendQueue, session: FakeSession
) -> None:
    session.queued_bytes = session.queued_small_bytes = LIMIT + 1
    queue.put(HEADER, [], 1)
    queue.put(HEADER, [], 2, waits=False)
    assert not queue._small_gate.is_open
    session.queued_bytes = session.queued_small_bytes = 0
    assert take_all(queue) == [1, 2]


class InterruptedSession(FakeSession):
    """Interrupts the first look at the session, as a signal handler or a finalizer does."""

    interrupt: Callable[[], object] | None = None

    def __getattribute__(self, name: str) -> object:
        if name == "queued_bytes":
            interrupt, self.interrupt = self.interrupt, None
            if interrupt is not None:
                interrupt()
        return super().__getattribute__(name)


def test_a_message_put_while_its_own_thread_puts_one_does_not_block() -> None:
    session = InterruptedSession()
    queue = SendQueue(LIMIT, SMALL, session, consumer=threading.Thread())
    taken: list[int] = []

    def interrupt() -> None:
        queue._gate.clear()
        queue.put(HEADER, LARGE_MESSAGE, 2)
        consumer = threading.Thread(target=lambda: taken.extend(take_all(queue)))
        consumer.start()
        consumer.join(10)  # as a handler that waits for the reply

    session.interrupt = interrupt
    queue.put(HEADER, [b"x"], 1)
    assert taken == [1, 2]
    queue.put(HEADER, [b"x"], 3)
    assert take_all(queue) == [3]
    queue.validate_state(update_due=False)


def test_a_drained_future_fails_if_the_queue_is_closed_just_before_it_is_added(queue: SendQueue) -> None:
    class Closing(deque[FutureProxy[None]]):
        def append(self, future: FutureProxy[None]) -> None:
            queue.close(GatewayError("the session has ended"))
            super().append(future)

    queue._waiting_for_drain = Closing()
    with pytest.raises(GatewayError, match="the session has ended"):
        queue.drained().get(timeout=20)
