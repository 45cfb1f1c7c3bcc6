"""Monarch's telemetry and admin server on this machine: SQL queries, the dashboard, and the topology of the meshes.

The session's engine collects and answers; this module sends it the requests, through the session, and serves them on
loopback of this machine for a browser and for Monarch's own tools. The address has a secret in its path, because
loopback is open to other users of this machine and to every page in a browser.
"""

from __future__ import annotations

import hmac
import http.server
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from typing_extensions import override

from meshgate.errors import JobError, JobUnsupported, MeshgateError
from meshgate.ranks.forward import ForwardedPort, forward
from meshgate.ranks.on_host import AdminStarter
from meshgate.ranks.streams import may_connect
from meshgate.session.pending_calls import PendingAck, PendingValue
from meshgate.session.session import CONTROL_STREAM
from meshgate_wire.messages import CollectTelemetry
from meshgate_wire.messages import TelemetryRequest as Request

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy
    from meshgate.proxies.client import Client


OK = 200
MAX_BODY = 1 << 20  # bytes of a request
IDLE_TIMEOUT = 60.0  # seconds that a connection may take for its request
START_TIMEOUT = 60.0  # seconds
LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """``retention_secs``: how long messages and traces are kept; 0: as long as the session. ``include_dashboard``:
    ``state().dashboard_url`` is Monarch's dashboard, on ``dashboard_port`` of this machine. Snapshots
    (``snapshot_interval_secs``) are not taken, so their tables stay empty. From Monarch 0.8 on, the tables
    ``host_metrics`` and ``gpu_metrics`` have a sample of each host and GPU per interval; 0: none."""

    retention_secs: int = 3600
    include_dashboard: bool = False
    dashboard_port: int = 8265
    snapshot_interval_secs: float = 30.0
    host_metrics_interval_secs: float = 1.0
    gpu_metrics_interval_secs: float = 1.0


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
        client.request(call, self._request, stream=CONTROL_STREAM)
        call.future.get(client.settings.connect_timeout)
        self._server = DashboardServer(client, self.config.dashboard_port if self.config.include_dashboard else 0)
        self._client = client

    def _request(self, number: int) -> CollectTelemetry:
        return CollectTelemetry(
            call=number,
            retention=self.config.retention_secs,
            host_metrics_interval=self.config.host_metrics_interval_secs,
            gpu_metrics_interval=self.config.gpu_metrics_interval_secs,
        )

    @property
    def started(self) -> bool:
        return self._client is not None and not self._client.closed

    def query_client(self) -> QueryEngineClient:
        assert self._client is not None
        return QueryEngineClient(self._client)

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.access.url

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


class TelemetryAccess:
    """Decides which requests are passed on. ``url`` has the secret that lets its holder read the telemetry.

    The page's links and requests have absolute paths, without the secret; a browser names the page in ``Referer``, with
    the secret, to this server alone.
    """

    def __init__(self, port: int) -> None:
        self._hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        self._origins = tuple(f"http://{host}" for host in self._hosts)
        self._secret = secrets.token_urlsafe(32)
        self.url = f"http://127.0.0.1:{port}/{self._secret}"

    def admitted(self, path: str, *, hosts: list[str], origins: list[str], referers: list[str]) -> str | None:
        """The path to request from the engine, or None if the request is refused. The others are its headers, of
        which a browser sends one at most."""
        here = len(hosts) == 1 and hosts[0] in self._hosts
        if not here or len(origins) > 1 or not set(origins) <= set(self._origins):
            return None  # by DNS rebinding, or from a page elsewhere
        if (found := self._without_secret(path)) is not None:
            return found
        referer = referers[0] if len(referers) == 1 else ""
        pages = [referer.removeprefix(origin) for origin in self._origins if referer.startswith(f"{origin}/")]
        return path if any(self._without_secret(page) is not None for page in pages) else None

    def _without_secret(self, path: str) -> str | None:
        secret, rest = path[1 : 1 + len(self._secret)], path[1 + len(self._secret) :]
        if not hmac.compare_digest(secret.encode(errors="replace"), self._secret.encode()) or rest[:1] not in "/?":
            return None
        return rest if rest.startswith("/") else f"/{rest}"


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
        self.access = TelemetryAccess(self.server_port)
        self._thread = threading.Thread(target=self.serve_forever, name="meshgate-telemetry", daemon=True)
        self._thread.start()

    @override
    def verify_request(self, request: Any, client_address: Any) -> bool:
        return may_connect(request)

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class DashboardHandler(http.server.BaseHTTPRequestHandler):
    server: DashboardServer
    timeout = IDLE_TIMEOUT

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length", "")
        if not (size.isascii() and size.isdecimal() and len(size) < 10 and int(size) <= MAX_BODY):
            self.send_error(413, f"expected a Content-Length of at most {MAX_BODY} bytes")
            return
        self._answer(self.rfile.read(int(size)))

    def _answer(self, body: bytes | None) -> None:
        hosts, origins, referers = (self.headers.get_all(name, []) for name in ("Host", "Origin", "Referer"))
        path = self.server.access.admitted(self.path, hosts=hosts, origins=origins, referers=referers)
        if path is None:
            self.send_error(403, "open the address that state().telemetry_url has, with the secret in its path")
            return
        try:
            status, content_type, answer = ask(self.server.client, path, body)
        except MeshgateError as error:
            status, content_type, answer = 502, "text/plain", f"the session does not answer: {error}".encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(answer)))
        self.send_header("Referrer-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(answer)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


# It runs in a process of the first host, where it is next to what it inspects, and its port is forwarded to this
# machine.


@dataclass(frozen=True, slots=True)
class MeshAdminConfig:
    """``admin_addr``: the address on the first host, ``127.0.0.1:PORT``; by default a free port."""

    admin_addr: str | None = None

    def __post_init__(self) -> None:
        host, _, port = (self.admin_addr or "127.0.0.1:0").rpartition(":")
        if host not in LOOPBACK or not port.isdecimal():
            raise ValueError(
                f"admin_addr={self.admin_addr!r}: expected 127.0.0.1:PORT. The admin server has no password, so it "
                "listens on loopback of the first host only; state().admin_url is its address on this machine"
            )


class MeshAdmin:
    """The admin server of one job's sessions, one at a time."""

    def __init__(self, config: MeshAdminConfig) -> None:
        self._config = config
        self._forwarded: ForwardedPort | None = None
        self._client: object = None
        self._url = ""

    def url(self, meshes: Mapping[str, HostMeshProxy]) -> str:
        """The server's address on this machine. Starts it if this session has none. Raises JobError."""
        first = next(iter(meshes.values()))
        if self._client is not first._client or (self._forwarded is not None and self._forwarded.error is not None):
            self.close()
            self._start(first.slice(hosts=slice(0, 1)), list(meshes.values()))
            self._client = first._client
        return self._url

    def close(self) -> None:
        """Ends the forwarding; the server ends with the session."""
        if self._forwarded is not None:
            self._forwarded.close()
        self._forwarded = self._client = None

    def _start(self, host: HostMeshProxy, meshes: list[HostMeshProxy]) -> None:
        starter: Any = host.spawn_procs(name="meshgate_admin").spawn("meshgate_admin", AdminStarter)
        address = self._config.admin_addr or "127.0.0.1:0"
        url, problem = starter.start.call_one(meshes, address).get(timeout=START_TIMEOUT)
        if problem:
            raise JobError(f"Monarch's admin server does not start on {address} of the first host: {problem}")
        served = urlsplit(url)
        self._forwarded = forward(host, served.port or 0, 0, local_port=None, reverse=False)
        self._url = f"{served.scheme}://127.0.0.1:{self._forwarded.port}"
