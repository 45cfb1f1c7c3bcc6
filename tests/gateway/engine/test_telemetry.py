from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from meshgate_gateway.engine.failures import FailureReports, RequestFailed
from meshgate_gateway.engine.objects.records import HostMesh, attached_hosts
from meshgate_gateway.engine.telemetry import Telemetry
from meshgate_wire import Fragments
from meshgate_wire.messages import CollectTelemetry, Done, Failed, Host, TelemetryRequest, Values

COLLECT = CollectTelemetry(call=1, retention=60, host_metrics_interval=0.5, gpu_metrics_interval=2.0)
REQUEST = TelemetryRequest(call=2, path="/api/query")


class Collector:
    def __init__(self) -> None:
        self.did: list[Any] = []

    def collector(self, retention: int, host_metrics: float, gpu_metrics: float) -> Collector:
        self.did.append((retention, host_metrics, gpu_metrics))
        return self

    async def start(self) -> None:
        self.did.append("start")

    async def collect_from(self, hosts: Any) -> None:
        self.did.append(hosts)
        if hosts == "mesh of broken":
            raise RuntimeError("no collector\n\nStack backtrace:\n0: std")

    async def request(self, path: str, body: bytes | None) -> tuple[int, str, bytes]:
        if path == "/fails":
            raise ValueError("no such page")
        return 200, "text/plain", path.encode() + (body or b"")

    async def close(self) -> None:
        self.did.append("close")


class Parts:
    def __init__(self, *, elsewhere: bool = True) -> None:
        self.collector = Collector()
        self.sent: list[Any] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.notices: list[str] = []
        failures = FailureReports(lambda number, failure: None, self.send)
        self.telemetry = Telemetry(
            self.collector,
            self.send,
            start_task=self.start,
            failures=failures,
            notice=self.notices.append,
            elsewhere=elsewhere,
        )

    def send(self, header: Any, buffers: Any = (), *, stream: int = 0) -> None:
        self.sent.append((header, [pickle.loads(each) for each in buffers]))

    def start(self, work: Any) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def handle(self, header: Any, *buffers: Fragments) -> None:
        waiting = self.telemetry.handlers()[type(header)](header, buffers)
        if waiting is not None:
            await waiting
        await asyncio.gather(*self.tasks)


def hosts(name: str) -> HostMesh:
    return attached_hosts(f"mesh of {name}", name, [Host(name=name)])


async def test_hosts_on_other_machines_get_collectors_whenever_they_are_attached() -> None:
    parts = Parts()
    parts.telemetry.hosts_attached(hosts("first"))
    await parts.handle(COLLECT)
    await parts.handle(COLLECT)
    parts.telemetry.hosts_attached(hosts("second"))
    await asyncio.gather(*parts.tasks)
    assert parts.collector.did == [(60, 0.5, 2.0), "start", "mesh of first", "mesh of second"]
    assert parts.sent == [(Done(call=1), [])] * 2


async def test_hosts_without_a_collector_are_reported() -> None:
    parts = Parts()
    parts.telemetry.hosts_attached(hosts("broken"))
    await parts.handle(COLLECT)
    assert parts.notices == ["no telemetry of mesh 'broken', which queries leave out: no collector"]


async def test_hosts_of_this_machine_share_the_collector_of_the_engine() -> None:
    parts = Parts(elsewhere=False)
    await parts.handle(COLLECT)
    parts.telemetry.hosts_attached(hosts("first"))
    assert parts.collector.did == [(60, 0.5, 2.0), "start"]
    await parts.telemetry.close()
    assert parts.collector.did[-1] == "close"


async def test_requests_are_answered_or_fail() -> None:
    parts = Parts()
    await parts.handle(COLLECT)
    await parts.handle(REQUEST, Fragments((b"{", b"}")))
    assert parts.sent[-1] == (Values(call=2), [(200, "text/plain", b"/api/query{}")])
    await parts.handle(TelemetryRequest(call=3, path="/fails"))
    failed = parts.sent[-1][0]
    assert isinstance(failed, Failed)
    assert failed.failure.message == "no such page"


async def test_a_session_that_collects_nothing_says_what_to_call() -> None:
    parts = Parts()
    with pytest.raises(RequestFailed, match=r"call job.enable_telemetry\(\) before job.state\(\)"):
        await parts.handle(REQUEST)
    await parts.telemetry.close()
    assert parts.collector.did == []
