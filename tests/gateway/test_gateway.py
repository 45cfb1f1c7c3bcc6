"""The gateway as a process: what it announces, logs and removes."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from meshgate_gateway.gateway import _place_of_runs
from meshgate_gateway.hosts.provider import CombinedHosts
from meshgate_gateway.settings import load_settings
from tests.gateway.server_process import TOKEN, ServerProcess, request


def test_the_token_is_never_logged() -> None:
    with ServerProcess() as server:
        server.ask("/v1/job", token=TOKEN)
        server.ask(f"/v1/job?token={TOKEN}", token="another-secret")
        with server.connect() as connection:
            connection.send(b"GET / HTTP/1.1\r\nAuthorization Bearer " + TOKEN.encode() + b"\r\n\r\n")
            assert connection.http().status == 400
        with server.join() as session:
            session.command(f"print Authorization: Bearer {TOKEN} another-secret")
            session.command(f"print {TOKEN}")
            session.command("print done")
            server.wait_logged("engine output", line="done")
        assert TOKEN not in server.log
        assert "Bearer another-secret" not in server.log
        assert "[redacted]" in server.log


def test_the_gateway_announces_its_url() -> None:
    with ServerProcess() as server:
        assert server.announcement == {"url": f"ws://127.0.0.1:{server.port}", "pid": server.process.pid}


def test_the_local_socket_is_private_and_removed_on_shutdown() -> None:
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


def test_a_port_in_use_is_one_readable_error() -> None:
    with ServerProcess() as server:
        with pytest.raises(RuntimeError) as error:
            ServerProcess("--port", str(server.port))
        assert f"cannot listen on 127.0.0.1:{server.port}: Address already in use" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "refuses"), [([], False), (["--provision-policy", "p"], True), (["--slurm-policy", "p"], True)]
)
def test_a_gateway_that_starts_jobs_for_others_runs_no_programs_itself(
    arguments: list[str], refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program would have the rights of the gateway's operator."""
    monkeypatch.setenv("MESHGATE_TOKEN", TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = _place_of_runs(load_settings(arguments), {}, listener, None, CombinedHosts([]))
    assert ("starts jobs for others" in place.refusal) is refuses
