"""However a gateway ends, nothing that it started stays; and it ends in order whenever it is asked to."""

from __future__ import annotations

import os
import signal
import socket
import uuid
from pathlib import Path

import pytest

from tests.gateway.server_process import ServerProcess, request, wait_gone


def test_it_announces_where_it_serves() -> None:
    with ServerProcess() as server:
        assert server.announcement == {"url": f"ws://127.0.0.1:{server.port}", "pid": server.process.pid}


def test_a_local_socket_is_for_this_user_alone_and_goes_with_the_gateway() -> None:
    with ServerProcess("--local-socket") as server:
        path = Path(server.announcement["socket"])
        assert path.parent.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(request("/healthz"))
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not path.parent.exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_gateway_in_order(signum: signal.Signals) -> None:
    with ServerProcess() as server, server.join() as connection:
        pid = connection.command("describe")["pid"]
        server.process.send_signal(signum)
        assert connection.closed_by_peer()
        assert server.wait() == 0
        wait_gone(pid)
        server.wait_logged("session ended", kind="ended")
        server.wait_logged("ended", reason=f"it received {signum.name}")


def test_an_engine_that_does_not_heed_the_end_is_killed_on_a_second_signal() -> None:
    with ServerProcess(environment={"STUB_ENGINE": "deaf"}) as server, server.join() as connection:
        pid = connection.command("describe")["pid"]
        server.process.send_signal(signal.SIGTERM)
        server.wait_logged("ending")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == -signal.SIGTERM
        wait_gone(pid)


def test_a_killed_gateway_leaves_no_engine() -> None:
    with ServerProcess() as server, server.join() as connection:
        pid = connection.command("describe")["pid"]
        server.process.kill()
        wait_gone(pid)


def test_while_it_ends_nobody_is_let_in() -> None:
    session = uuid.uuid4().hex
    with ServerProcess(environment={"STUB_ENGINE": "deaf"}) as server, server.join(session):
        with server.connect() as late:
            server.ask("/healthz")  # the server has accepted ``late`` before this
            server.process.send_signal(signal.SIGTERM)
            server.wait_logged("ending")
            late.send(b"GET /readyz HTTP/1.1\r\n\r\n")
            answer = late.http()
        assert answer.status == 503
        assert "SIGTERM" in answer.error
        server.process.send_signal(signal.SIGTERM)
        server.wait()


def test_it_ends_with_the_process_that_started_it() -> None:
    with ServerProcess() as server, server.join() as connection:
        pid = connection.command("describe")["pid"]
        os.close(server.lifetime)
        server.lifetime = -1
        assert server.wait() == 0
        wait_gone(pid)


def test_it_outlives_a_starter_that_has_let_go_and_then_ends_when_idle() -> None:
    with ServerProcess("--idle-timeout", "0.3") as server:
        connection = server.join()
        os.write(server.lifetime, b"\n")
        os.close(server.lifetime)
        server.lifetime = -1
        assert connection.command("describe")
        connection.send(b"goodbye\n")
        assert server.wait() == 0
        server.wait_logged("ended", reason="it had no session for 0.3 s")
        connection.close()


def test_it_does_not_end_for_idleness_while_there_is_a_session() -> None:
    session = uuid.uuid4().hex
    with ServerProcess("--idle-timeout", "2", "--lease", "3") as server:
        server.join(session).close()
        expired = server.wait_logged("session ended", session=session)
        assert expired["kind"] == "expired"
        assert server.wait() == 0


def test_a_gateway_that_nobody_visits_ends_when_idle() -> None:
    with ServerProcess("--idle-timeout", "0.1") as server:
        assert server.wait() == 0


def test_a_port_that_is_taken_is_one_readable_line() -> None:
    with ServerProcess() as server:
        with pytest.raises(RuntimeError) as refused:
            ServerProcess("--port", str(server.port))
        assert f"cannot listen at 127.0.0.1:{server.port}: Address already in use" in str(refused.value)
