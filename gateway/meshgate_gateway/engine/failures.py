"""How requests fail: exceptions inside the engine, Failure messages to the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from meshgate_gateway.engine.interfaces import CONTROL_STREAM, Send
from meshgate_gateway.engine.monarch.interface import BootstrapFailed, error_text
from meshgate_wire.messages import Failed, Failure, Header, ObjectFailed, stream_of

log = logging.getLogger(__name__)


class RequestFailed(Exception):
    """A request fails with ``failure``, which the client receives, and with the ``buffers`` that it refers to."""

    def __init__(self, failure: Failure, buffers: Sequence[bytes | memoryview] = ()) -> None:
        super().__init__(failure.message)
        self.failure, self.buffers = failure, buffers


def invalid(message: str) -> RequestFailed:
    """The error of a request that is wrong in itself."""
    return RequestFailed(Failure(kind="invalid", message=message))


def stale_code(message: str, hosts: Iterable[str] = ()) -> RequestFailed:
    """The error raised when ``hosts`` cannot get the requested version of the code."""
    return RequestFailed(Failure(kind="stale_code", message=message, hosts=dict(enumerate(hosts))))


def failure_of(error: BaseException) -> Failure:
    """How the client sees ``error``."""
    if isinstance(error, RequestFailed):
        return error.failure
    if isinstance(error, BootstrapFailed):
        return Failure(kind="actor", message=str(error))
    if isinstance(error, RuntimeError):
        return Failure(kind="supervision", message=error_text(error))
    if isinstance(error, (ValueError, TypeError, OSError)):
        return Failure(kind="invalid", message=error_text(error))
    return Failure(kind="internal", message=f"{type(error).__name__}: {error}")


class FailureReports:
    """Answers requests that failed. ``define(number, failure)`` records that an object could not be created."""

    def __init__(self, define: Callable[[int, Failure], None], send: Send) -> None:
        self._define, self._send = define, send

    def report(self, header: Header, error: BaseException) -> None:
        """Answers ``header`` with ``error``. Raises it again if it ends this process or task."""
        if isinstance(error, (KeyboardInterrupt, SystemExit, asyncio.CancelledError)):
            raise error
        failure = failure_of(error)
        if failure.kind == "internal":
            log.error("%s failed", type(header).__name__, exc_info=error)
        call, number = getattr(header, "call", None), getattr(header, "object", None)
        if call is not None:
            target = getattr(header, "target", None)
            stream = stream_of(target.object) if target is not None else CONTROL_STREAM
            if keep := getattr(header, "keep", 0):
                self._define(keep, failure)  # the client knows it from the failure of the call
            self._send(Failed(call=call, failure=failure), getattr(error, "buffers", ()), stream=stream)
        elif number is not None:
            self.object_failed(number, failure)
        else:
            log.warning("%s failed: %s", type(header).__name__, failure.message)

    def object_failed(self, number: int, failure: Failure, ended: Callable[[], None] = lambda: None) -> None:
        """Replaces object ``number`` by ``failure``, for the client and for every request that needs the object.

        ``ended`` fails what is under way: once the client knows why, and while the object can still be found.
        """
        self._send(ObjectFailed(object=number, failure=failure))
        ended()
        self._define(number, failure)

    async def guard(self, header: Header, work: Awaitable[None]) -> None:
        """Awaits ``work`` and reports what it raises as the answer to ``header``."""
        try:
            await work
        except BaseException as error:  # noqa: BLE001 - Monarch's panics derive from BaseException alone
            self.report(header, error)
