"""Spans: Monarch's ``span``, ``traced`` and ``get_meter`` without torchmonarch, and the OpenTelemetry spans of calls.

The stand-ins record nothing here; in code that travels to workers by value they become Monarch's own. Calls have spans
if the program has configured a tracer provider, and cost next to nothing otherwise. That needs no OpenTelemetry: a
program that has configured a provider has imported it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence, Sized
from types import TracebackType
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])
NO_SPAN = contextlib.nullcontext()


def span(name: str) -> contextlib.AbstractContextManager[Any]:
    """A context manager that records a telemetry span in an actor."""
    return contextlib.nullcontext(name)


@overload
def traced(fn: F) -> F: ...


@overload
def traced(*, name: str | None = None) -> Callable[[F], F]: ...


def traced(fn: Any = None, *, name: str | None = None) -> Any:
    """Decorates a function, async or not, so that each call of it in an actor is a span named after it."""
    if fn is None:
        return functools.partial(traced, name=name)
    span_name = name if name is not None else fn.__name__
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def call(*args: Any, **kwargs: Any) -> Any:
            with span(span_name):
                return await fn(*args, **kwargs)

        return call

    @functools.wraps(fn)
    def call_sync(*args: Any, **kwargs: Any) -> Any:
        with span(span_name):
            return fn(*args, **kwargs)

    return call_sync


class Instrument:
    """A counter or histogram that drops what it is given."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name

    def add(self, amount: float, attributes: Any = None, context: Any = None) -> None:
        """Drops ``amount``."""

    def record(self, amount: float, attributes: Any = None, context: Any = None) -> None:
        """Drops ``amount``."""


class Meter:
    """Creates the instruments that Monarch's meter has."""

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Instrument:
        return Instrument("create_counter", name)

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> Instrument:
        return Instrument("create_up_down_counter", name)

    def create_histogram(
        self,
        name: str,
        unit: str = "",
        description: str = "",
        *,
        explicit_bucket_boundaries_advisory: Sequence[float] | None = None,
    ) -> Instrument:
        return Instrument("create_histogram", name)


def get_meter() -> Meter:
    """The OpenTelemetry meter of an actor's process."""
    return Meter()


TRACE_MODULE = "opentelemetry.trace"  # a program that has not imported it traces nothing
PROVIDER_IN_ENVIRONMENT = "OTEL_PYTHON_TRACER_PROVIDER" in os.environ  # OpenTelemetry then loads one by itself


class CallSpan:
    """The span of one call. ``carrier`` is its context, in the form that the program's propagator gives it."""

    __slots__ = ("_span", "_trace", "carrier")

    def __init__(self, span: Any, trace: Any, carrier: dict[str, str]) -> None:
        self._span, self._trace, self.carrier = span, trace, carrier

    def __enter__(self) -> None:
        """Around the request: one that fails ends the span."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.failed(str(error))
            self.end()

    def failed(self, reason: str) -> None:
        """The call has failed. The exception itself is recorded where it was raised: on the rank."""
        self._span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, reason))

    def end(self) -> None:
        self._span.end()


def start_span(label: str, adverb: str, ranks: Sized) -> CallSpan | None:
    """The span of a call of ``label``, ``mesh.endpoint``, on so many ranks, which are counted if there is one.

    It is a child of the current span. None if the program has configured no tracer provider.
    """
    trace = sys.modules.get(TRACE_MODULE)
    if trace is None:
        return None
    # Without a provider, ``get_tracer_provider`` reads the environment, which takes a seventh of the time of a call.
    if getattr(trace, "_TRACER_PROVIDER", trace) is None and not PROVIDER_IN_ENVIRONMENT:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    from opentelemetry import propagate  # noqa: PLC0415 - it may not be installed

    mesh, _, endpoint = label.rpartition(".")
    attributes = {
        "rpc.system": "meshgate",
        "rpc.service": mesh,
        "rpc.method": endpoint,
        "meshgate.adverb": adverb,
        "meshgate.ranks": len(ranks),
    }
    tracer = trace.get_tracer("meshgate", tracer_provider=provider)
    span = tracer.start_span(label, kind=trace.SpanKind.CLIENT, attributes=attributes)
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context=trace.set_span_in_context(span))
    return CallSpan(span, trace, carrier)
