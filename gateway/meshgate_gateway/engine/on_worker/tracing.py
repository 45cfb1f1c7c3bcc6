"""OpenTelemetry spans of endpoints, as children of the caller's span. Delivered by value.

Monarch opens a span of its own around each endpoint, with a function that it looks up by name. The first call with a
trace replaces that function in this process by one that opens an OpenTelemetry span as well, if the message at hand has
a trace. Endpoints that are declared with ``instrument=False`` have neither.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def with_trace(value: Any, carrier: Mapping[str, str], span_functions: Sequence[str], context_variable: str) -> Any:
    """Returns ``value``, and makes the endpoint that gets it run in a span, whose parent is in ``carrier``.

    For use while the message is unpickled, when ``context_variable`` has its context already.
    """
    try:
        import opentelemetry.trace  # noqa: F401, PLC0415 - resolved on the worker
    except ImportError:
        return value
    current = pkgutil.resolve_name(context_variable)
    variable = contextvars.ContextVar[Any]("meshgate_trace", default=(None, None))
    pending = vars(sys).setdefault("_meshgate_trace", variable)  # one for all copies of this function
    for name in span_functions:
        module, _, function = name.partition(":")
        opener = getattr(sys.modules.get(module), function, None)
        if opener is not None and not hasattr(opener, "_meshgate_traces"):
            setattr(sys.modules[module], function, traced(opener, pending, current))
    pending.set((current.get(), carrier))
    return value


def traced(
    opener: Callable[..., Any], pending: contextvars.ContextVar[Any], current: contextvars.ContextVar[Any]
) -> Callable[..., Any]:
    """``opener``, which opens Monarch's span, and an OpenTelemetry span if the message at hand has a trace."""

    @functools.wraps(opener)
    def open_span(method: str, *args: Any, **kwargs: Any) -> Any:
        span = opener(method, *args, **kwargs)
        context, carrier = pending.get()
        if carrier is None or context is not current.get():
            return span  # the trace was that of an earlier message
        pending.set((None, None))
        return both_spans(span, method, carrier, context)

    open_span._meshgate_traces = True  # type: ignore[attr-defined]
    return open_span


@contextlib.contextmanager
def both_spans(span: Any, method: str, carrier: Mapping[str, str], message: Any) -> Iterator[None]:
    """An exception that leaves the span is recorded in it."""
    from opentelemetry import context, propagate, trace  # noqa: PLC0415 - resolved on the worker

    actor = message.actor_instance
    attributes = {"rpc.system": "meshgate", "rpc.service": actor.name, "rpc.method": method}
    attributes["meshgate.rank"] = message.message_rank.rank
    token = context.attach(propagate.extract(carrier))  # with its baggage
    try:
        tracer = trace.get_tracer("meshgate")
        name = f"{actor.name}.{method}"
        with span, tracer.start_as_current_span(name, kind=trace.SpanKind.SERVER, attributes=attributes):
            yield
    finally:
        context.detach(token)
