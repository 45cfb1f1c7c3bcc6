"""How a local gateway is launched, and why it did not start. ``test_process`` runs real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshgate.errors import JobStartFailed
from meshgate.jobs.this_machine import local_gateway
from meshgate.jobs.this_machine.local_gateway import JOB_VARIABLE, GatewayRecord, LaunchOptions, LocalGateway, log_tail

APPLY_ID = str(uuid.uuid4())  # by which processes are killed, so unique to this test process


@pytest.fixture
def options(tmp_path: Path) -> LaunchOptions:
    return LaunchOptions(
        apply_id=APPLY_ID, meshes={"a": 2, "b": 1}, environment={"COLOUR": "green", "PYTHONPATH": "/extra"},
        log=tmp_path / "log", lease=5, idle_timeout=0,
    )  # fmt: skip


def test_arguments_name_meshes_descriptors_and_times(options: LaunchOptions) -> None:
    arguments = " ".join(options.arguments(announce=3, lifetime=4, directory="/tmp/job")[1:])
    assert arguments == (
        "-m meshgate_gateway --local-mesh a=2 --local-mesh b=1 --local-socket --announce-fd 3 --lifetime-fd 4 "
        "--lease 5 --idle-timeout 0 --remove-at-end /tmp/job"
    )


def test_the_environment_has_token_and_marker_and_no_settings_of_another_gateway(
    options: LaunchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHGATE_MESH", "others=tcp://127.0.0.1:1")
    monkeypatch.setenv("INHERITED", "yes")
    environment = options.process_environment("secret", "/tmp/job")
    assert "MESHGATE_MESH" not in environment
    assert (environment["INHERITED"], environment["COLOUR"]) == ("yes", "green")
    assert (environment["MESHGATE_TOKEN"], environment[JOB_VARIABLE]) == ("secret", APPLY_ID)
    assert environment["TMPDIR"] == "/tmp/job"
    assert environment["PYTHONPATH"].split(os.pathsep)[-1] == "/extra"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('a reason', flush=True); sys.exit(3)", r"did not start: it exited with code 3\na reason"),
        ("os.write(fd, b'garbage' + chr(10).encode())", "did not start: invalid announcement b'garbage"),
        ("sys.stdin = open(fd, 'rb'); time.sleep(100)", r"did not start: it was not ready within 0 s"),
    ],
)
def test_a_failed_start_reports_the_reason_and_the_end_of_the_log(
    options: LaunchOptions, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    def arguments(self: LaunchOptions, announce: int, lifetime: int, directory: str) -> list[str]:
        return [sys.executable, "-c", f"import os, sys, time; fd = {announce}; {program}"]

    monkeypatch.setattr(LaunchOptions, "arguments", arguments)
    if "100" in program:
        monkeypatch.setattr(local_gateway, "START_TIMEOUT", 0.0)
    with pytest.raises(JobStartFailed, match=message):
        LocalGateway.start(options)
    assert not local_gateway._lifetimes


def test_a_line_is_read_until_newline_end_of_file_or_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.write(write, b"half")
    with monkeypatch.context() as patch:
        patch.setattr(local_gateway, "time", SimpleNamespace(monotonic=iter((100.0, 131.0)).__next__))
        assert local_gateway._read_line(read, 130.0) == b"half"
    os.write(write, b"line\n")
    assert local_gateway._read_line(read, time.monotonic() + 30) == b"line\n"
    os.write(write, b"end")
    os.close(write)
    assert local_gateway._read_line(read, time.monotonic() + 30) == b"end"
    os.close(read)


def test_a_gateway_that_does_not_answer_is_unhealthy() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        process = local_gateway.identify_process(child.pid)
        assert process is not None
        record = GatewayRecord(
            apply_id=APPLY_ID, url="ws://127.0.0.1:1", token="secret", pid=process.pid, started=process.started
        )
        gateway = LocalGateway(record)
        assert (gateway.alive, gateway.healthy()) == (True, False)
        assert "secret" not in repr(record)
        gateway.stop()
        assert not gateway.alive
        gateway.stop()


def test_a_log_tail_is_bounded_and_empty_without_a_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 10_000 + b"end\n")
    assert log_tail(tmp_path / "log") == "x" * (local_gateway.LOG_TAIL_BYTES - 4) + "end"
    assert log_tail(tmp_path / "missing") == ""
