"""Checks of the way to a gateway: its HTTP answers, the websocket, and what the connection is like.

The measurements use a session and a process on one host, which end with the check.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshgate.doctor.echo import Echo
from meshgate.doctor.findings import Finding, problem
from meshgate.errors import AuthenticationError, GatewayError, MeshgateError, VersionMismatchError
from meshgate.proxies.client import Client
from meshgate.session.dialing import Dialer, Route
from meshgate.session.gateway_http import get_json
from meshgate.session.settings import ClientSettings
from meshgate_wire.status import JobStatus

SLOW_ROUND_TRIP = 0.25  # seconds
SLOW_THROUGHPUT = 2.0  # MB/s
ROUND_TRIPS = 10
NBYTES = 4 * 2**20
CONNECT_TIMEOUT = 15.0  # seconds
TIMEOUT = 60.0  # seconds

_REACH = "check the URL, and that the ingress routes to the job's gateway; for a port-forward, that the job runs"
_UPGRADE = (
    "let the ingress forward websockets: nginx needs `proxy_http_version 1.1` and the headers Upgrade and Connection; "
    "Envoy and the Gateway API need websocket upgrades, or appProtocol kubernetes.io/ws"
)
_CUT = (
    "raise the limit of the ingress for websockets: proxy-read-timeout (nginx), idle_timeout (ALB), timeoutSec of the "
    "BackendConfig (GCE). Calls survive cuts, but wait for the new connection"
)


class _CountingDialer:
    """Counts how often a connection is dialed."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self.dialed = 0

    async def dial(self) -> Route:
        self.dialed += 1
        return replace(await self._dialer.dial())

    async def gone(self) -> str | None:
        return await self._dialer.gone()

    def __str__(self) -> str:
        return str(self._dialer)


def check_gateway(dialer: Dialer, watch: float = 0.0) -> Iterator[Finding]:
    """Whether a session works through ``dialer``, and how well; then watches the connection for ``watch`` seconds."""
    try:
        status = JobStatus.model_validate(get_json(dialer, "/v1/status"))
    except AuthenticationError as error:
        yield problem("gateway", error, "set MESHGATE_TOKEN to the token of this job, or log in to the cluster again")
        return
    except VersionMismatchError as error:
        yield problem("gateway", error, "install the gateway's version of meshgate here")
        return
    except (MeshgateError, ValueError) as error:
        yield problem("gateway", error, _REACH)
        return
    yield Finding(check="gateway", outcome="ok", text=f"{dialer} runs meshgate {status.gateway_version}")
    counting = _CountingDialer(dialer)
    settings = ClientSettings.load(output=False).model_copy(update={"connect_timeout": CONNECT_TIMEOUT})
    try:
        client = Client.connect(counting, settings=settings)
    except GatewayError as error:
        yield problem("websocket", error, _UPGRADE)
        return
    with client:
        yield Finding(check="websocket", outcome="ok", text="a session can be opened")
        yield from _measure(client, status, counting, watch)


def _measure(client: Client, status: JobStatus, dialer: _CountingDialer, watch: float) -> Iterator[Finding]:
    if not status.meshes:
        return
    mesh, count = next(iter(status.meshes.items()))
    try:
        host: Any = client.attach_hosts(mesh, count).slice(hosts=slice(0, 1))
        echo: Any = host.spawn_procs(name="doctor").spawn("doctor", Echo)
        echo.echo.call_one(b"", 0).get(TIMEOUT)
        round_trip = statistics.median(_seconds(echo, b"", 0) for _ in range(ROUND_TRIPS))
        up, down = (NBYTES / 1e6 / _seconds(echo, bytes(sent), NBYTES - sent) for sent in (NBYTES, 0))
    except (MeshgateError, TimeoutError) as error:
        yield problem("hosts", error, f"look at the hosts with `meshgate status` and `meshgate logs`; mesh {mesh}")
        return
    text = f"a call takes {round_trip * 1e3:.1f} ms"
    if round_trip > SLOW_ROUND_TRIP:
        remedy = "send calls without waiting for each; look for a VPN or proxy on the way that is far away, or buffers"
        yield problem("round trip", text, remedy)
    else:
        yield Finding(check="round trip", outcome="ok", text=text)
    text = f"{up:.1f} MB/s up, {down:.1f} MB/s down"
    if min(up, down) < SLOW_THROUGHPUT:
        yield problem("throughput", text, "use another way: a port-forward, or an ingress that does not buffer")
    else:
        yield Finding(check="throughput", outcome="ok", text=text)
    yield _watch(echo, dialer, watch)


def _seconds(echo: Any, sent: bytes, answer: int) -> float:
    started = time.perf_counter()
    echo.echo.call_one(sent, answer).get(TIMEOUT)
    return time.perf_counter() - started


def _watch(echo: Any, dialer: _CountingDialer, watch: float) -> Finding:
    """Uses the connection until ``watch`` seconds have passed."""
    end = time.monotonic() + watch
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))
        _seconds(echo, b"", 0)
    cuts = dialer.dialed - 1
    if cuts:
        return problem("connection", f"the connection was cut {cuts} times in {watch:.0f} s of use", _CUT)
    text = f"it was not cut in {watch:.0f} s" if watch else "not watched; --watch 120 finds limits of an ingress"
    return Finding(check="connection", outcome="ok", text=text)
