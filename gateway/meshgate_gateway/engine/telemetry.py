"""Monarch's telemetry, if the program asks for it (``job.enable_telemetry()``)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence

from meshgate_gateway.engine.failures import FailureReports, invalid
from meshgate_gateway.engine.interfaces import Handler, Send, StartTask
from meshgate_gateway.engine.monarch.interface import Collecting, error_text
from meshgate_gateway.engine.monarch.telemetry import Collector
from meshgate_gateway.engine.objects.records import HostMesh
from meshgate_wire import Fragments
from meshgate_wire.messages import CollectTelemetry, Done, TelemetryRequest, Values


class Telemetry:
    """``elsewhere``: hosts are on other machines than this process, so that each needs a collector of its own.
    ``notice`` has a line for the user."""

    def __init__(
        self,
        monarch: Collecting,
        send: Send,
        *,
        start_task: StartTask,
        failures: FailureReports,
        notice: Callable[[str], object],
        elsewhere: bool,
    ) -> None:
        self._monarch, self._send, self._start_task, self._failures = monarch, send, start_task, failures
        self._notice, self._elsewhere = notice, elsewhere
        self._hosts: list[HostMesh] = []
        self._collector: Collector | None = None

    def handlers(self) -> Mapping[type, Handler]:
        return {CollectTelemetry: self._collect, TelemetryRequest: self._request}

    async def _collect(self, header: CollectTelemetry, buffers: Sequence[Fragments]) -> None:
        if self._collector is None:
            collector = self._monarch.collector(
                header.retention, header.host_metrics_interval, header.gpu_metrics_interval
            )
            await collector.start()
            self._collector = collector
            for hosts in self._hosts:
                self._start_task(self._collect_from(collector, hosts))
        self._send(Done(call=header.call))

    def hosts_attached(self, hosts: HostMesh) -> None:
        if self._elsewhere:
            self._hosts.append(hosts)
            if self._collector is not None:
                self._start_task(self._collect_from(self._collector, hosts))

    async def _collect_from(self, collector: Collector, hosts: HostMesh) -> None:
        try:
            await collector.collect_from(hosts.mesh)
        except Exception as error:  # noqa: BLE001 - Monarch's errors are of many types, for the user
            self._notice(f"no telemetry of mesh {hosts.name!r}, which queries leave out: {error_text(error)}")

    def _request(self, header: TelemetryRequest, buffers: Sequence[Fragments]) -> None:
        if self._collector is None:
            raise invalid("this session collects no telemetry: call job.enable_telemetry() before job.state()")
        body = buffers[0].join() if buffers else None
        self._start_task(self._failures.guard(header, self._answer(self._collector, header, body)))

    async def _answer(self, collector: Collector, header: TelemetryRequest, body: bytes | None) -> None:
        answer = await collector.request(header.path, body)
        self._send(Values(call=header.call), [pickle.dumps(answer)])

    async def close(self) -> None:
        if self._collector is not None:
            await self._collector.close()
