"""``/metrics``: who may read it, and what it says, over real sockets with a stub engine."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.server_process import TOKEN, ServerProcess, Socket, request
from tests.ports import free_port


@pytest.fixture(scope="module")
def open_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(open_port: int) -> Iterator[ServerProcess]:
    with ServerProcess("--mesh", "workers=ipc:///nowhere/a,ipc:///nowhere/b", "--metrics-port", str(open_port)) as made:
        yield made


def scrape(port: int, token: str | None = None) -> dict[tuple[str, tuple[str, ...]], float]:
    """The samples, by name and values of labels."""
    with Socket(port) as connection:
        connection.send(request("/metrics", token=token))
        status, headers = connection.head()
        text = connection.rest().decode()
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    families = text_string_to_metric_families(text)
    return {(each.name, tuple(each.labels.values())): each.value for family in families for each in family.samples}


def test_the_gateways_own_port_requires_credentials(server: ServerProcess) -> None:
    assert server.ask("/metrics").status == 401
    assert scrape(server.port, TOKEN)["meshgate_hosts", ("expected",)] == 2


def test_the_port_for_metrics_serves_nothing_else(server: ServerProcess, open_port: int) -> None:
    assert ("meshgate_build_info", ("0.1.0",)) not in scrape(open_port)
    for path in ("/v1/job", "/healthz", f"/v1/sessions/{uuid.uuid4().hex}"):
        with Socket(open_port) as connection:
            connection.send(request(path, token=TOKEN))
            assert connection.http().status == 404


def test_sessions_reconnections_and_refusals_are_counted(server: ServerProcess, open_port: int) -> None:
    before = scrape(open_port)
    session = uuid.uuid4().hex
    with server.join(session):
        pass
    server.wait_logged("session disconnected", session=session)
    with server.join(session, resume=True):
        server.wait_logged_times("audit", 2, session=session)
        during = scrape(open_port)
    server.ask("/v1/job", token="wrong")
    after = scrape(open_port)

    def grown(name: str, *labels: str) -> float:
        return after[name, labels] - before.get((name, labels), 0)

    assert during["meshgate_sessions", ("connected",)] == 1
    assert grown("meshgate_sessions_started_total") == 1
    assert grown("meshgate_reconnections_total") == 1
    assert grown("meshgate_requests_total", "session", "allowed") == 2
    assert grown("meshgate_requests_total", "describe job", "refused") == 1


def test_what_engines_count_is_served(server: ServerProcess, open_port: int) -> None:
    counts = (
        '{"type": "counts", "calls": {"ok": 3, "failed": 1}, "call_times": {"buckets": [2, 1], "seconds": 0.5},'
        ' "bytes_sent": 7, "lines": 9}'
    )
    session = uuid.uuid4().hex
    with server.join(session) as connection:
        connection.send(f"send {counts}\n".encode())
    server.wait_logged("session disconnected", session=session)  # sent after the counts
    found = scrape(open_port)
    assert found["meshgate_calls_total", ("ok",)] == 3
    assert found["meshgate_calls_total", ("failed",)] == 1
    assert found["meshgate_call_seconds_bucket", ("0.001",)] == 2
    assert found["meshgate_call_seconds_bucket", ("0.0025",)] == 3
    assert found["meshgate_call_seconds_bucket", ("+Inf",)] == 3
    assert found["meshgate_call_seconds_sum", ()] == 0.5
    assert found["meshgate_client_bytes_total", ("sent",)] == 7
    assert found["meshgate_output_lines_total", ()] == 9
    assert found["process_resident_memory_bytes", ()] > 0


def test_no_name_of_a_session_or_mesh_is_served(server: ServerProcess, open_port: int) -> None:
    session = uuid.uuid4().hex
    with server.join(session), Socket(open_port) as connection:
        connection.send(request("/metrics"))
        connection.head()
        text = connection.rest().decode()
    assert session not in text
    assert "workers" not in text


def test_a_port_that_is_taken_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"cannot listen on 127.0.0.1:{port}: .*choose another --metrics-port"):
            ServerProcess("--metrics-port", str(port))
