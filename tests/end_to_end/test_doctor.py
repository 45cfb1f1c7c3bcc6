"""Problems on the way to a real gateway, each injected by a proxy, a token or a wrong address."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

from meshgate import ProcessJob, UrlDialer
from meshgate.doctor import checks as module
from meshgate.doctor.checks import Finding, check_gateway
from meshgate.testing import NetworkProxy
from tests.ports import closed_port

pytestmark = [pytest.mark.any_release, pytest.mark.usefixtures("hosts")]


@pytest.fixture
def token(job: ProcessJob) -> str:
    assert job._gateway is not None
    return job._gateway.record.token


@pytest.fixture
def proxy(job: ProcessJob) -> Iterator[NetworkProxy]:
    url = urlsplit(job.gateway_url or "")
    assert url.hostname
    assert url.port
    with NetworkProxy(url.hostname, url.port) as proxy:
        yield proxy


def through(proxy: NetworkProxy, token: str) -> UrlDialer:
    return UrlDialer(f"ws://127.0.0.1:{proxy.port}", token)


def by_check(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_a_gateway_in_order(proxy: NetworkProxy, token: str) -> None:
    found = by_check(check_gateway(through(proxy, token)))
    assert list(found) == ["gateway", "websocket", "round trip", "throughput", "connection"]
    assert {found[check].outcome for check in ("gateway", "websocket", "connection")} == {"ok"}


def test_nothing_listens() -> None:
    with closed_port() as port:
        (found,) = check_gateway(UrlDialer(f"ws://127.0.0.1:{port}", "token"))
    assert (found.check, found.outcome) == ("gateway", "problem")
    assert "check the URL" in found.remedy


def test_a_wrong_token(proxy: NetworkProxy) -> None:
    (found,) = check_gateway(through(proxy, "wrong"))
    assert "set MESHGATE_TOKEN to the token of this job" in found.remedy


class _NoWebsockets(BaseHTTPRequestHandler):
    """An ingress that forwards plain requests only."""

    port: int  # of the gateway

    def do_GET(self) -> None:
        if self.headers.get("Upgrade"):
            self.send_error(502)
            return
        with closing(http.client.HTTPConnection("127.0.0.1", self.port)) as gateway:
            gateway.request("GET", self.path, headers=dict(self.headers))
            response = gateway.getresponse()
            self.send_response(response.status)
            for name, value in response.getheaders():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(response.read())

    def log_message(self, *args: Any) -> None: ...


def test_an_ingress_without_websockets(proxy: NetworkProxy, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_TIMEOUT", 1.0)
    handler = type("Handler", (_NoWebsockets,), {"port": proxy.port})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as ingress:
        thread = threading.Thread(target=ingress.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        found = by_check(check_gateway(UrlDialer(f"ws://127.0.0.1:{ingress.server_port}", token)))
        ingress.shutdown()
        thread.join()
    assert [(each.check, each.outcome) for each in found.values()] == [("gateway", "ok"), ("websocket", "problem")]
    assert "proxy_http_version 1.1" in found["websocket"].remedy


def test_a_slow_way(job: ProcessJob, token: str) -> None:
    url = urlsplit(job.gateway_url or "")
    with NetworkProxy(str(url.hostname), int(url.port or 0), delay=0.2) as proxy:
        found = by_check(check_gateway(through(proxy, token)))
    assert found["round trip"].outcome == "problem"
    assert "VPN or proxy" in found["round trip"].remedy


def test_a_connection_that_is_cut(proxy: NetworkProxy, token: str) -> None:
    findings = check_gateway(through(proxy, token), watch=2.0)
    found: dict[str, Finding] = {}
    for finding in findings:
        found[finding.check] = finding
        if finding.check == "throughput":
            proxy.cut()
    assert found["connection"].outcome == "problem"
    assert re.search(r"cut \d+ times in 2 s", found["connection"].text)
    assert "proxy-read-timeout (nginx)" in found["connection"].remedy


def test_a_slow_throughput(proxy: NetworkProxy, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_THROUGHPUT", float("inf"))
    found = by_check(check_gateway(through(proxy, token)))
    assert found["throughput"].outcome == "problem"
    assert "use another way" in found["throughput"].remedy


def test_the_command_prints_json_and_exits_with_0(job: ProcessJob) -> None:
    command = [sys.executable, "-c", "from meshgate.cli.app import app; app()", "doctor", str(job.apply_id), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    findings = json.loads(run.stdout)["findings"]
    assert run.returncode == any(finding["outcome"] == "problem" for finding in findings)
    assert {"gateway", "websocket", "round trip"} <= {finding["check"] for finding in findings}
