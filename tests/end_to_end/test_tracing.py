"""Spans of calls from the driver to the ranks, with a provider on each side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshgate.errors import ActorError, MeshgateError
from tests.end_to_end.actors import AsyncTraced, Traced, Worker
from tests.waiting import wait_for


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Spans of this process."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


def exported(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    def ended() -> Any:
        return [span for span in exporter.get_finished_spans() if span.name == name]

    (span,) = wait_for(ended, name)
    assert isinstance(span, ReadableSpan)
    return span


def written_in(directory: Path) -> list[dict[str, Any]]:
    """The spans that the workers have exported to files."""
    return [json.loads(line) for path in directory.iterdir() for line in path.read_text().splitlines()]


def on_ranks(directory: Path, name: str, count: int) -> list[dict[str, Any]]:
    """The ``count`` spans of this name."""

    def written() -> Any:
        spans = [span for span in written_in(directory) if span["name"] == name]
        return spans if len(spans) == count else None

    spans: list[dict[str, Any]] = wait_for(written, name)
    return spans


@pytest.mark.parametrize("Class", [Traced, AsyncTraced])
def test_a_call_has_a_span_here_and_one_on_each_rank_below_it(
    Class: Any, hosts: Any, exporter: InMemorySpanExporter, tmp_path: Path
) -> None:
    procs = hosts.spawn_procs(name="traced")
    actors = procs.spawn("traced", Class, str(tmp_path))
    token = context.attach(baggage.set_baggage("run", "seven"))
    try:
        with trace.get_tracer("test").start_as_current_span("outer") as outer:
            seen = actors.step.call(2).get()
    finally:
        context.detach(token)
    here = exported(exporter, "traced.step")
    assert here.parent is not None
    assert here.parent.span_id == outer.get_span_context().span_id
    assert (here.kind, here.status.status_code) == (trace.SpanKind.CLIENT, trace.StatusCode.UNSET)
    assert here.attributes is not None
    assert (here.attributes["rpc.method"], here.attributes["meshgate.ranks"]) == ("step", 2)
    assert here.context is not None
    there = on_ranks(tmp_path, "traced.step", 2)
    assert {span["parent_id"] for span in there} == {f"0x{here.context.span_id:016x}"}
    assert {span["context"]["trace_id"] for span in there} == {f"0x{here.context.trace_id:032x}"}
    assert sorted(span["attributes"]["meshgate.rank"] for span in there) == [0, 1]
    inner = on_ranks(tmp_path, "inner", 2)  # the endpoint's own
    assert {span["parent_id"] for span in inner} == {span["context"]["span_id"] for span in there}
    assert list(seen.values()) == ["seven", "seven"]
    procs.stop().get()


@pytest.mark.parametrize("Class", [Traced, AsyncTraced])
def test_errors_are_on_the_spans_and_an_untraced_call_has_none(
    Class: Any, hosts: Any, exporter: InMemorySpanExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    procs = hosts.spawn_procs(name="failing")
    actors = procs.spawn("failing", Class, str(tmp_path))
    with pytest.raises(ActorError):
        actors.fail.call().get()
    here = exported(exporter, "failing.fail")
    assert here.status.status_code is trace.StatusCode.ERROR
    assert here.status.description == "Actor call failing.fail failed."
    for span in on_ranks(tmp_path, "failing.fail", 2):
        assert span["status"] == {"status_code": "ERROR", "description": "ValueError: no such step"}
        assert span["events"][0]["attributes"]["exception.type"] == "ValueError"
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    assert list(actors.step.call(1).get().values()) == [None, None]
    for span in on_ranks(tmp_path, "inner", 2):
        assert span["parent_id"] is None
    assert {span["name"] for span in written_in(tmp_path)} == {"failing.fail", "inner"}
    procs.stop().get()


@pytest.mark.parametrize(("adverb", "ranks"), [("choose", 1), ("stream", 2), ("broadcast", 2)])
def test_other_ways_to_call_have_spans_too(
    adverb: str, ranks: int, hosts: Any, exporter: InMemorySpanExporter, tmp_path: Path
) -> None:
    procs = hosts.spawn_procs(name="others")
    actors = procs.spawn("others", Traced, str(tmp_path))
    results = getattr(actors.step, adverb)(1)
    for future in {"stream": list, "choose": lambda future: [future]}.get(adverb, lambda nothing: [])(results):
        future.get()
    here = exported(exporter, "others.step")
    assert here.context is not None
    there = on_ranks(tmp_path, "others.step", ranks)
    assert {span["parent_id"] for span in there} == {f"0x{here.context.span_id:016x}"}
    procs.stop().get()


def test_a_call_that_cannot_be_sent_ends_its_span(exporter: InMemorySpanExporter, hosts: Any) -> None:
    procs = hosts.spawn_procs(name="stopped")
    actors = procs.spawn("stopped", Worker)
    actors.rank.call().get()
    procs.stop().get()
    with pytest.raises(MeshgateError):
        actors.rank.call().get()
    here = [span for span in exporter.get_finished_spans() if span.name == "stopped.rank"][-1]
    assert here.status.status_code is trace.StatusCode.ERROR
    assert "stopped" in str(here.status.description)
