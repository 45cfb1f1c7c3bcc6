"""What an engine counts for the gateway's metrics."""

from __future__ import annotations

import asyncio

import pytest

from meshgate_gateway.control import CALL_BOUNDS, EngineCounts
from meshgate_gateway.engine import engine_metrics as module
from meshgate_gateway.engine.engine_metrics import EngineMetrics
from tests.gateway.engine.fakes import until
from tests.gateway.engine.in_memory import EngineClient

ROOT = b"a version"


async def test_counts_are_reported_once_and_only_if_something_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_INTERVAL", 0.001)
    reported: list[EngineCounts] = []
    counted = EngineMetrics(reported.append)
    counted.call_ended(0.0025, failed=False)
    counted.call_ended(99999.0, failed=True)
    counted.cast()
    counted.bytes_received += 10
    counted.bytes_sent += 20
    counted.printed(3)
    await until(lambda: reported)
    (counts,) = reported
    assert counts.calls == {"ok": 1, "failed": 1}
    assert (counts.casts, counts.bytes_received, counts.bytes_sent, counts.lines) == (1, 10, 20, 3)
    assert counts.call_times.buckets[CALL_BOUNDS.index(0.0025)] == 1  # bounds are inclusive, as in Prometheus
    assert counts.call_times.buckets[-1] == 1
    assert counts.call_times.seconds == pytest.approx(99999.0025)
    counted.cast()
    await until(lambda: len(reported) == 2)
    assert reported[1].calls == {"ok": 0, "failed": 0}
    assert sum(reported[1].call_times.buckets) == 0
    counted.close()
    assert len(reported) == 2


async def test_what_was_counted_is_reported_at_the_end() -> None:
    reported: list[EngineCounts] = []
    counted = EngineMetrics(reported.append)
    counted.cast()
    counted.close()
    assert reported[0].casts == 1


async def test_a_sync_takes_from_its_offer_to_the_last_host_and_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[EngineCounts] = []
    counted = EngineMetrics(reported.append)
    times = iter([100.0, 100.3])
    monkeypatch.setattr(counted, "_loop", type("Clock", (), {"time": lambda self: next(times), "call_later": _later})())
    counted.version_offered(ROOT)
    counted.version_ready(ROOT)
    counted.version_ready(ROOT)  # a host that joined later
    counted.close()
    assert sum(reported[0].sync_times.buckets) == 1
    assert reported[0].sync_times.seconds == pytest.approx(0.3)


async def test_a_version_that_some_host_never_gets_is_not_a_sync() -> None:
    reported: list[EngineCounts] = []
    counted = EngineMetrics(reported.append)
    counted.version_offered(ROOT)
    counted.version_dropped(ROOT)
    counted.version_ready(ROOT)
    counted.close()
    assert reported == []


async def test_an_engine_counts_calls_until_its_end() -> None:
    client = EngineClient()
    reported: list[EngineCounts] = []
    client.engine._metrics._report = reported.append
    client.spawn_all()
    await client.turns()
    client.engine._metrics.cast()
    await client.end()
    assert reported[-1].casts == 1


def _later(self: object, delay: float, callback: object) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay, callback)  # type: ignore[arg-type]
