"""Messages that callers have posted and the connection has not taken yet, and the back-pressure on those callers.

Two gates, one for small messages and one for the others, close while more bytes wait than the limit allows, in this
queue and in the session below it. Small messages are counted apart, so a large transfer never blocks them.

A signal handler or a finalizer may put a message while its own thread is putting one. It then does not block, whatever
waits: the thread holds the lock. The consumer never waits for the lock, since the handler may wait for the consumer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from meshgate.errors import InvalidRequestError, MeshgateError, copy_of
from meshgate.session.futures import FutureProxy
from meshgate_wire import Header, MessageTooLarge, Sendable, Session
from meshgate_wire.message_codec import Encoded, encode_message

Message: TypeAlias = tuple[Encoded, int]  # with its stream


class SendQueue:
    """Any thread may ``put``; ``consumer``, which never blocks there, takes. ``error`` is set once it is closed. What
    ``unsent``, the session below, has yet to send counts towards the limit."""

    def __init__(self, limit: int, small_message: int, unsent: Session, consumer: threading.Thread) -> None:
        self.error: MeshgateError | None = None
        self._limit = limit
        self._small_message = small_message
        self._unsent = unsent
        self._consumer = consumer
        self._refusal: MeshgateError | None = None  # why puts other than the last one are refused
        self._lock = threading.RLock()  # guards _added and _small_added
        self._putting: set[int] = set()  # the threads that hold the lock in put(), or are about to
        self._messages: deque[Message] = deque()
        self._added = 0  # bytes of all messages
        self._small_added = 0  # the part of _added in small messages
        self._taken = 0  # bytes of the messages whose take() has ended; changed by the consumer alone
        self._small_taken = 0
        self._waiting_for_drain: deque[FutureProxy[None]] = deque()
        self._gate = _Gate()
        self._small_gate = _Gate()

    def put(
        self, header: Header, buffers: Sequence[Sendable], stream: int, *, last: bool = False, waits: bool = True
    ) -> None:
        """Adds a message. Blocks while the gate of its size is closed, if it ``waits``. Raises the error that closed
        the queue, and InvalidRequestError if the gateway would not accept the message.

        After ``refuse``, only the ``last`` message is accepted. It never blocks.
        """
        try:
            message = encode_message(header, buffers, self._unsent.allowed)
        except MessageTooLarge as error:
            name = getattr(header, "endpoint", "") or type(header).__name__
            raise InvalidRequestError(f"{name} was not sent: {error}") from None
        small = message.nbytes <= self._small_message
        gate = self._small_gate if small else self._gate
        thread = threading.get_ident()
        interrupts_put = thread in self._putting
        waits = waits and not (last or interrupts_put or threading.current_thread() is self._consumer)
        if waits and not gate.is_open:
            gate.wait()
        if self.error is not None:
            raise self.copy_error()
        if self._refusal is not None and not last:
            raise copy_of(self._refusal)
        try:
            self._putting.add(thread)
            with self._lock:
                self._messages.append((message, stream))
                self._added += message.nbytes
                self._small_added += message.nbytes if small else 0
                if self._added - self._taken + self._unsent.queued_bytes > self._limit:
                    self._close_gates()
        finally:
            if not interrupts_put:
                self._putting.discard(thread)

    def refuse(self, error: MeshgateError) -> None:
        """Raises ``error`` in every caller that puts another message than the last one from now on."""
        self._refusal = error

    def take(self) -> Iterator[Message]:
        """Removes and yields the messages, also those added meanwhile. Their bytes count until the iterator ends."""
        taken = small_taken = 0
        try:
            while self._messages:
                message, stream = self._messages.popleft()
                taken += message.nbytes
                small_taken += message.nbytes if message.nbytes <= self._small_message else 0
                yield message, stream
        finally:
            self._taken += taken
            self._small_taken += small_taken
            if self._lock.acquire(blocking=False):
                try:  # recounted: a Ctrl-C in put() may have left a message without its bytes
                    sizes = self._sizes() if self._messages else ()
                    self._added = self._taken + sum(sizes)
                    self._small_added = self._small_taken + (self._sum_small(sizes) if sizes else 0)
                finally:
                    self._lock.release()

    def drained(self) -> FutureProxy[None]:
        """Settles once nothing waits, in the queue or in the session."""
        future: FutureProxy[None] = FutureProxy()
        self._waiting_for_drain.append(future)
        if self.error is not None:  # checked last: the consumer may close the queue at any point
            self._fail_drained()
        return future

    def update(self) -> None:
        """Call this when the session's queue has changed. Opens and closes the gates, settles ``drained`` futures."""
        waiting = self._added - self._taken + self._unsent.queued_bytes
        while self._waiting_for_drain and not waiting:
            self._waiting_for_drain.popleft().settle(lambda: None)
        if waiting > self._limit:
            self._close_gates()
        elif not self._gate.is_open:
            self._gate.set()
        if not self._small_gate.is_open and self._small_bytes + self._unsent.queued_small_bytes <= self._limit:
            self._small_gate.set()

    def close(self, error: MeshgateError) -> None:
        """Drops the messages and raises ``error`` in every caller that waits or posts later."""
        self.error = error
        self._messages.clear()
        self._gate.set()
        self._small_gate.set()
        self._fail_drained()

    def _fail_drained(self) -> None:
        while True:
            try:
                future = self._waiting_for_drain.popleft()
            except IndexError:  # another thread has failed the rest
                return
            future.fail(self.copy_error())

    def close_after_fork(self, error: MeshgateError) -> None:
        """As ``close``, in the child of a fork, where another thread may have held a lock."""
        self.error = error
        self._lock = threading.RLock()
        self._putting = set()
        self._gate, self._small_gate = _Gate(), _Gate()

    def copy_error(self) -> MeshgateError:
        assert self.error is not None
        return copy_of(self.error)

    def validate_state(self, *, update_due: bool) -> None:
        """Asserts what holds while nothing is put or taken. For tests. ``update_due``: the consumer will run soon."""
        with self._lock:
            sizes = self._sizes()
            assert self.error is not None or self._bytes == sum(sizes)
            assert self.error is not None or self._small_bytes == self._sum_small(sizes)
            waiting = self._bytes + self._unsent.queued_bytes
            waiting_small = self._small_bytes + self._unsent.queued_small_bytes
            closed = self.error is not None
            over_limit = not closed and waiting > self._limit
            over_small_limit = not closed and waiting_small > self._limit
            assert update_due or closed or not self._messages, "messages wait and the consumer does not know"
            assert update_due or over_limit or self._gate.is_open, "callers wait without need"
            assert update_due or over_small_limit or self._small_gate.is_open, "callers wait without need"
            assert update_due or waiting or not self._waiting_for_drain, "drained, and the futures are not settled"

    @property
    def _bytes(self) -> int:
        """The bytes in ``_messages``, or taken by the loop of take() that is running."""
        return self._added - self._taken

    @property
    def _small_bytes(self) -> int:
        return self._small_added - self._small_taken

    def _sizes(self) -> list[int]:
        messages = list(self._messages)  # a copy: a finalizer may put a message meanwhile
        return [message.nbytes for message, _ in messages]

    def _sum_small(self, sizes: Sequence[int]) -> int:
        return sum(nbytes for nbytes in sizes if nbytes <= self._small_message)

    def _close_gates(self) -> None:
        """Closes the gates of the messages that exceed the limit."""
        if self._bytes + self._unsent.queued_bytes > self._limit:
            self._gate.clear()
            if self._small_bytes + self._unsent.queued_small_bytes > self._limit:
                self._small_gate.clear()


class _Gate:
    """An event without a lock, so that a signal handler may wait for or close a gate at any point of its thread."""

    def __init__(self) -> None:
        self.is_open = True
        self._waiting: deque[threading.Lock] = deque()

    def set(self) -> None:
        self.is_open = True
        while self._waiting:
            self._waiting.popleft().release()

    def clear(self) -> None:
        self.is_open = False

    def wait(self) -> None:
        while not self.is_open:
            opened = threading.Lock()
            opened.acquire()
            self._waiting.append(opened)
            if not self.is_open:
                opened.acquire()
