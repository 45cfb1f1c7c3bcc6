"""The future of a remote operation: what ``call()`` and ``stop()`` return.

It follows Monarch's rules. Any number of observers, in any threads and on any event loops, see the same outcome. A
timeout, a cancelled ``await`` or, in a program, a Ctrl-C ends the wait and nothing else: the operation continues, and a
later ``get()`` or ``await`` still returns its outcome. In an interactive Python, Ctrl-C in ``get()`` also cancels the
call, unless its session is detached: what is typed next may have to wait behind it.

The connection thread only *settles* a future. The first observer reads (unpickles) the value in its own thread, so that
a large result never holds up the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeAlias, TypeVar, cast

from meshgate.caller import is_interactive, is_ours, note_wait, report_interrupt, warn_caller
from meshgate.errors import MeshgateError, UnpicklableArgument
from meshgate.html import card, repr_of
from meshgate.monarch_classes import SeenAsMonarchs
from meshgate.shapes.value_mesh import ValueMesh
from meshgate.suggestions import OPERATORS, did_you_mean

log = logging.getLogger("meshgate.session.futures")

INTERRUPT_LAG = 0.2  # seconds until an interrupt ends the `await` of a cell


class LoopWaker:
    """Settles ``arrival`` on its own loop, from any thread, such as the connection's. Does nothing if either is over
    already."""

    __slots__ = ("_arrival", "_loop", "_queue")

    def __init__(self, loop: asyncio.AbstractEventLoop, arrival: asyncio.Future[None]) -> None:
        self._loop = loop
        self._arrival = arrival
        self._queue = arrival_queues.get(loop) or arrival_queues.setdefault(loop, _ArrivalQueue())

    def __call__(self) -> None:
        self._queue.put(self._arrival, self._loop)


class _ArrivalQueue:
    """Arrivals to settle on one loop. Waking a loop is a system call, so one wake-up serves all that are queued."""

    __slots__ = ("_arrivals", "_woken")

    def __init__(self) -> None:
        self._arrivals: deque[asyncio.Future[None]] = deque()
        self._woken = False

    def put(self, arrival: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
        self._arrivals.append(arrival)
        if self._woken:  # _settle_all has not started yet, so it will find this arrival
            return
        self._woken = True
        try:
            loop.call_soon_threadsafe(self._settle_all)
        except BaseException as error:
            self._woken = False
            if not (isinstance(error, RuntimeError) and loop.is_closed()):
                raise
            self._arrivals.clear()

    def _settle_all(self) -> None:
        self._woken = False
        while self._arrivals:
            arrival = self._arrivals.popleft()
            if not arrival.done():
                arrival.set_result(None)


def _keep_waking(loop: asyncio.AbstractEventLoop, arrival: asyncio.Future[None]) -> None:
    """Wakes ``loop`` again and again until ``arrival`` is over, for Interrupt Kernel: ipykernel's handler of SIGINT
    adds a callback to the loop without waking it, because tornado's ``add_callback`` finds itself in its thread."""
    if not arrival.done():
        loop.call_later(INTERRUPT_LAG, _keep_waking, loop, arrival)


arrival_queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _ArrivalQueue] = weakref.WeakKeyDictionary()


R = TypeVar("R")
MOST_ERROR = 2000  # characters of an error in a notebook
CONTINUES = "the operation continues, call get() again"

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

    def about_to_wait(self) -> None:
        """A thread begins to wait for it."""

    def cancel(self, *, interrupted: bool = False) -> bool:
        """Asks the gateway to cancel it. Returns whether it can be. ``interrupted``: by Ctrl-C, which the calls of a
        detached session outlive."""


_Result: TypeAlias = "tuple[R | None, Exception | None, TracebackType | None]"
"""The value, or the error and its traceback: each raise would add to the one of before."""


class Future(SeenAsMonarchs, Generic[R]):
    """The outcome of a remote operation, now or later. Only meshgate's operations create one."""

    __slots__ = (
        "__weakref__",
        "_call",
        "_lock",
        "_observed",
        "_reads",
        "_results",
        "_start",
        "_wakers",
    )

    _monarch_name = "Future"

    # A signal handler may interrupt any step and use the same future. So what happens once is one step of the
    # interpreter: of all that is appended to _reads and _results, the first item counts. _lock keeps two threads from
    # reading a result twice; a signal handler that interrupts the reading reads it for itself.
    _start: Callable[[Any], None] | None
    _call: Awaited | None  # until it is settled, the call that settles it
    _reads: list[Callable[[], R] | None]  # what reads the outcome: empty until it is settled, None once it was read
    _results: list[_Result[R]]  # empty until it was read
    _wakers: list[Callable[[], object]]
    _lock: threading.RLock
    _observed: Callable[[], object] | None  # called once, when the outcome has been read

    def __init__(self) -> None:
        raise TypeError("a Future cannot be constructed: Future objects are returned by Monarch operations on meshes")

    def when_settled(self, wake: Callable[[], object]) -> None:
        """Calls ``wake`` once the future is settled: at once, or later on the connection thread. It must not block."""
        self._ensure_started()
        if not self._add_waker(wake):
            wake()

    def done(self) -> bool:
        """Whether the outcome is available, so that ``get()`` does not wait."""
        self._ensure_started()
        return self._claim()

    def get(self, timeout: float | None = None) -> R:
        """Waits for the value and returns it, or raises the operation's error.

        After ``timeout`` seconds it raises ``TimeoutError``, and the operation continues. In the thread of a running
        event loop it blocks the loop and warns: use ``await`` there.
        """
        __tracebackhide__ = True  # for IPython and pytest
        if timeout is not None:
            _check_timeout(timeout)
        self._ensure_started()
        if not self._claim():
            if asyncio._get_running_loop() is not None and not (_called_by_meshgate() or _called_by_plain_cell()):
                warn_caller(_GET_ON_LOOP_WARNING)
            try:
                self._wait(timeout)
            except KeyboardInterrupt as interrupt:
                if (call := self._call) is not None:
                    note_wait(interrupt, f"while waiting for {call.endpoint}: {call.waits_for()}")
                    if is_interactive():
                        report_interrupt(interrupt, _cancel_interrupted(call))
                raise
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

    def cancel(self) -> bool:
        """Asks the gateway to cancel the call, on all its ranks. Returns False if the outcome is here, or if it is no
        call of an endpoint.

        ``get()`` and ``await`` then raise ``CallCancelledError``, unless the outcome was on its way already. The ranks
        end an ``async`` endpoint as asyncio ends a task, with ``CancelledError`` where it awaits, and do not begin a
        call that waits for its turn. Any other function runs to its end, and its result is dropped; a line says which
        ranks are still busy after two seconds.
        """
        self._ensure_started()
        call = self._call
        return call is not None and not self._claim() and call.cancel()

    def __await__(self) -> Generator[object, None, R]:
        loop = asyncio._get_running_loop()
        if loop is None:
            raise ValueError("a meshgate future can only be awaited on an asyncio event loop; use get() elsewhere")
        self._ensure_started()
        settled = self._claim()
        while not settled:
            arrival: asyncio.Future[None] = loop.create_future()
            wake = LoopWaker(loop, arrival)
            try:
                if self._add_waker(wake):
                    if "ipykernel" in sys.modules:
                        _keep_waking(loop, arrival)
                    yield from arrival
                settled = self._claim()
            finally:
                self._remove_waker(wake)
                arrival.cancel()
        return self._result()

    def as_asyncio(self) -> asyncio.Future[R]:
        """An ``asyncio.Future`` of the running loop with the same outcome. Cancelling it cancels nothing remote."""
        loop = asyncio._get_running_loop()
        if loop is None:
            raise RuntimeError("as_asyncio() requires a running asyncio event loop.")
        self._ensure_started()
        observed: asyncio.Future[R] = loop.create_future()
        self._copy_when_settled(loop, observed)
        return observed

    if not TYPE_CHECKING:  # which reports these mistakes itself

        def __getattr__(self, attr):
            if attr.startswith("_"):
                raise AttributeError(attr)
            similar = "" if hasattr(ValueMesh, attr) else did_you_mean(attr, dir(Future))
            meant = similar or f": read the value of the call first, .get().{attr}"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {attr!r}{meant}", name=attr)

        def _is_no_value(self, *_operands):
            raise TypeError("a future is not the value of the call: read that first, with .get() or await")

        locals().update(dict.fromkeys((*OPERATORS, "__getitem__"), _is_no_value))  # iteration calls the last one

        def __format__(self, spec):
            return self._is_no_value() if spec else str(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnpicklableArgument(
            "a future is not its value. Pass future.get(); or, to leave the value in the cluster, call its endpoint "
            "with keep() and pass the result of that"
        )

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
        if not self._results:
            return card("Future", {"state": "done; get() returns the result" if self._settled else "pending"})
        value, error, _ = self._results[0]
        if error is not None:
            text = f"{type(error).__name__}: {error}"
            return card("Future", {"state": "failed", "error": text[:MOST_ERROR]})
        if isinstance(value, ValueMesh):
            return card("Future", {"state": "done"}, [value._repr_html_()])
        return card("Future", {"state": "done", "value": repr_of(value)})

    def validate_state(self) -> None:
        """Asserts what holds between any two calls. For tests."""
        assert not self._settled or not self._wakers, "a settled future still has waiters"
        assert self._settled or not self._results, "read, but not settled"
        assert not self._results or self._reads[0] is None, "read, but kept its reader"

    @property
    def _settled(self) -> bool:
        return bool(self._reads)

    @property
    def _was_read(self) -> bool:
        return bool(self._results)

    def _claim(self) -> bool:
        """Whether it is settled. An observer asks before it stops to wait."""
        return bool(self._reads)

    def _ensure_started(self) -> None:
        start = self._start
        if start is not None:
            if not self._settled:
                start(self)
            self._start = None  # only now: if Ctrl-C has interrupted the start, the next use starts again

    def _copy_when_settled(self, loop: asyncio.AbstractEventLoop, observed: asyncio.Future[R]) -> None:
        arrival: asyncio.Future[None] = loop.create_future()
        wake = LoopWaker(loop, arrival)

        def arrived(_: object) -> None:
            if not observed.done() and self._claim():
                self._copy_result_to(observed)
            self._remove_waker(wake)
            if not observed.done():
                self._copy_when_settled(loop, observed)

        if self._claim():
            self._copy_result_to(observed)
            return
        arrival.add_done_callback(arrived)
        observed.add_done_callback(lambda _: self._remove_waker(wake))
        if not self._add_waker(wake):
            wake()

    def _copy_result_to(self, observed: asyncio.Future[R]) -> None:
        try:
            observed.set_result(self._result())
        except StopIteration as error:
            failure = RuntimeError("the remote call raised StopIteration")
            failure.__cause__ = error
            observed.set_exception(failure)
        except asyncio.CancelledError:  # the body of a ``returns_future`` function was cancelled
            observed.cancel()
        except Exception as error:  # noqa: BLE001 - passed on to the observer
            observed.set_exception(error)

    def _wait(self, timeout: float | None) -> None:
        """Blocks until settled. Each waiter has a lock of its own, so interrupting one leaves the others alone."""
        deadline = None if timeout is None else time.monotonic() + timeout
        wake = _ThreadWaker()
        try:
            if not self._add_waker(wake):
                return
            if (call := self._call) is not None:
                call.about_to_wait()
            while wake.wait(deadline):
                if self._claim():
                    return
            if not self._claim():
                call = self._call
                known = f"{call.waits_for()}; " if call is not None else ""
                raise TimeoutError(f"no result within {timeout} s; {known}{CONTINUES}")
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
        if not self._results:
            with self._lock:
                read = self._reads[0]
                if read is not None:
                    self._results.append(_outcome_of(read))
                    del self._results[1:]  # a signal handler was faster
                    self._reads[:] = (None,)
            observed, self._observed = self._observed, None
            if observed is not None:
                observed()
        value, error, traceback = self._results[0]
        if error is not None:
            raise error.with_traceback(traceback)
        return cast("R", value)


def _cancel_interrupted(call: Awaited) -> str:
    """Returns what becomes of a call whose wait Ctrl-C has ended."""
    try:
        return "The call is cancelled" if call.cancel(interrupted=True) else "What it waited for continues"
    except MeshgateError as error:
        return f"The session has ended: {error}"


def _outcome_of(read: Callable[[], R]) -> _Result[R]:
    __tracebackhide__ = True
    try:
        return read(), None, None
    except Exception as error:  # noqa: BLE001 - kept: every observer gets the same one
        return None, error, _foreign_part(error)


class _ThreadWaker:
    """Wakes one thread, any number of times."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is awake
            self._lock.release()

    def wait(self, deadline: float | None) -> bool:
        """Waits to be woken. Returns whether that was before ``deadline``, a time of ``time.monotonic``."""
        if deadline is None:
            return self._lock.acquire()
        left = max(0.0, deadline - time.monotonic())
        return self._lock.acquire(timeout=min(left, threading.TIMEOUT_MAX))


class FutureProxy(Future[R]):
    """A future and the operation's side of it, which settles it on the connection thread."""

    __slots__ = ()

    def __init__(self, start: Callable[[FutureProxy[R]], None] | None = None, *, call: Awaited | None = None) -> None:
        """``start(future)``, if given, is called at the first use of the future and must cause it to be settled. It is
        called again if that use was interrupted, and may be by two threads at once. ``call`` says, until then, what it
        waits for."""
        self._start = start
        self._call = call
        self._reads = []
        self._results = []
        self._wakers = []
        self._lock = threading.RLock()
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
        if self._reads:
            return
        self._reads.append(read)  # whichever thread was faster: the first counts, and both may wake the observers
        self._call = None  # which refers to this future
        while True:
            try:
                wake = self._wakers.pop(0)
            except IndexError:  # an observer may remove its own meanwhile
                return
            try:
                wake()
            except Exception:  # others wait
                log.exception("a callback of a result that has arrived failed: %r", wake)

    def start_with(self, start: Callable[[FutureProxy[R]], None]) -> None:
        """As with the ``start`` of the constructor."""
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
            self._lock = threading.RLock()
            self._wakers = []
            self.fail(error)


def _check_timeout(timeout: float) -> None:
    try:
        valid = math.isfinite(timeout) and timeout >= 0
    except TypeError:
        raise TypeError(f"invalid timeout {timeout!r}: expected a number of seconds") from None
    if not valid:
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
