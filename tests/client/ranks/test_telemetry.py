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
from meshgate.ranks.telemetry import MeshAdmin, MeshAdminConfig, Telemetry, TelemetryAccess, TelemetryConfig
from meshgate.session.futures import FutureProxy
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
    access = TelemetryAccess(8265)
    assert access.url == f"http://{HOST}/SECRET"
    assert access.admitted(path, **{"hosts": [HOST], "origins": [], "referers": [], **headers}) == admitted


class Hosts:
    def __init__(self, url: str = "http://localhost:5678", problem: str = "") -> None:
        self.answer = (url, problem)
        self.asked: list[Any] = []
        self._client = object()
        self.start = self

    def slice(self, hosts: slice) -> Hosts:
        assert hosts == slice(0, 1)
        return self

    def spawn_procs(self, name: str) -> Hosts:
        return self

    def spawn(self, name: str, Class: type) -> Hosts:
        return self

    def call_one(self, meshes: list[Any], address: str) -> FutureProxy[Any]:
        self.asked.append((len(meshes), address))
        return FutureProxy.resolved(self.answer)


class Forwarded:
    port, closed, error = 4711, False, None

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> Forwarded:
    found = Forwarded()

    def forward(hosts: Any, port: int, rank: int, **options: Any) -> Forwarded:
        assert (port, rank) == (5678, 0)
        return found

    monkeypatch.setattr("meshgate.ranks.telemetry.forward", forward)
    return found


def test_a_session_has_one_server_for_all_meshes(forwarded: Forwarded) -> None:
    hosts: Any = Hosts()
    server = MeshAdmin(MeshAdminConfig())
    assert server.url({"a": hosts, "b": hosts}) == "http://127.0.0.1:4711"
    assert server.url({"a": hosts, "b": hosts}) == "http://127.0.0.1:4711"
    assert hosts.asked == [(2, "127.0.0.1:0")]
    hosts._client = object()
    server.url({"a": hosts})
    assert len(hosts.asked) == 2
    assert forwarded.closed
    server.close()
    server.close()


def test_a_server_that_was_lost_is_started_again(forwarded: Forwarded) -> None:
    hosts: Any = Hosts()
    server = MeshAdmin(MeshAdminConfig("localhost:5678"))
    server.url({"a": hosts})
    forwarded.error = JobError("the host was lost")  # type: ignore[assignment]
    server.url({"a": hosts})
    assert hosts.asked == [(1, "localhost:5678")] * 2


@pytest.mark.usefixtures("forwarded")
def test_a_server_that_does_not_start_says_why() -> None:
    hosts: Any = Hosts("", "address in use")
    with pytest.raises(JobError, match=r"does not start on 127.0.0.1:80 of the first host: address in use"):
        MeshAdmin(MeshAdminConfig("127.0.0.1:80")).url({"a": hosts})


@pytest.mark.parametrize("address", ["0.0.0.0:1729", "[::]:1729", "1729", "127.0.0.1:http"])
def test_addresses_that_others_can_reach_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"expected 127.0.0.1:PORT. The admin server has no password"):
        MeshAdminConfig(address)
