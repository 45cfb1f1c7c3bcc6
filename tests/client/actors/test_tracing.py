"""When a call has a span, and what the gateway gets of it."""

from __future__ import annotations

import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshgate.actors.tracing import start_span


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def test_a_program_without_a_provider_has_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    assert start_span("trainers", "step", "call", 2) is None
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", trace.NoOpTracerProvider())
    assert start_span("trainers", "step", "call", 2) is None
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert start_span("trainers", "step", "call", 2) is None
    assert "opentelemetry.trace" not in sys.modules


def test_the_carrier_names_the_span(exporter: InMemorySpanExporter) -> None:
    span = start_span("trainers", "step", "call", 2)
    assert span is not None
    span.end()
    (ended,) = exporter.get_finished_spans()
    assert ended.context is not None
    named = f"00-{ended.context.trace_id:032x}-{ended.context.span_id:016x}-"
    assert span.carrier["traceparent"].startswith(named)
    assert ended.status.status_code is trace.StatusCode.UNSET


def test_a_request_that_fails_ends_the_span_with_its_reason(exporter: InMemorySpanExporter) -> None:
    span = start_span("trainers", "step", "call", 2)
    assert span is not None
    with pytest.raises(ValueError, match="closed"), span:
        raise ValueError("closed")
    (ended,) = exporter.get_finished_spans()
    assert (ended.status.status_code, ended.status.description) == (trace.StatusCode.ERROR, "closed")
