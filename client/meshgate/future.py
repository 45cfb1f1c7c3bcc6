"""The future of a remote operation: what ``call()`` and ``stop()`` return, and what ``.get()`` waits on.

It promises Monarch's rules. Any number of observers, in any threads and on any event loops, see the same
outcome. A timeout, a cancelled ``await`` or a Ctrl-C ends the waiting and nothing else: the operation goes on,
and a later ``get()`` or ``await`` still finds its outcome.

The connection thread only *settles* a future; the value is read (unpickled) by the first observer, in the
observer's own thread, so that a large result never holds up the connection.
"""

from __future__ import annotations

import asyncio
import math
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar, cast

__all__ = ["Future", "FutureProxy"]

R = TypeVar("R")

_GET_ON_LOOP_WARNING = (
    "Future.get() was called from within an active event loop. Because this method blocks synchronously and "
    "does not yield control, it keeps other tasks from running, and deadlocks if this future depends on them. "
    "Use `await future` or as_asyncio() instead."
)


class FutureProxy(Generic[R]):
    """The outcome of a remote operation, now or later. Made by meshgate's operations only."""

    __slots__ = ("__weakref__", "_begin", "_error", "_lock", "_read", "_settled", "_value", "_wakers")

    def __init__(self, begin: Callable[[FutureProxy[R]], None] | None = None) -> None:
        """``begin(future)`` is called when the future is first looked at, and sees to it that it gets settled."""
        self._begin = begin
        # _lock guards _wakers until settling, and the one reading after it. _settled goes from False to True once.
        self._settled = False
        self._wakers: list[Callable[[], object]] = []
        self._read: Callable[[], R] | None = None
        self._lock = threading.Lock()
        self._value: R | None = None
        self._error: Exception | None = None

    @classmethod
    def resolved(cls, value: R) -> FutureProxy[R]:
        """A future that already has its value."""
        future = cls()
        future.settle(lambda: value)
        return future

    @classmethod
    def failed(cls, error: Exception) -> FutureProxy[R]:
        """A future that has already failed."""
        future = cls()
        future.fail(error)
        return future

    # --- the producer's side: the connection thread

    def settle(self, read: Callable[[], R]) -> None:
        """Ends the waiting. ``read`` gives the value or raises; the first observer calls it, in its own thread.

        Only the first settling counts.
        """
        if self._settled:
            return
        for wake in self._set(read):
            wake()

    def _set(self, read: Callable[[], R]) -> list[Callable[[], object]]:
        with self._lock:
            if self._settled:
                return []
            self._read = read
            self._settled = True
            wakers, self._wakers = self._wakers, []
            return wakers

    def fail(self, error: Exception) -> None:
        """Settles with ``error``."""

        def read() -> R:
            raise error

        self.settle(read)

    def when_settled(self, wake: Callable[[], object]) -> None:
        """Calls ``wake`` once the outcome is there: at once, or later on the connection thread. It must not block."""
        self._look()
        if not self._watch(wake):
            wake()

    # --- the observer's side

    def done(self) -> bool:
        """Whether the outcome is there, so that ``get()`` does not wait."""
        self._look()
        return self._settled

    def get(self, timeout: float | None = None) -> R:
        """Waits for the value and returns it; raises what the operation failed with.

        ``timeout`` is in seconds; when it is over ``TimeoutError`` is raised and the operation goes on. On an event
        loop's thread this blocks the loop and warns: use ``await`` there.
        """
        if timeout is not None:
            _check_timeout(timeout)
        self._look()
        if not self._settled:
            if asyncio._get_running_loop() is not None:
                warnings.warn(_GET_ON_LOOP_WARNING, UserWarning, stacklevel=2)
            self._wait(timeout)
        return self._outcome()

    def result(self, timeout: float | None = None) -> R:
        """The same as :meth:`get`."""
        return self.get(timeout)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """What ``get(timeout)`` would raise, a ``TimeoutError`` of the waiting included, or None."""
        try:
            self.get(timeout)
        except Exception as error:  # noqa: BLE001 - the method's purpose is to hand it over
            return error
        return None

    def __await__(self) -> Generator[object, None, R]:
        loop = asyncio._get_running_loop()
        if loop is None:
            raise ValueError("a meshgate future can be awaited on an asyncio event loop only; elsewhere use get()")
        self._look()
        if not self._settled:
            arrival: asyncio.Future[None] = loop.create_future()
            wake = _Wake(loop, arrival)
            try:
                self.when_settled(wake)
                yield from arrival
            finally:
                self._forget(wake)
        return self._outcome()

    def as_asyncio(self) -> asyncio.Future[R]:
        """An ``asyncio.Future`` of the running loop with the same outcome. Cancelling it cancels nothing remote."""
        loop = asyncio._get_running_loop()
        if loop is None:
            raise RuntimeError("as_asyncio() requires a running asyncio event loop.")
        self._look()
        observed: asyncio.Future[R] = loop.create_future()
        if self._settled:
            self._transfer(observed)
        else:
            arrival: asyncio.Future[None] = loop.create_future()
            arrival.add_done_callback(lambda _: self._transfer(observed))
            wake = _Wake(loop, arrival)
            observed.add_done_callback(lambda _: self._forget(wake))
            self.when_settled(wake)
        return observed

    def abandon(self, error: Exception) -> None:
        """Fails the future in the child of a fork, where another thread's lock may be held for ever."""
        if not self._settled:
            self._lock = threading.Lock()
            self._wakers = []
            self.fail(error)

    def _look(self) -> None:
        begin, self._begin = self._begin, None
        if begin is not None:
            begin(self)

    def _transfer(self, observed: asyncio.Future[R]) -> None:
        if observed.done():
            return
        try:
            observed.set_result(self._outcome())
        except StopIteration as error:
            failure = RuntimeError("the remote call raised StopIteration")
            failure.__cause__ = error
            observed.set_exception(failure)
        except Exception as error:  # noqa: BLE001 - handed over to whoever awaits
            observed.set_exception(error)

    def _wait(self, timeout: float | None) -> None:
        """Blocks until settled. A lock of its own for each waiter: an interrupted one leaves the others alone."""
        arrived = threading.Lock()
        arrived.acquire()
        wake = arrived.release
        try:
            if not self._watch(wake):
                return
            if not arrived.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
                raise TimeoutError(f"no result within {timeout} s; the operation goes on, get() may be called again")
        finally:
            self._forget(wake)

    def _watch(self, wake: Callable[[], object]) -> bool:
        """Has ``wake`` called on settling; False, and nothing done, when that is over."""
        if self._settled:  # never under the lock then: a reader may be holding it for long
            return False
        with self._lock:
            if not self._settled:
                self._wakers.append(wake)
            return not self._settled

    def _forget(self, wake: Callable[[], object]) -> None:
        if not self._settled:
            with self._lock:
                if wake in self._wakers:
                    self._wakers.remove(wake)

    def _outcome(self) -> R:
        """The value, or raises the error. Reads on the first time; an interrupted reading starts again on the next."""
        if self._read is not None:
            with self._lock:
                if self._read is not None:
                    try:
                        self._value = self._read()
                    except Exception as error:  # noqa: BLE001 - kept: every observer gets the same one
                        self._error = error
                    self._read = None
        if self._error is not None:
            raise self._error
        return cast("R", self._value)


class _Wake:
    """Settles ``arrival`` on its own loop, from any thread; harmless when either is over already."""

    __slots__ = ("_arrival", "_arrivals", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, arrival: asyncio.Future[None]) -> None:
        self._loop = loop
        self._arrival = arrival
        self._arrivals = _arrivals.get(loop) or _arrivals.setdefault(loop, _Arrivals())

    def __call__(self) -> None:
        self._arrivals.add(self._arrival, self._loop)


class _Arrivals:
    """What has arrived for one loop and is not settled there yet: waking a loop is a system call, once for all."""

    __slots__ = ("_due", "_woken")

    def __init__(self) -> None:
        self._due: deque[asyncio.Future[None]] = deque()
        self._woken = False

    def add(self, arrival: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
        self._due.append(arrival)
        if self._woken:  # and has not begun to look: it will find this one
            return
        self._woken = True
        try:
            loop.call_soon_threadsafe(self._settle)
        except BaseException as error:
            self._woken = False
            if not (isinstance(error, RuntimeError) and loop.is_closed()):
                raise
            self._due.clear()

    def _settle(self) -> None:
        self._woken = False
        while self._due:
            arrival = self._due.popleft()
            if not arrival.done():
                arrival.set_result(None)


_arrivals: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Arrivals] = weakref.WeakKeyDictionary()


Future = FutureProxy  # Monarch's name, for annotations of programs that come from there


def _check_timeout(timeout: float) -> None:
    if not math.isfinite(timeout) or timeout < 0:
        raise ValueError(f"invalid timeout {timeout}: expected a non-negative, finite number of seconds")
