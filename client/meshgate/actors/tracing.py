"""OpenTelemetry spans of calls, if the program has configured a tracer provider; else nothing, at next to no cost.

Needs no OpenTelemetry: a program that has configured a provider has imported it.
"""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import Any

NO_SPAN = contextlib.nullcontext()


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


def start_span(mesh: str, endpoint: str, adverb: str, ranks: int) -> CallSpan | None:
    """The span of a call, a child of the current one. None if the program has configured no tracer provider."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    from opentelemetry import propagate  # noqa: PLC0415 - it may not be installed

    attributes = {
        "rpc.system": "meshgate",
        "rpc.service": mesh,
        "rpc.method": endpoint,
        "meshgate.adverb": adverb,
        "meshgate.ranks": ranks,
    }
    tracer = trace.get_tracer("meshgate", tracer_provider=provider)
    span = tracer.start_span(f"{mesh}.{endpoint}", kind=trace.SpanKind.CLIENT, attributes=attributes)
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context=trace.set_span_in_context(span))
    return CallSpan(span, trace, carrier)
