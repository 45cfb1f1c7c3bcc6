"""Messages that have arrived on a channel, and the futures that wait for the next ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from meshgate.errors import MeshgateError
from meshgate.session.futures import FutureProxy
from meshgate_wire import MessageReceived

__all__ = ["Inbox"]


class Inbox:
    """The received messages of one channel, in order. ``delivered(message, future)`` is called before a future gets
    one, and ``consume`` returns its credit to the gateway.

    The connection thread calls ``put`` and ``close``; any thread may call ``take``.
    """

    def __init__(
        self,
        consume: Callable[[MessageReceived], None],
        delivered: Callable[[MessageReceived, FutureProxy[Any]], object] = lambda message, future: None,
    ) -> None:
        self._consume, self._delivered = consume, delivered
        self._lock = threading.Lock()
        self._messages: deque[MessageReceived] = deque()
        self._waiting: deque[tuple[FutureProxy[Any], Callable[[MessageReceived], Any]]] = deque()
        self._make_error: Callable[[], MeshgateError] | None = None

    def put(self, message: MessageReceived) -> None:
        """Hands ``message`` to the future that has waited longest, or keeps it."""
        with self._lock:
            if not self._waiting:
                self._messages.append(message)
                return
            future, read = self._waiting.popleft()
        self._deliver(message, future, read)

    def take(self, future: FutureProxy[Any], read: Callable[[MessageReceived], Any]) -> None:
        """Settles ``future`` with ``read(message)`` of the next message, now or when it arrives."""
        with self._lock:
            if not self._messages:
                if self._make_error is None:
                    self._waiting.append((future, read))
                    return
                message = None
            else:
                message = self._messages.popleft()
        if message is None:
            assert self._make_error is not None
            future.fail(self._make_error())
        else:
            self._deliver(message, future, read)

    def close(self, make_error: Callable[[], MeshgateError]) -> None:
        """Fails the futures that wait, and later ones once the messages already received have been taken."""
        with self._lock:
            self._make_error = make_error
            waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:
            future.fail(make_error())

    def close_after_fork(self, error: MeshgateError) -> None:
        """As ``close``, in the child of a fork, where another thread may have held the lock."""
        self._lock = threading.Lock()
        self._make_error = lambda: error
        waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:
            future.fail_after_fork(error)

    def _deliver(
        self, message: MessageReceived, future: FutureProxy[Any], read: Callable[[MessageReceived], Any]
    ) -> None:
        self._delivered(message, future)
        future.settle(lambda: read(message))
        self._consume(message)
