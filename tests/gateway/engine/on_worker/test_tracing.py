"""Spans of endpoints, with stand-ins for Monarch's functions and contexts."""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshgate_gateway.engine.on_worker.tracing import with_trace

TRACE = {"traceparent": f"00-{7:032x}-{9:016x}-01"}
NAMES = ("fake_monarch:span", "fake_monarch:missing", "missing_module:span")
CURRENT = "fake_monarch:context"


def message() -> Any:
    return SimpleNamespace(actor_instance=SimpleNamespace(name="trainers"), message_rank=SimpleNamespace(rank=3))


@pytest.fixture
def monarch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with Monarch's names; ``opened`` are the methods that its own spans were for."""
    module: Any = ModuleType("fake_monarch")
    module.opened = []
    module.context = contextvars.ContextVar("context", default=None)

    @contextlib.contextmanager
    def span(method: str, number: int = 0) -> Iterator[None]:
        module.opened.append((method, number))
        yield

    module.span = span
    monkeypatch.setitem(sys.modules, "fake_monarch", module)
    monkeypatch.delattr(sys, "_meshgate_trace", raising=False)
    yield module
    vars(sys).pop("_meshgate_trace", None)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def test_the_endpoint_of_the_message_runs_in_a_span_and_later_ones_do_not(
    monarch: Any, exporter: InMemorySpanExporter
) -> None:
    monarch.context.set(message())
    assert with_trace("value", TRACE, NAMES, CURRENT) == "value"
    with monarch.span("step", 5):
        assert trace.get_current_span().get_span_context().trace_id == 7
    with monarch.span("step"):
        assert not trace.get_current_span().get_span_context().is_valid
    assert monarch.opened == [("step", 5), ("step", 0)]
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind) == ("trainers.step", trace.SpanKind.SERVER)
    assert span.parent is not None
    assert span.parent.span_id == 9
    assert span.attributes is not None
    assert span.attributes["meshgate.rank"] == 3


def test_a_trace_that_was_not_used_does_not_reach_the_next_message(
    monarch: Any, exporter: InMemorySpanExporter
) -> None:
    monarch.context.set(message())
    with_trace(None, TRACE, NAMES, CURRENT)  # of an endpoint with instrument=False
    monarch.context.set(message())
    with monarch.span("step"):
        assert not trace.get_current_span().get_span_context().is_valid
    assert exporter.get_finished_spans() == ()


def test_functions_are_replaced_once(monarch: Any) -> None:
    original = monarch.span
    with_trace(None, TRACE, NAMES, CURRENT)
    replaced = monarch.span
    with_trace(None, TRACE, NAMES, CURRENT)
    assert monarch.span is replaced
    assert monarch.span is not original


def test_without_a_provider_the_program_still_sees_the_callers_span(
    monarch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monarch.context.set(message())
    with_trace(None, TRACE, NAMES, CURRENT)
    with monarch.span("step"):
        assert trace.get_current_span().get_span_context().span_id == 9
