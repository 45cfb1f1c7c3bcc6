"""What a gateway on a login node leaves, also if its start is interrupted, and which process it is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from meshgate_processes.identity import identify_process
from meshgate_slurm import commands, gateway_process
from meshgate_slurm.commands import SlurmError
from meshgate_slurm.gateway_process import (
    TEMPORARY,
    end_gateway,
    own_address,
    remove_files,
    start_gateway,
    write_private,
)
from meshgate_slurm.messages import Rejected, RunningSlurmJob
from meshgate_slurm.spec import SlurmSpec
from tests.small_disk import fill, small_disk

TIMEOUT = 60.0  # seconds; a wait takes a fraction of it on an idle machine
GATEWAY = """#!{python}
import os, pathlib, signal, sys, time

def end(*_):
    pathlib.Path({record!r}).write_text("cancelled its job")
    sys.exit()

signal.signal(signal.SIGTERM, {handler})
pathlib.Path({record!r}).write_text(str(os.getpid()))
os.write(int(sys.argv[sys.argv.index("--announce-fd") + 1]), b"no report\\n")
while True:
    time.sleep(0.1)  # pause() could miss a signal that comes just before it
"""


def job_of(pid: int, started: str) -> RunningSlurmJob:
    return RunningSlurmJob(
        apply_id="12345678", job_id=7, host="login", directory="/d", socket="/s", pid=pid, started=started, token="",
        meshes={"a": 1}, log_dir="",
    )  # fmt: skip


def test_the_files_of_a_killed_gateway_are_removed_with_its_temporary_ones(tmp_path: Path) -> None:
    directory, temporary = tmp_path / "job", tmp_path / "temporary"
    directory.mkdir()
    temporary.mkdir()
    (temporary / "left by Monarch").touch()
    (directory / TEMPORARY).symlink_to(temporary)
    (tmp_path / "other").touch()
    remove_files(directory)
    remove_files(directory)  # may be called again
    assert os.listdir(tmp_path) == ["other"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with small_disk(tmp_path / "home") as home:
        fill(home)
        (home / "empty-0").unlink()  # so that the file can be created
        with pytest.raises(OSError, match=f"{home}/token"):
            write_private(home / "token", "secret")


def test_a_process_that_reuses_the_pid_of_a_gateway_is_not_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as other:
        end_gateway(job_of(other.pid, "another machine:0/boot/1/5"))
        end_gateway(job_of(other.pid, "1"))
        assert other.poll() is None
        own = identify_process(other.pid)
        assert own is not None
        end_gateway(job_of(own.pid, own.started))
        assert other.wait() < 0


def test_the_address_is_that_of_the_route_to_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "node_address", lambda partition: "127.0.0.1")
    assert own_address("gpu") == "127.0.0.1"


def test_any_node_will_do_for_a_partition_without_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "node_address", lambda partition: None if partition else "127.0.0.1")
    assert own_address("empty") == "127.0.0.1"
    monkeypatch.setattr(commands, "node_address", lambda partition: None)
    with pytest.raises(SlurmError, match="lists no nodes"):
        own_address("empty")


@pytest.fixture
def fake_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes ``start_gateway`` start a program that handles SIGTERM by ``handler``, and returns the file in which that
    records its pid and its end."""

    def make(handler: str) -> Path:
        record, program = tmp_path / "record", tmp_path / "gateway"
        program.write_text(GATEWAY.format(python=sys.executable, record=str(record), handler=handler))
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return record

    return make


def interrupt_once_it_runs(descriptor: int, deadline: float) -> NoReturn:
    os.read(descriptor, 1)
    raise KeyboardInterrupt


def test_an_interrupted_start_ends_the_gateway_which_cancels_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_gateway: Callable[[str], Path]
) -> None:
    record = fake_gateway("end")
    monkeypatch.setattr(gateway_process, "_read_line", interrupt_once_it_runs)
    with pytest.raises(KeyboardInterrupt):
        start_gateway(tmp_path / "job", "12345678", SlurmSpec(meshes={"a": 1}))
    assert record.read_text() == "cancelled its job"
    assert not (tmp_path / "job").exists()


def test_a_gateway_that_does_not_end_when_its_start_is_interrupted_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_gateway: Callable[[str], Path]
) -> None:
    record = fake_gateway("signal.SIG_IGN")
    monkeypatch.setattr(gateway_process, "_read_line", interrupt_once_it_runs)
    monkeypatch.setattr(gateway_process, "SUBMISSION_END_TIMEOUT", 0.05)
    with pytest.raises(KeyboardInterrupt):
        start_gateway(tmp_path / "job", "12345678", SlurmSpec(meshes={"a": 1}))
    process = identify_process(int(record.read_text()))
    assert process is None or process.wait_ended(TIMEOUT)
    assert not (tmp_path / "job").exists()


def test_a_gateway_that_does_not_report_in_time_can_cancel_its_job(
    tmp_path: Path, fake_gateway: Callable[[str], Path]
) -> None:
    record = fake_gateway("end")
    answer = start_gateway(tmp_path / "job", "12345678", SlurmSpec(meshes={"a": 1}))
    assert isinstance(answer, Rejected)
    assert "it did not start within" in answer.error
    assert record.read_text() == "cancelled its job"
    assert not (tmp_path / "job").exists()


def test_a_gateway_that_slurm_does_not_answer_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sinfo").write_text(
        "#!/bin/sh\necho 'Unable to contact slurm controller (connect failure)' >&2; exit 1\n"
    )
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    answer = start_gateway(tmp_path / "job", "12345678", SlurmSpec(meshes={"a": 1}))
    assert isinstance(answer, Rejected)
    assert (answer.silent, answer.error.partition(": ")[0]) == (True, "sinfo failed")
    assert not (tmp_path / "job").exists()
