"""``GET /metrics``: what the gateway counts, for Prometheus.

The numbers are totals of all sessions, without names of users, actors, meshes or files: more people can read a
monitoring system than a job.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http import HTTPStatus
from itertools import accumulate
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from meshgate_gateway.hosts.provider import HostProvider
from meshgate_gateway.http.auth import audited
from meshgate_gateway.http.messages import Request, Response
from meshgate_gateway.sessions.session_manager import SessionManager
from meshgate_gateway.sessions.session_table import Durations
from meshgate_wire.handshake import PYTHON_VERSION, SOFTWARE_VERSION


class Metrics:
    """The metrics of one gateway, as text."""

    def __init__(self, sessions: SessionManager, hosts: HostProvider) -> None:
        self._sessions, self._hosts = sessions, hosts
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def response(self) -> Response:
        text = generate_latest(self._registry).decode()
        return Response(HTTPStatus.OK, {}, {"Content-Type": CONTENT_TYPE_LATEST}, text)

    async def respond(self, request: Request, connection: socket.socket) -> Response:
        """The response on the port for metrics, where nothing else is served and no credentials are needed."""
        if urlsplit(request.path).path == "/metrics" and request.method in ("GET", "HEAD"):
            return self.response()
        return Response.error(HTTPStatus.NOT_FOUND, "this port serves only GET /metrics")

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at each scrape."""
        yield InfoMetricFamily(
            "meshgate_build", "Versions of the gateway.", {"version": SOFTWARE_VERSION, "python": PYTHON_VERSION}
        )
        yield from self._session_metrics()
        yield from self._engine_metrics()
        requests = CounterMetricFamily("meshgate_requests", "Audited requests.", labels=["action", "outcome"])
        for (action, outcome), count in list(audited.items()):
            requests.add_metric([action, outcome], count)
        yield requests
        hosts = GaugeMetricFamily("meshgate_hosts", "Hosts of the job.", labels=["state"])
        meshes = self._hosts.meshes()
        hosts.add_metric(["expected"], sum(meshes.values()))
        hosts.add_metric(["present"], sum(len(self._hosts.present(mesh)) for mesh in meshes))
        yield hosts

    def _session_metrics(self) -> Iterator[Metric]:
        totals, now = self._sessions.totals, self._sessions.statistics()
        sessions = GaugeMetricFamily("meshgate_sessions", "Sessions by state.", labels=["state"])
        sessions.add_metric(["connected"], now.connected)
        sessions.add_metric(["disconnected"], now.sessions - now.connected)
        yield sessions
        yield CounterMetricFamily("meshgate_sessions_started", "Sessions that were started.", totals.started)
        ended = CounterMetricFamily("meshgate_sessions_ended", "Sessions that ended, by how.", labels=["kind"])
        for kind, count in totals.ended.items():
            ended.add_metric([kind], count)
        yield ended
        yield CounterMetricFamily(
            "meshgate_reconnections", "Further connections of sessions, such as after a cut.", totals.reconnections
        )

    def _engine_metrics(self) -> Iterator[Metric]:
        totals = self._sessions.totals
        calls = CounterMetricFamily("meshgate_calls", "Calls that ended, by outcome.", labels=["outcome"])
        for outcome, count in totals.calls.items():
            calls.add_metric([outcome], count)
        yield calls
        yield CounterMetricFamily("meshgate_casts", "Calls without replies.", totals.casts)
        yield _histogram("meshgate_call_seconds", "Time from a call's arrival to its response.", totals.call_times)
        yield _histogram(
            "meshgate_sync_seconds", "Time from the offer of a version of the code to the last host.", totals.sync_times
        )
        traffic = CounterMetricFamily("meshgate_client_bytes", "Bytes on clients' connections.", labels=["direction"])
        traffic.add_metric(["received"], totals.bytes_received)
        traffic.add_metric(["sent"], totals.bytes_sent)
        yield traffic
        yield CounterMetricFamily("meshgate_output_lines", "Lines that actors printed.", totals.lines)


def _histogram(name: str, text: str, durations: Durations) -> HistogramMetricFamily:
    bounds = [*map(str, durations.bounds), "+Inf"]
    counts = accumulate(durations.buckets)
    return HistogramMetricFamily(
        name, text, buckets=list(zip(bounds, counts, strict=True)), sum_value=durations.seconds
    )
