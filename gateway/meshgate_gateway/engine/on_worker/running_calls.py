"""The calls of the program that run in this process, and how they are cancelled. Delivered by value.

A call has a number in its arguments: while they are unpickled, ``mark`` is called with it, or a batch gives it. Monarch
then looks the endpoint up, and gets a function that knows the number in its place. When the engine says that a call is
cancelled, a task that runs it is cancelled, as asyncio does; a call that has not begun raises before it begins. Nothing
ends a function that is not async once it runs.

Monarch takes a ``CancelledError`` of an endpoint for the stop of its actor: the actor ends, and all its calls wait
forever. So one that nothing has asked for, such as that of a cancelled task that the endpoint awaits, becomes an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import sys
import threading
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

MODULE = "_meshgate_calls"  # in ``sys.modules``, by which the pickled arguments reach ``mark``
UNASKED = (
    "the endpoint raised asyncio.CancelledError, although its call was not cancelled: a task or future that it awaited "
    "was. Catch the exception where the endpoint awaits it"
)
MAX_EARLY = 4096  # calls that were cancelled and have not begun, or had ended


class Running:
    """A call that runs in a task."""

    __slots__ = ("cancelled", "loop", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop, task: Any) -> None:
        self.loop, self.task, self.cancelled = loop, task, False


class Arriving(threading.local):
    """The call whose message this thread handles; 0: not one of the program's. ``next`` is that of the next message."""

    number = 0
    next = 0
    explicit = False  # whether the endpoint replies itself


class RunningCalls:
    """The calls of one process. ``cancel`` may be called from any thread."""

    def __init__(self) -> None:
        self.arriving = Arriving()
        self._running: dict[int, Running] = {}
        self._early: dict[int, None] = {}
        # In a task of a concurrent endpoint, its call; 0: it is not one of the program's.
        self._concurrent: contextvars.ContextVar[int] = contextvars.ContextVar("meshgate_call", default=0)

    def mark(self, number: int, arguments: Any = None) -> Any:
        """Returns ``arguments``, which are being unpickled, of call ``number``."""
        self.arriving.number = number
        return arguments

    def cancel(self, number: int) -> None:
        """Ends the call if it runs in a task or has not begun; it raises in either case, and its result is not used."""
        self._early[number] = None  # before looking: a call that begins now looks after it has been added
        if len(self._early) > MAX_EARLY:
            self._early.pop(next(iter(list(self._early))), None)
        if (running := self._running.get(number)) is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: the actor has ended
                running.loop.call_soon_threadsafe(self._cancel_task, number, running)

    def _cancel_task(self, number: int, running: Running) -> None:
        if self._running.get(number) is running:
            running.cancelled = True
            running.task.cancel()

    def prepared(self, explicit: bool) -> None:
        """This thread is about to unpickle the arguments of a message."""
        arriving = self.arriving
        arriving.number, arriving.next, arriving.explicit = arriving.next, 0, explicit

    def tracked(self, method: Any, is_coro: bool) -> Any:
        """What to run in place of ``method`` for the message that arrives on this thread."""
        arriving = self.arriving
        number, arriving.number = arriving.number, 0
        if number and arriving.explicit:
            if getattr(getattr(method, "func", None), "_monarch_concurrent_endpoint_wrapper", False):
                return functools.partial(self._start_concurrent, number, method)
            number = 0  # nothing waits for its end
        if is_coro:
            return functools.partial(self.run, number, method)
        return _refuse if number in self._early else method

    async def _start_concurrent(
        self, number: int, method: Callable[..., Awaitable[Any]], /, *args: Any, **kwargs: Any
    ) -> Any:
        token = self._concurrent.set(number)  # which the task that this starts inherits
        try:
            return await method(*args, **kwargs)
        finally:
            self._concurrent.reset(token)

    def tracked_in_task(self, call: Any) -> Any:
        """The same as ``tracked``, in the task of a concurrent endpoint."""
        number = self._concurrent.get()
        return functools.partial(self.run, number, call) if number else call

    async def run(self, number: int, method: Callable[..., Awaitable[Any]], /, *args: Any, **kwargs: Any) -> Any:
        task: Any = asyncio.current_task()
        running = Running(asyncio.get_running_loop(), task)
        if number:  # nothing cancels others
            self._running[number] = running
        try:
            if number in self._early:
                _refuse()
            return await method(*args, **kwargs)
        except asyncio.CancelledError as error:
            # Python 3.10 cannot tell whether the actor is being stopped: it is, unless the call was cancelled.
            stopped = task.cancelling() > running.cancelled if hasattr(task, "cancelling") else not running.cancelled
            if stopped or (self._concurrent.get() and not running.cancelled):  # Monarch reports the latter
                raise
            if running.cancelled:
                _refuse()
            trace = error.__traceback__.tb_next if error.__traceback__ else None  # without this frame
            raise RuntimeError(UNASKED) from error.with_traceback(trace)
        finally:
            self._running.pop(number, None)
            self._early.pop(number, None)
            if running.cancelled and hasattr(task, "uncancel"):
                task.uncancel()  # it runs other calls as well


def _refuse(*args: Any, **kwargs: Any) -> None:
    """Raises what ends a cancelled call. Its text is read by no caller."""
    raise RuntimeError("the call was cancelled") from None


def track_calls() -> RunningCalls:
    """From now on this process knows which calls of the program it runs."""
    from monarch._rust_bindings.monarch_hyperactor.actor import MethodSpecifier  # noqa: PLC0415 - on the worker
    from monarch._src.actor import concurrent  # noqa: PLC0415 - resolved on the worker
    from monarch._src.actor.actor_mesh import _Actor  # noqa: PLC0415 - resolved on the worker

    calls = RunningCalls()
    module: Any = ModuleType(MODULE)
    module.calls, module.mark = calls, calls.mark
    sys.modules[MODULE] = module
    prepare_now, lookup_now, report_now = _Actor._prepare, _Actor._lookup, _Actor._report_exception
    run_now, log_now, own = concurrent._run_endpoint, concurrent.log_endpoint_exception, RunningCalls.run.__code__
    explicit = MethodSpecifier.ExplicitPort

    def prepare(self: Any, ctx: Any, method: Any, *more: Any) -> Any:
        calls.prepared(isinstance(method, explicit))
        return prepare_now(self, ctx, method, *more)

    def lookup(self: Any, ctx: Any, name: str) -> Any:
        method, instrumented, is_coro = lookup_now(self, ctx, name)
        return calls.tracked(method, is_coro), instrumented, is_coro

    def as_monarch_shows_it(error: BaseException) -> BaseException:
        """Without the frame of ``run`` behind that of Monarch's handler."""
        traceback = error.__traceback__
        if traceback is not None and (inner := traceback.tb_next) is not None and inner.tb_frame.f_code is own:
            traceback.tb_next = inner.tb_next
        return error

    def report(self: Any, error: BaseException, *more: Any) -> Any:
        return report_now(self, as_monarch_shows_it(error), *more)

    def log(error: BaseException, *more: Any) -> Any:
        """What a concurrent endpoint does with an exception before it reports it."""
        return log_now(as_monarch_shows_it(error), *more)

    async def run_endpoint(instance: Any, port: Any, call: Any, **more: Any) -> None:
        tracked = calls.tracked_in_task(call) if more.get("forwards_exception") else call
        await run_now(instance, port, tracked, **more)

    _Actor._prepare, _Actor._lookup, _Actor._report_exception = prepare, lookup, report
    concurrent._run_endpoint, concurrent.log_endpoint_exception = run_endpoint, log
    return calls
