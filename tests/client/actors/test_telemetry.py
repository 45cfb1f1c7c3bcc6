"""``span``, ``traced`` and ``get_meter`` work on a laptop without torchmonarch, and are Monarch's on workers."""

from __future__ import annotations

import asyncio
import inspect
import sys

import monarch.actor
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import meshgate
from meshgate.actors import telemetry
from meshgate.actors.telemetry import start_span
from meshgate.serialization.pickling import dumps
from tests.client.laptop import run_without


@telemetry.traced
def add(left: int, right: int) -> int:
    """Adds."""
    return left + right


@telemetry.traced(name="slow_add")
async def add_later(left: int, right: int) -> int:
    return left + right


def test_where_monarch_is_installed_they_are_monarchs() -> None:
    for name in ("span", "traced", "get_meter"):
        assert getattr(meshgate, name) is getattr(monarch.actor, name)


def test_traced_functions_stay_what_they_are() -> None:
    assert add(1, 2) == 3
    assert asyncio.run(add_later(1, 2)) == 3
    assert inspect.iscoroutinefunction(add_later)
    assert (add.__name__, add.__doc__) == ("add", "Adds.")


def test_a_span_is_a_context_manager() -> None:
    with telemetry.span("step"):
        pass


def test_instruments_accept_what_monarchs_accept() -> None:
    meter = telemetry.get_meter()
    meter.create_counter("calls", unit="1").add(1, attributes={"kind": "a"})
    meter.create_up_down_counter("open").add(-1)
    meter.create_histogram("seconds", description="of a step").record(0.5)


def test_on_workers_they_become_monarchs() -> None:
    counter = telemetry.get_meter().create_counter("calls")
    for value, expected in (
        (telemetry.get_meter(), "type(value).__module__.startswith(('monarch.', 'opentelemetry.'))"),
        (counter, "hasattr(value, 'add') and not type(value).__module__.startswith('meshgate')"),
        (telemetry.span, "value is __import__('monarch.actor').actor.span"),
    ):
        code = f"import pickle; value = pickle.loads({dumps(value).data!r}); print(bool({expected}))"
        assert run_without("meshgate", code=code).decode().strip() == "True", expected


def test_a_laptop_without_monarch_imports_them() -> None:
    code = """
        from meshgate import get_meter, returns_future, span, traced
        assert traced.__module__ == "meshgate.actors.telemetry"

        @returns_future
        async def one(): return 1

        print(one().get())
    """
    assert run_without("monarch", code=code).decode().strip() == "1"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def test_a_program_without_a_provider_has_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    assert start_span("trainers.step", "call", range(2)) is None
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", trace.NoOpTracerProvider())
    assert start_span("trainers.step", "call", range(2)) is None
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert start_span("trainers.step", "call", range(2)) is None
    assert "opentelemetry.trace" not in sys.modules


def test_the_carrier_names_the_span(exporter: InMemorySpanExporter) -> None:
    span = start_span("trainers.step", "call", range(2))
    assert span is not None
    span.end()
    (ended,) = exporter.get_finished_spans()
    assert ended.context is not None
    named = f"00-{ended.context.trace_id:032x}-{ended.context.span_id:016x}-"
    assert span.carrier["traceparent"].startswith(named)
    assert ended.status.status_code is trace.StatusCode.UNSET


def test_a_request_that_fails_ends_the_span_with_its_reason(exporter: InMemorySpanExporter) -> None:
    span = start_span("trainers.step", "call", range(2))
    assert span is not None
    with pytest.raises(ValueError, match="closed"), span:
        raise ValueError("closed")
    (ended,) = exporter.get_finished_spans()
    assert (ended.status.status_code, ended.status.description) == (trace.StatusCode.ERROR, "closed")
