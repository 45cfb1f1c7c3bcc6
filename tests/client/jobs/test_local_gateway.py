"""How a local gateway is launched, and why it did not start. ``test_process`` runs real ones."""

from __future__ import annotations

import logging
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshgate.errors import JobStartFailed
from meshgate.jobs import local_gateway
from meshgate.jobs.local_gateway import (
    JOB_VARIABLE,
    GatewayRecord,
    LaunchOptions,
    LocalGateway,
    create_job_directory,
    log_tail,
    prune_job_directories,
    remove_job_directory,
)
from meshgate_slurm.gateway_process import TEMPORARY_PREFIX

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
    monkeypatch.setenv("MESHGATE_RUN_TOKEN", "of the job that a submitted program runs in")
    monkeypatch.setenv("INHERITED", "yes")
    environment = options.process_environment("secret", "/tmp/job")
    assert "MESHGATE_MESH" not in environment
    assert "MESHGATE_RUN_TOKEN" not in environment
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
    before = set(local_gateway._lifetimes)
    with pytest.raises(JobStartFailed, match=message):
        LocalGateway.start(options)
    assert local_gateway._lifetimes == before


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


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A directory with a path that is short enough, in which even a young directory may be pruned."""
    monkeypatch.setattr(local_gateway, "MIN_AGE", -1.0)
    path = tempfile.mkdtemp(prefix="m-", dir="/tmp")
    yield path
    shutil.rmtree(path)


def test_a_directory_is_private_and_removed_with_what_it_contains(parent: str) -> None:
    path, lock = create_job_directory(parent)
    os.close(lock)
    assert os.path.dirname(path) == parent
    assert os.stat(path).st_mode & 0o777 == 0o700
    (Path(path) / "inside").mkdir()
    remove_job_directory(path)
    remove_job_directory(path)
    assert os.listdir(parent) == []


def test_only_directories_whose_gateway_has_ended_are_pruned(parent: str) -> None:
    (running, lock), (_, its_lock) = (create_job_directory(parent) for _ in range(2))
    os.close(its_lock)
    (Path(parent) / "another").mkdir()
    prune_job_directories(parent)
    assert sorted(os.listdir(parent)) == sorted(["another", os.path.basename(running)])
    os.close(lock)
    prune_job_directories(parent)
    assert os.listdir(parent) == ["another"]


@pytest.mark.filterwarnings("error")
def test_a_directory_into_which_a_process_still_writes_is_left_to_the_next_job(
    parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = create_job_directory(parent)
    os.close(lock)

    def write_again(directory: str, **_: object) -> None:
        (Path(path) / "late").touch()
        os_rmdir(directory, **_)

    os_rmdir: Any = os.rmdir
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", write_again)
        prune_job_directories(parent)
    assert os.listdir(path) == ["late"]
    prune_job_directories(parent)
    assert os.listdir(parent) == []


def test_the_directories_of_slurm_gateways_are_not_pruned(parent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_gateway, "MIN_AGE", -1)
    directory = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=parent))
    prune_job_directories(parent)
    assert directory.exists()


def test_a_directory_that_may_not_be_locked_yet_is_not_pruned(parent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_gateway, "MIN_AGE", 60.0)
    path, lock = create_job_directory(parent)
    os.close(lock)
    prune_job_directories(parent)
    assert os.listdir(parent) == [os.path.basename(path)]


def test_sockets_fit_into_the_directory_even_if_the_usual_place_has_a_long_path(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    path, lock = create_job_directory(str(long))
    os.close(lock)
    os.rmdir(path)
    assert os.path.dirname(path) == "/tmp"


def test_a_directory_that_cannot_be_removed_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="cannot remove the temporary files of a job in .*file"):
        remove_job_directory(str(tmp_path / "file"))


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> int:
    """The ID of a user without an account, who is one of the system's own to the jobs that other tests start."""
    taken = {account.pw_uid for account in pwd.getpwall()}
    user = next(user for user in range(300 + os.getpid() % 300, 1000) if user not in taken)
    monkeypatch.setattr(local_gateway, "FIRST_USER", user)
    return user


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")


@only_root
def test_another_users_process_is_named_once_at_the_start(caplog: pytest.LogCaptureFixture, stranger: int) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=stranger, cwd="/") as process:
        assert f"user {stranger}" in local_gateway.other_users()
        with caplog.at_level(logging.WARNING, "meshgate.jobs"):
            local_gateway.warn_of_other_users()
            local_gateway.warn_of_other_users()
        assert process.stdin is not None
        process.stdin.close()
    (message,) = [record.getMessage() for record in caplog.records if f"user {stranger}" in record.getMessage()]
    assert "can run code as you while a local job runs" in message


@only_root
def test_a_process_that_has_ended_is_not_another_users(stranger: int) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=stranger, cwd="/") as process:
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays in /proc until its parent waits for it
        assert f"user {stranger}" not in local_gateway.other_users()


def test_own_processes_and_those_of_the_system_are_not_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_gateway, "FIRST_USER", 2**32)
    assert local_gateway.other_users() == []


def test_a_machine_without_proc_has_no_abstract_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("pathlib.Path.iterdir", fail)
    assert local_gateway.other_users() == []


def test_a_python_without_the_gateway_and_the_worker_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    there = set[str]()
    monkeypatch.setattr(local_gateway.importlib.util, "find_spec", lambda name: name in there)
    with pytest.raises(
        JobStartFailed, match=r"monarch and pydantic_settings are not installed\. Run pip install 'mesh"
    ):
        local_gateway.require_gateway_packages()
    there.add("monarch")
    with pytest.raises(JobStartFailed, match=r": pydantic_settings is not installed\. "):
        local_gateway.require_gateway_packages()
