"""The future of a remote operation: what ``call()`` and ``stop()`` return.

It follows Monarch's rules. Any number of observers, in any threads and on any event loops, see the same outcome. A
timeout, a cancelled ``await`` or a Ctrl-C ends the wait and nothing else: the operation continues, and a later
``get()`` or ``await`` still returns its outcome.

The connection thread only *settles* a future. The first observer reads (unpickles) the value in its own thread, so that
a large result never holds up the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType, TracebackType
from typing import Any, Generic, Protocol, TypeVar, cast

from meshgate.caller import is_ours, warn_caller
from meshgate.errors import MeshgateError
from meshgate.html import card, repr_of
from meshgate.monarch_classes import SeenAsMonarchs
from meshgate.session.loop_wakers import LoopWaker
from meshgate.shapes.value_mesh import ValueMesh

__all__ = ["Future", "FutureProxy"]

R = TypeVar("R")
MOST_ERROR = 2000  # characters of an error in a notebook

_GET_ON_LOOP_WARNING = (
    "Future.get() was called from within an active event loop. Because this method blocks synchronously and "
    "does not yield control, it keeps other tasks from running, and deadlocks if this future depends on them. "
    "Use `await future` or as_asyncio() instead."
)


class Awaited(Protocol):
    """The call behind a future."""

    endpoint: str

    def waits_for(self) -> str:
        """What it waits for, for people."""


class Future(SeenAsMonarchs, Generic[R]):
    """The outcome of a remote operation, now or later. Only meshgate's operations create one."""

    __slots__ = (
        "__weakref__",
        "_call",
        "_error",
        "_lock",
        "_observed",
        "_read",
        "_settled",
        "_start",
        "_traceback",
        "_value",
        "_wakers",
    )

    _monarch_name = "Future"

    # Until the future is settled, only the thread that settles it holds _lock, and no thread waits for it: a signal
    # handler may interrupt any observer and wait for another future. Afterwards _lock guards _read. _settled
    # changes from False to True once.
    _start: Callable[[Any], None] | None
    _call: Awaited | None  # until it is settled, the call that settles it
    _settled: bool
    _wakers: list[Callable[[], object]]
    _read: Callable[[], R] | None
    _lock: threading.Lock
    _value: R | None
    _error: Exception | None
    _traceback: TracebackType | None  # of _error; each raise would add to the one of before
    _observed: Callable[[], object] | None  # called once, when the outcome has been read

    def __init__(self) -> None:
        raise TypeError("a Future cannot be constructed: the operations of meshes return them")

    def when_settled(self, wake: Callable[[], object]) -> None:
        """Calls ``wake`` once the future is settled: at once, or later on the connection thread. It must not block."""
        self._ensure_started()
        if not self._add_waker(wake):
            wake()

    def done(self) -> bool:
        """Whether the outcome is available, so that ``get()`` does not wait."""
        self._ensure_started()
        return self._settled

    def get(self, timeout: float | None = None) -> R:
        """Waits for the value and returns it, or raises the operation's error.

        After ``timeout`` seconds it raises ``TimeoutError``, and the operation continues. In the thread of a running
        event loop it blocks the loop and warns: use ``await`` there.
        """
        __tracebackhide__ = True  # for IPython and pytest
        if timeout is not None:
            _check_timeout(timeout)
        self._ensure_started()
        if not self._settled:
            if asyncio._get_running_loop() is not None and not (_called_by_meshgate() or _called_by_plain_cell()):
                warn_caller(_GET_ON_LOOP_WARNING)
            self._wait(timeout)
        return self._result()

    def result(self, timeout: float | None = None) -> R:
        """The same as ``get``."""
        return self.get(timeout)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """What ``get(timeout)`` would raise, including its ``TimeoutError``; None if it would return."""
        try:
            self.get(timeout)
        except Exception as error:  # noqa: BLE001 - returned to the caller
            return error
        return None

    def __await__(self) -> Generator[object, None, R]:
        loop = asyncio._get_running_loop()
        if loop is None:
            raise ValueError("a meshgate future can only be awaited on an asyncio event loop; use get() elsewhere")
        self._ensure_started()
        if not self._settled:
            arrival: asyncio.Future[None] = loop.create_future()
            wake = LoopWaker(loop, arrival)
            try:
                self.when_settled(wake)
                yield from arrival
            finally:
                self._remove_waker(wake)
        return self._result()

    def as_asyncio(self) -> asyncio.Future[R]:
        """An ``asyncio.Future`` of the running loop with the same outcome. Cancelling it cancels nothing remote."""
        loop = asyncio._get_running_loop()
        if loop is None:
            raise RuntimeError("as_asyncio() requires a running asyncio event loop.")
        self._ensure_started()
        observed: asyncio.Future[R] = loop.create_future()
        if self._settled:
            self._copy_result_to(observed)
        else:
            arrival: asyncio.Future[None] = loop.create_future()
            arrival.add_done_callback(lambda _: self._copy_result_to(observed))
            wake = LoopWaker(loop, arrival)
            observed.add_done_callback(lambda _: self._remove_waker(wake))
            self.when_settled(wake)
        return observed

    def __repr__(self) -> str:
        call = self._call
        if call is not None:
            return f"<{type(self).__name__} {call.endpoint}: {call.waits_for()}>"
        return f"<{type(self).__name__} {'done' if self._settled else 'pending'}>"

    def _repr_html_(self) -> str:
        """For notebooks: the state and, once the program has read it, the outcome. Neither waits nor reads."""
        call = self._call
        if call is not None:
            return card(f"Future {call.endpoint}", {"state": "pending", "waits for": call.waits_for()})
        if not self._settled or self._read is not None:
            return card("Future", {"state": "done; get() returns the result" if self._settled else "pending"})
        if self._error is not None:
            error = f"{type(self._error).__name__}: {self._error}"
            return card("Future", {"state": "failed", "error": error[:MOST_ERROR]})
        if isinstance(self._value, ValueMesh):
            return card("Future", {"state": "done"}, [self._value._repr_html_()])
        return card("Future", {"state": "done", "value": repr_of(self._value)})

    def validate_state(self) -> None:
        """Asserts what holds between any two calls. For tests."""
        assert not self._settled or not self._wakers, "a settled future still has waiters"
        assert self._settled or (self._read is None and self._value is None and self._error is None)
        assert self._read is None or (self._value is None and self._error is None), "read, but kept its reader"
        assert not self._lock.locked() or self._settled, "the lock is held while nothing is read"

    def _ensure_started(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            start(self)

    def _copy_result_to(self, observed: asyncio.Future[R]) -> None:
        if observed.done():
            return
        try:
            observed.set_result(self._result())
        except StopIteration as error:
            failure = RuntimeError("the remote call raised StopIteration")
            failure.__cause__ = error
            observed.set_exception(failure)
        except Exception as error:  # noqa: BLE001 - passed on to the observer
            observed.set_exception(error)

    def _wait(self, timeout: float | None) -> None:
        """Blocks until settled. Each waiter has a lock of its own, so interrupting one leaves the others alone."""
        arrived = threading.Lock()
        arrived.acquire()
        wake = arrived.release
        try:
            if not self._add_waker(wake):
                return
            if not arrived.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
                call = self._call
                known = f"{call.waits_for()}; " if call is not None else ""
                raise TimeoutError(f"no result within {timeout} s; {known}the operation continues, call get() again")
        finally:
            self._remove_waker(wake)

    def _add_waker(self, wake: Callable[[], object]) -> bool:
        """Registers ``wake`` to be called on settling. Returns False, and does nothing, if already settled."""
        settled = self._settled
        if not settled:
            self._wakers.append(wake)
            # If it was settled meanwhile and this waker is still here, it will not be called.
            settled = self._settled and self._remove_waker(wake)
        return not settled

    def _remove_waker(self, wake: Callable[[], object]) -> bool:
        """Removes ``wake``. Returns whether it was there."""
        try:
            self._wakers.remove(wake)
        except ValueError:
            return False
        return True

    def _result(self) -> R:
        """Returns the value or raises the error. The first call reads it; if interrupted, the next call reads again."""
        __tracebackhide__ = True
        if self._read is not None:
            with self._lock:
                if self._read is not None:
                    try:
                        self._value = self._read()
                    except Exception as error:  # noqa: BLE001 - kept: every observer gets the same one
                        self._error = error
                        self._traceback = _foreign_part(error)
                    self._read = None
            observed, self._observed = self._observed, None
            if observed is not None:
                observed()
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)
        return cast("R", self._value)


class FutureProxy(Future[R]):
    """A future and the operation's side of it, which settles it on the connection thread."""

    __slots__ = ()

    def __init__(self, start: Callable[[FutureProxy[R]], None] | None = None, *, call: Awaited | None = None) -> None:
        """``start(future)``, if given, is called at the first use of the future and must cause it to be settled.
        ``call`` says, until then, what it waits for."""
        self._start = start
        self._call = call
        self._settled = False
        self._wakers = []
        self._read = None
        self._lock = threading.Lock()
        self._value = None
        self._error = None
        self._traceback = None
        self._observed = None

    @classmethod
    def resolved(cls, value: R) -> FutureProxy[R]:
        """A future that has its value."""
        future = cls()
        future.settle(lambda: value)
        return future

    @classmethod
    def failed(cls, error: Exception) -> FutureProxy[R]:
        """A future that has failed."""
        future = cls()
        future.fail(error)
        return future

    def settle(self, read: Callable[[], R]) -> None:
        """Ends the wait. ``read`` returns the value or raises; the first observer calls it in its own thread.

        Does nothing if the future is already settled.
        """
        if self._settled:
            return
        for wake in self._set(read):
            wake()

    def _set(self, read: Callable[[], R]) -> list[Callable[[], object]]:
        if not self._lock.acquire(blocking=False):
            return []  # another thread settles it now, or a reader reads it
        try:
            if self._settled:
                return []
            self._read = read
            self._settled = True
            self._call = None  # which refers to this future
        finally:
            self._lock.release()
        wakers = []
        with contextlib.suppress(IndexError):
            while True:  # an observer may remove its own meanwhile
                wakers.append(self._wakers.pop(0))
        return wakers

    def start_with(self, start: Callable[[FutureProxy[R]], None]) -> None:
        """``start(future)`` is called at the first use of the future and must cause it to be settled."""
        self._start = start

    def when_read(self, observed: Callable[[], object]) -> None:
        """Calls ``observed`` once the program has read the outcome, in the thread that did."""
        self._observed = observed

    def fail(self, error: Exception) -> None:
        """Settles with ``error``."""

        traceback = error.__traceback__

        def read() -> R:
            raise error.with_traceback(traceback)

        self.settle(read)

    def fail_after_fork(self, error: Exception) -> None:
        """Settles with ``error`` in the child of a fork, where another thread may have held the lock."""
        if not self._settled:
            self._lock = threading.Lock()
            self._wakers = []
            self.fail(error)


def _check_timeout(timeout: float) -> None:
    if not math.isfinite(timeout) or timeout < 0:
        raise ValueError(f"invalid timeout {timeout}: expected a non-negative, finite number of seconds")


def _foreign_part(error: Exception) -> TracebackType | None:
    """The traceback of what a remote operation raised, without the frames of meshgate that made it: users look for
    their own. Errors of other kinds are defects or come from the user's classes, and keep all frames."""
    traceback = error.__traceback__
    while isinstance(error, MeshgateError) and traceback is not None and is_ours(traceback.tb_frame):
        traceback = traceback.tb_next
    return traceback


def _called_by_meshgate() -> bool:
    """Whether a function of meshgate, such as ``job.state()``, called the method of this module: its caller knows that
    it blocks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return frame is not None and is_ours(frame)


def _called_by_plain_cell() -> bool:
    """Whether code of a notebook calls, outside any ``async def``. A notebook runs its cells on an event loop, where
    nothing else of the user's waits for such a cell."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_flags & inspect.CO_COROUTINE:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("IPython.")
