"""Telemetry on this machine, with a scripted gateway. Monarch's own is in tests/end_to_end/test_telemetry.py."""

from __future__ import annotations

import http.client
import json
import pickle
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from meshgate.errors import JobError
from meshgate.proxies.client import Client
from meshgate.ranks.telemetry import Access, Telemetry, TelemetryConfig
from meshgate_wire.messages import CollectTelemetry, Done, Failed, Failure, TelemetryRequest, Values
from tests.client.scripted_gateway import ScriptedGateway


@pytest.fixture
def answers(gateway: ScriptedGateway) -> dict[str, Any]:
    """What the gateway answers to a request, by path."""
    known: dict[str, Any] = {}

    def answer(session: Any, header: TelemetryRequest, buffers: Any) -> None:
        if header.path in known:
            session.send(Values(call=header.call), pickle.dumps(known[header.path]))
        else:
            session.send(Failed(call=header.call, failure=Failure(kind="invalid", message=f"no {header.path}")))

    gateway.on[CollectTelemetry] = lambda session, header, _: session.send(Done(call=header.call))
    gateway.on[TelemetryRequest] = answer
    return known


@pytest.fixture
def telemetry(answers: dict[str, Any], client: Client) -> Iterator[Telemetry]:
    found = Telemetry(TelemetryConfig(retention_secs=60, host_metrics_interval_secs=0.5, gpu_metrics_interval_secs=0))
    found.start(client)
    yield found
    found.close()


def test_a_session_is_made_to_collect_once(gateway: ScriptedGateway, telemetry: Telemetry, client: Client) -> None:
    telemetry.start(client)
    assert [
        (each.retention, each.host_metrics_interval, each.gpu_metrics_interval)
        for each in gateway.got(CollectTelemetry)
    ] == [(60, 0.5, 0.0)]


def test_a_query_returns_rows_or_raises_the_reason(telemetry: Telemetry, answers: dict[str, Any]) -> None:
    answers["/api/query"] = (200, "application/json", b'{"rows": [{"count(*)": 3}]}')
    assert telemetry.query_client().query("SELECT count(*) FROM messages") == {"rows": [{"count(*)": 3}]}
    for body, reason in ((json.dumps({"error": "no field bogus"}).encode(), "no field bogus"), (b"<html>", "<html>")):
        answers["/api/query"] = (400, "application/json", body)
        with pytest.raises(JobError, match=f"the query failed: {reason}"):
            telemetry.query_client().query("SELECT bogus")


def test_the_dashboard_is_served_to_those_who_have_its_address(telemetry: Telemetry, answers: dict[str, Any]) -> None:
    answers["/api/summary?x=1"] = (418, "text/x", b"tea")
    with pytest.raises(urllib.error.HTTPError) as answered:
        urllib.request.urlopen(f"{telemetry.url}/api/summary?x=1", timeout=60)
    with answered.value as found:
        assert (found.code, found.headers["Content-Type"], found.read()) == (418, "text/x", b"tea")
    without_secret = f"{telemetry.url.rpartition('/')[0]}/api/summary?x=1"
    elsewhere = urllib.request.Request(f"{telemetry.url}/api/summary?x=1", headers={"Host": "example.org"})
    large = urllib.request.Request(f"{telemetry.url}/api/query", b"x", headers={"Content-Length": "99999999"})
    for request, code in (
        (without_secret, 403),
        (elsewhere, 403),
        (large, 413),
        (f"{telemetry.url}/unknown", 502),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        with refused.value:
            assert refused.value.code == code


def test_the_dashboard_closes_connections_of_other_users(
    telemetry: Telemetry, answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers["/"] = (200, "text/html", b"page")
    monkeypatch.setattr("meshgate.ranks.telemetry.may_connect", lambda connection: False)
    with pytest.raises((urllib.error.URLError, http.client.RemoteDisconnected, ConnectionError)):
        urllib.request.urlopen(telemetry.url, timeout=60)


def test_a_dashboard_port_in_use_is_named(answers: dict[str, Any], client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wanted = Telemetry(TelemetryConfig(include_dashboard=True, dashboard_port=port))
        with pytest.raises(JobError, match=rf"port {port} of this machine.*enable_telemetry\(dashboard_port="):
            wanted.start(client)
        assert not wanted.started


HOST = "127.0.0.1:8265"


@pytest.mark.parametrize(
    ("path", "headers", "admitted"),
    [
        ("/SECRET", {}, "/"),
        ("/SECRET/", {}, "/"),
        ("/SECRET/api/query", {}, "/api/query"),
        ("/SECRET?x=1", {"hosts": ["localhost:8265"]}, "/?x=1"),
        ("/SECRET/api/query", {"origins": ["http://127.0.0.1:8265"]}, "/api/query"),
        ("/static/js/main.js", {"referers": ["http://127.0.0.1:8265/SECRET"]}, "/static/js/main.js"),
        (
            "/api/query",
            {"referers": ["http://127.0.0.1:8265/SECRET/?x"], "origins": ["http://127.0.0.1:8265"]},
            "/api/query",
        ),
        ("/api/query", {}, None),
        ("/SECRETx/api/query", {}, None),
        ("/SECRE/api/query", {}, None),
        ("/x/SECRET/api/query", {}, None),
        ("/api/query?token=SECRET", {}, None),
        ("/é", {}, None),
        ("/SECRET/api/query", {"hosts": ["example.org"]}, None),
        ("/SECRET/api/query", {"hosts": ["127.0.0.1:9"]}, None),
        ("/SECRET/api/query", {"hosts": [HOST, HOST]}, None),
        ("/SECRET/api/query", {"hosts": []}, None),
        ("/SECRET/api/query", {"origins": ["http://127.0.0.1:9"]}, None),
        ("/SECRET/api/query", {"origins": ["null"]}, None),
        ("/SECRET/api/query", {"origins": ["http://["]}, None),
        ("/api/query", {"referers": ["http://["]}, None),
        ("/api/query", {"referers": ["http://127.0.0.1:82650/SECRET"]}, None),
        ("/SECRET/api/query", {"origins": ["http://127.0.0.1:8265", "http://example.org"]}, None),
        ("/api/query", {"referers": ["http://example.org/SECRET"]}, None),
        ("/api/query", {"referers": ["http://127.0.0.1:8265/"]}, None),
        ("/api/query", {"referers": ["http://127.0.0.1:8265/SECRET"] * 2}, None),
    ],
)
def test_a_request_needs_the_secret_and_comes_from_here(
    path: str, headers: dict[str, list[str]], admitted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_urlsafe", lambda size: "SECRET")
    access = Access(8265)
    assert access.url == f"http://{HOST}/SECRET"
    assert access.admitted(path, **{"hosts": [HOST], "origins": [], "referers": [], **headers}) == admitted
