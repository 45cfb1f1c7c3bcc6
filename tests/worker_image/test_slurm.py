"""The worker of a Slurm job as a process, connected to a gateway that says when it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meshgate_worker.slurm import Registration
from tests.programs import child_process
from tests.waiting import wait_for

DEADLINE = 60.0


@contextmanager
def worker(directory: Path) -> Iterator[tuple[subprocess.Popen[Any], socket.socket]]:
    """A worker that has sent its registration, and the gateway's end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        variables = {
            "MESHGATE_SLURM_GATEWAY": f"127.0.0.1:{listener.getsockname()[1]}",
            "MESHGATE_SLURM_SECRET": "s3cret",
            "SLURM_PROCID": "0",
            "SLURMD_NODENAME": "n1",
            "TMPDIR": str(directory),
        }
        command = [sys.executable, "-u", "-m", "meshgate_worker.slurm"]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with child_process(command, env={**os.environ, **variables}, text=True, **pipes) as process:
            listener.settimeout(DEADLINE)
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(DEADLINE)
                assert json.loads(line_from(connection))["secret"] == "s3cret"
                yield process, connection


def line_from(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        received = connection.recv(1)
        assert received, "the worker closed the connection"
        line += received
    return line


def end_of(process: subprocess.Popen[Any]) -> str:
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, output
    return str(output)


def test_a_worker_goes_on_after_sigterm_until_the_gateway_ends_it(tmp_path: Path) -> None:
    with worker(tmp_path) as (process, connection):
        connection.sendall(b'{"ok": true}\n')
        assert process.stdout is not None
        assert "meshgate_worker n1: connected to the gateway\n" in iter(process.stdout.readline, "")
        for _ in range(2):  # Slurm sends one at the beginning of the grace time, and one at its end
            process.send_signal(signal.SIGTERM)
            assert line_from(connection) == b'{"signal": "SIGTERM"}\n'
        assert process.poll() is None
        connection.shutdown(socket.SHUT_WR)
        assert "ending: SIGTERM\n" in end_of(process)


def test_sigterm_ends_a_worker_that_the_gateway_has_not_accepted(tmp_path: Path) -> None:
    with worker(tmp_path) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert "n1: ended: SIGTERM\n" in end_of(process)


def test_sigterm_ends_a_worker_that_cannot_tell_the_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    connection, gateway = socket.socketpair()
    ready_there, ready = os.pipe()
    lifetime_there, lifetime = os.pipe()
    with connection, gateway:
        registration = Registration(connection, {"node": "n1"}, ready_there, lifetime)
        os.write(ready, b"{}\n")
        os.close(ready)
        assert line_from(gateway) == b'{"node": "n1"}\n'
        gateway.sendall(b'{"ok": true}\n')
        wait_for(lambda: registration._accepted, "the worker to be accepted")
        connection.shutdown(socket.SHUT_WR)
        assert not registration.report_sigterm()
        gateway.close()
        assert os.read(lifetime_there, 1) == b""
    os.close(lifetime_there)
    assert "cannot tell the gateway of SIGTERM: " in capsys.readouterr().err
