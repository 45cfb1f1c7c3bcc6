"""What a gateway on a login node leaves, and which process it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshgate_processes.identity import identify_process
from meshgate_slurm import commands
from meshgate_slurm.commands import SlurmError
from meshgate_slurm.gateway_process import TEMPORARY, end_gateway, own_address, remove_files
from meshgate_slurm.messages import RunningSlurmJob


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
