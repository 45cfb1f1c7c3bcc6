"""``returns_future``: an ``async def`` that returns a ``Future``, on the driver and, as Monarch's own, in actors.

The first observer of the future runs the body: ``await`` on its own event loop, ``get()`` on a loop of its own.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, cast

from meshgate.actors import api
from meshgate.session.futures import Future, FutureProxy

P = ParamSpec("P")
R = TypeVar("R")

_running: set[asyncio.Task[Any]] = set()  # asyncio holds tasks weakly


def returns_future(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Future[R]]:
    """Makes an async function return a ``Future``, for callers that use ``get()`` and callers that ``await``.

    Calling the function does not start its body. If a ``get()`` that runs the body times out or is interrupted, the
    body is cancelled; cancelling an ``await`` ends that wait only.
    """
    if not inspect.iscoroutinefunction(function):
        raise TypeError("returns_future requires an async function")

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Future[R]:
        if api.inside_actor():
            return cast("Future[R]", api.monarchs_returns_future(function)(*args, **kwargs))
        return _BodyFuture(function(*args, **kwargs))

    return wrapped


class _BodyFuture(FutureProxy[R]):
    """A future whose first observer runs ``body``, in a copy of the creator's context."""

    __slots__ = ("_body", "_close_unstarted", "_context", "_thread")

    def __init__(self, body: Coroutine[Any, Any, R]) -> None:
        super().__init__(start=cast("Any", _BodyFuture._begin))  # not bound: a future must not refer to itself
        self._body = body
        self._context = contextvars.copy_context()
        self._close_unstarted = weakref.finalize(self, body.close)
        self._thread = 0  # the thread that runs the body

    def done(self) -> bool:
        """Whether the outcome is available. Does not start the body."""
        return self._settled

    def get(self, timeout: float | None = None) -> R:
        if self._close_unstarted.detach() is None:  # another observer runs the body, or has run it
            if self._thread == threading.get_ident() and not self._settled and timeout is None:
                raise RuntimeError(
                    "get() would never return: this thread runs the body of the future, which cannot continue "
                    "meanwhile. Do not call it in a signal handler that interrupts the body, or in the body"
                )
            return super().get(timeout)
        if asyncio._get_running_loop() is None:
            self._run(timeout)
        else:  # a second loop cannot run in this thread
            helper = threading.Thread(target=self._run, args=(timeout,), name="meshgate-returns-future", daemon=True)
            helper.start()
            helper.join()
        return self._result()

    def _begin(self) -> None:
        """Runs the body as a task of the running loop or, without one, on a thread of its own."""
        if self._close_unstarted.detach() is None:
            return
        loop = asyncio._get_running_loop()
        if loop is None:
            threading.Thread(target=self._run, args=(None,), name="meshgate-returns-future", daemon=True).start()
            return
        self._thread = threading.get_ident()
        task = self._context.run(loop.create_task, self._body)
        _running.add(task)
        task.add_done_callback(_running.discard)
        task.add_done_callback(self._settle_from)

    def _settle_from(self, task: asyncio.Task[R]) -> None:
        self.settle(task.result)

    def _run(self, timeout: float | None) -> None:
        """Runs the body until it is done, as ``asyncio.run`` does, and settles this future."""
        self._thread = threading.get_ident()
        try:
            value = self._context.run(asyncio.run, self._observe(timeout))
        except (KeyboardInterrupt, SystemExit):
            self.settle(_raise_cancelled)
            raise
        except asyncio.CancelledError:
            self.settle(_raise_cancelled)
        except Exception as error:  # noqa: BLE001 - every observer gets it
            self.fail(error)
        else:
            self.settle(lambda: value)

    async def _observe(self, timeout: float | None) -> R:
        if timeout is None:
            return await self._body
        task = asyncio.ensure_future(self._body)
        await asyncio.wait({task}, timeout=timeout)
        if task.done():
            return task.result()
        self.fail(TimeoutError(f"no result within {timeout} s; the body is cancelled"))
        task.cancel()
        await asyncio.wait({task})
        return task.result()


def _raise_cancelled() -> Any:
    raise asyncio.CancelledError
