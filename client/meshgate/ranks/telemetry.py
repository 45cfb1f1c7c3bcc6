"""Monarch's telemetry on this machine: SQL queries, and its dashboard.

The session's engine collects and answers; this module sends it the requests, through the session, and serves them on
loopback of this machine for a browser and for Monarch's own tools.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from meshgate.errors import JobError, JobUnsupported, MeshgateError
from meshgate.session.pending_calls import PendingAck, PendingValue
from meshgate.session.session import CONTROL_STREAM
from meshgate_wire.messages import CollectTelemetry
from meshgate_wire.messages import TelemetryRequest as Request

if TYPE_CHECKING:
    from meshgate.proxies.client import Client

__all__ = ["QueryEngineClient", "Telemetry", "TelemetryConfig"]

OK = 200
LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """``retention_secs``: how long messages and traces are kept; 0: as long as the session. ``include_dashboard``:
    ``state().dashboard_url`` is Monarch's dashboard, on ``dashboard_port`` of this machine. Snapshots
    (``snapshot_interval_secs``) are not taken, so their tables stay empty."""

    retention_secs: int = 3600
    include_dashboard: bool = False
    dashboard_port: int = 8265
    snapshot_interval_secs: float = 30.0


class QueryEngineClient:
    """Sends SQL to the collectors of a session."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def query(self, sql: str, timeout: float | None = None) -> dict[str, Any]:
        """The result of a query, ``{"rows": [{column: value, …}, …]}``. The tables are Monarch's, among them
        ``actors``, ``meshes``, ``messages``, ``spans`` and ``metric_sums``; ``SHOW TABLES`` lists them.

        Raises JobError with what is wrong with the query, and TimeoutError after ``timeout`` seconds.
        """
        body = json.dumps({"sql": sql}).encode()
        status, _, answer = ask(self._client, "/api/query", body, timeout)
        if status != OK:
            raise JobError(f"the query failed: {_problem(answer)}")
        result: dict[str, Any] = json.loads(answer)
        return result


def ask(client: Client, path: str, body: bytes | None, timeout: float | None = None) -> tuple[int, str, bytes]:
    """The status, content type and body with which the session's engine answers."""
    call = PendingValue(0, "telemetry")
    buffers = () if body is None else (body,)
    client.request(call, lambda number: Request(call=number, path=path), buffers, stream=CONTROL_STREAM)
    answer: tuple[int, str, bytes] = call.future.get(timeout)
    return answer


def _problem(answer: bytes) -> str:
    text = answer.decode(errors="replace")
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text


class Telemetry:
    """The telemetry of one job's sessions, one at a time."""

    def __init__(self, config: TelemetryConfig) -> None:
        self.config = config
        self._client: Client | None = None
        self._server: DashboardServer | None = None

    def start(self, client: Client) -> None:
        """Makes the session collect, unless it does. Call it before hosts are attached to."""
        if self._client is client:
            return
        self.close()
        call = PendingAck(0, "enable_telemetry")
        header = CollectTelemetry
        retention = self.config.retention_secs
        client.request(call, lambda number: header(call=number, retention=retention), stream=CONTROL_STREAM)
        call.future.get(client.settings.connect_timeout)
        self._server = DashboardServer(client, self.config.dashboard_port if self.config.include_dashboard else 0)
        self._client = client

    @property
    def started(self) -> bool:
        return self._client is not None and not self._client.closed

    def query_client(self) -> QueryEngineClient:
        assert self._client is not None
        return QueryEngineClient(self._client)

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_port}"

    def profile(self, on_trace_ready: Callable[[Any], object] | None) -> Any:
        try:
            from monarch.distributed_telemetry.profiler import profile  # noqa: PLC0415 - laptops may not have it
        except ImportError as error:
            raise JobUnsupported(f"profile() needs torchmonarch on this machine: {error}") from error
        return profile(self.url, on_trace_ready=on_trace_ready)

    def close(self) -> None:
        """Ends what runs on this machine; the session goes on to collect."""
        if self._server is not None:
            self._server.close()
        self._server = self._client = None


class DashboardServer(http.server.ThreadingHTTPServer):
    """Passes requests on to the engine. Raises JobError if ``port`` is in use."""

    daemon_threads = True

    def __init__(self, client: Client, port: int) -> None:
        try:
            super().__init__(("127.0.0.1", port), DashboardHandler)
        except OSError as error:
            raise JobError(
                f"cannot serve Monarch's dashboard on port {port} of this machine: {error}. "
                "Choose another one: enable_telemetry(dashboard_port=…)"
            ) from error
        self.client = client
        self._thread = threading.Thread(target=self.serve_forever, name="meshgate-telemetry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class DashboardHandler(http.server.BaseHTTPRequestHandler):
    server: DashboardServer

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        self._pass_on(self.rfile.read(int(self.headers.get("Content-Length", "0"))))

    def _pass_on(self, body: bytes | None) -> None:
        if self.headers.get("Host", "").partition(":")[0] not in LOOPBACK:  # a web page elsewhere, by DNS rebinding
            self.send_error(403)
            return
        try:
            status, content_type, answer = ask(self.server.client, self.path, body)
        except MeshgateError as error:
            status, content_type, answer = 502, "text/plain", f"the session does not answer: {error}".encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
