"""Messages that have arrived on a channel, and the futures that wait for the next ones.

A message is in one place at a time: in the inbox, assigned to a future that is waited for, or taken by it. An
observer takes the message that is assigned to its future; if it has stopped waiting, because of a timeout or a
cancellation, the message returns to its place in the inbox. So does one that was taken by a future that the program
drops unread.

Signal handlers and finalizers may receive at any point of any thread, so nothing here holds a lock: a message moves in
one step of the interpreter (``_move``), and the connection thread, which they never interrupt, assigns.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

from meshgate.errors import MeshgateError
from meshgate.session.futures import FutureProxy
from meshgate_wire import MessageReceived

R = TypeVar("R")
Numbered: TypeAlias = "tuple[int, MessageReceived]"  # in the order of arrival

_NEVER = object()


def _move(pop: Callable[[], Numbered], target: list[Numbered] | deque[Numbered]) -> bool:
    """Moves one message. Returns whether there was one.

    No bytecode runs while the message is in neither place, so no Ctrl-C can lose it and no other thread take it, too.
    """
    try:
        target.extend(itertools.islice(iter(pop, _NEVER), 1))
    except IndexError:
        return False
    return True


class Inbox:
    """The received messages of one channel, in order. ``delivered(message, future)`` is called before a future gets
    one, and ``consume`` returns its credit to the gateway.

    The connection thread calls ``put`` and ``close``; ``call_soon(function)`` calls a function on it, or does nothing
    once it has ended. ``waited_for`` has the inboxes that a future waits for, which nothing else may refer to.
    """

    def __init__(
        self,
        consume: Callable[[MessageReceived], None],
        delivered: Callable[[MessageReceived, FutureProxy[Any]], object] = lambda message, future: None,
        *,
        call_soon: Callable[[Callable[[], object]], object] = lambda function: function(),
        waited_for: set[Inbox] | None = None,
    ) -> None:
        self._consume, self._delivered, self._call_soon = consume, delivered, call_soon
        self._waited_for: set[Inbox] = set() if waited_for is None else waited_for
        self._numbers = itertools.count()
        self._messages: deque[Numbered] = deque()
        self._returned: deque[Numbered] = deque()  # to go back to their places in front of _messages
        self._waiting: deque[_Place] = deque()
        self._make_error: Callable[[], MeshgateError] | None = None
        self._dropped: weakref.finalize[..., Inbox] | None = None

    def consume_when_dropped(self) -> None:
        """Once nothing refers to the inbox, returns the credit of the messages that are left in it."""
        # Not __del__, during which the connection thread could still find the inbox, and put a message into it.
        self._dropped = weakref.finalize(self, _consume_all, self._messages, self._returned, self._consume)
        self._dropped.atexit = False

    def recv(self, read: Callable[[MessageReceived], R]) -> Receive[R]:
        """A future of ``read(message)`` of the next message."""
        return Receive(self, read)

    # --- on the connection thread

    def put(self, message: MessageReceived) -> None:
        """Adds ``message``, and assigns it if a future waits."""
        self._messages.append((next(self._numbers), message))
        if self._waiting or self._returned:
            self._assign()

    def close(self, make_error: Callable[[], MeshgateError]) -> None:
        """Fails the futures that wait, and later ones once the messages already received have been taken."""
        self._assign()
        self._make_error = make_error
        for place in self._all_waiting():
            place.future.fail(make_error())

    def close_after_fork(self, error: MeshgateError) -> None:
        """As ``close``, in the child of a fork, which has no connection thread."""
        self._make_error = lambda: error
        for place in self._all_waiting():
            place.future.fail_after_fork(error)

    def _all_waiting(self) -> list[_Place]:
        waiting, self._waiting = list(self._waiting), deque()
        self._waited_for.discard(self)
        return waiting

    def _assign(self) -> None:
        """Assigns messages to the futures that have waited longest."""
        if self._make_error is not None:
            return  # each receive takes for itself
        if self._dropped is not None and not self._dropped.alive:  # a future of the same garbage has given back
            _consume_all(self._messages, self._returned, self._consume)
            return
        self._put_back()
        while self._messages and (place := self._longest_waiting()) is not None:
            assigned = place.is_waiting() and _move(self._messages.popleft, place.future._assigned)
            self.leave(place)
            if assigned:
                place.future._wake()
                if not place.future._wakers:  # the last observer left meanwhile
                    _move(place.future._assigned.pop, self._returned)
                    self._put_back()
                    place.future._wake()  # one that came in this moment has not queued: it claims, and queues

    def _longest_waiting(self) -> _Place | None:
        try:
            return self._waiting[0]
        except IndexError:  # any thread may leave
            return None

    def _put_back(self) -> None:
        if self._returned:
            returned = list(self._returned)  # more may be returned meanwhile
            last = max(map(_number, returned))
            ahead: list[Numbered] = []
            with contextlib.suppress(IndexError):
                while self._messages[0][0] < last:
                    ahead.append(self._messages.popleft())
            self._messages.extendleft(sorted([*returned, *ahead], key=_number, reverse=True))
            for _ in returned:
                self._returned.popleft()

    # --- on any thread

    def take(self, future: Receive[Any]) -> None:
        """Lets ``future`` take the first message, if there is one and no other waits. Fails it if the inbox is closed
        and empty."""
        if self._make_error is None:
            if not self._waiting and not self._returned:
                _move(self._messages.popleft, future._taken)
        elif not (_move(self._returned.popleft, future._taken) or _move(self._messages.popleft, future._taken)):
            future.fail(self._make_error())

    def join(self, place: _Place) -> None:
        """Lets the place's future wait behind the others."""
        self._waiting.append(place)
        place.queued = True
        self._waited_for.add(self)
        if self._make_error is not None:
            place.future._claim()
        elif self._messages or self._returned:
            self._call_soon(self._assign)

    def leave(self, place: _Place) -> None:
        """Gives up a place."""
        place.queued = False
        with contextlib.suppress(ValueError):
            self._waiting.remove(place)
        if not self._waiting:
            self._waited_for.discard(self)
            if self._waiting:  # another thread joined meanwhile
                self._waited_for.add(self)

    def give_back(self, messages: list[Numbered], position: int = 0) -> None:
        """Takes back what is in ``messages`` from ``position`` on."""
        returned = False
        while _move(functools.partial(messages.pop, position), self._returned):
            returned = True
        if returned:
            self._call_soon(self._assign)

    def deliver(self, message: MessageReceived, future: Receive[R], read: Callable[[MessageReceived], R]) -> None:
        self._delivered(message, future)
        future.settle(lambda: read(message))
        self._consume(message)


def _consume_all(
    messages: deque[Numbered], returned: deque[Numbered], consume: Callable[[MessageReceived], object]
) -> None:
    for left in (messages, returned):
        while left:
            consume(left.popleft()[1])


def _number(numbered: Numbered) -> int:
    return numbered[0]


class _Place:
    """The place of a future among those that wait."""

    __slots__ = ("future", "queued")

    def __init__(self, future: Receive[Any]) -> None:
        self.future, self.queued = future, False

    def is_waiting(self) -> bool:
        """Whether a caller still waits for the future, and in this place."""
        future = self.future
        return future._place is self and bool(future._wakers) and not future._settled


class Receive(FutureProxy[R], Generic[R]):
    """A future of the next message. It waits for one while it is observed, and keeps the inbox alive."""

    __slots__ = ("_assigned", "_inbox", "_place", "_read_message", "_taken")

    def __init__(self, inbox: Inbox, read: Callable[[MessageReceived], R]) -> None:
        super().__init__()
        self._inbox, self._read_message = inbox, read
        self._place: _Place | None = None
        self._assigned: list[Numbered] = []  # an observer may take it
        self._taken: list[Numbered] = []  # this future's own, of which the first counts

    def when_settled(self, wake: Callable[[], object]) -> None:
        def woken() -> None:
            if self._settled:
                wake()
            else:
                self._claim()

        if not self._add_waker(woken):
            wake()

    def done(self) -> bool:
        return self._claim()

    def _claim(self) -> bool:
        """Takes the message that is assigned to this future, or a free one. Returns whether it is settled."""
        if not self._settled:
            if not self._taken and not _move(self._assigned.pop, self._taken):
                self._inbox.take(self)
            if self._taken:
                self._inbox.deliver(self._taken[0][1], self, self._read_message)
                self._inbox.give_back(self._taken, 1)  # of observers that took at the same time
                self._inbox.give_back(self._assigned)
            elif self._wakers and not self._settled:
                self._join()
        return self._settled

    def _add_waker(self, wake: Callable[[], object]) -> bool:
        if self._claim() or not super()._add_waker(wake):
            return False
        self._join()
        if self._assigned:  # after the others were woken
            wake()
        return True

    def _remove_waker(self, wake: Callable[[], object]) -> bool:
        removed = super()._remove_waker(wake)
        if not self._wakers and not self._settled:
            place, self._place = self._place, None
            if place is not None:
                self._inbox.leave(place)
            self._inbox.give_back(self._assigned)
            if self._wakers:  # another thread began to wait meanwhile
                self._join()
        return removed

    def _join(self) -> None:
        if not self._assigned and (self._place is None or not self._place.queued):
            self._place = place = _Place(self)
            self._inbox.join(place)

    def _wake(self) -> None:
        for wake in tuple(self._wakers):
            wake()

    def __del__(self) -> None:
        if not self._was_read:
            self._inbox.give_back(self._taken)
            self._inbox.give_back(self._assigned)
