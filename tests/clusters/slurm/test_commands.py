"""The part of a node that goes with some of its GPUs; what becomes of commands that cannot run."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from meshgate_slurm import commands
from meshgate_slurm.commands import NoSlurm, SlurmError, Unreachable, share_of_node


def test_the_share_is_that_of_the_smallest_node_with_enough_gpus() -> None:
    nodes = [(64, 512_000, "gpu:a100:8(S:0-1),nvme:1"), (32, 100_000, "gpu:4"), (4, 8000, "(null)")]
    assert share_of_node(nodes, 2) == (16, 50_000)
    assert share_of_node(nodes, 8) == (64, 512_000)
    with pytest.raises(SlurmError, match="no node of the partition has 9 GPUs"):
        share_of_node(nodes, 9)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM, errno.EACCES, errno.ESTALE])
def test_a_command_that_cannot_be_run_is_an_error_of_slurm(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*arguments: object, **options: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(Unreachable, match=f"cannot run squeue on .*{os.strerror(code)}"):
        commands.jobs([7])


def test_undecodable_output_is_an_error_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\nprintf '\\377'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(Unreachable, match=r"cannot read the output of squeue: .*0xff"):
        commands.jobs([7])


def test_a_cluster_without_a_usable_name_is_an_error_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'ClusterName             = '$NAME\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("NAME", "gpu-2.site")
    assert commands.cluster_name() == "gpu-2.site"
    for name in ("", "(null)", "..", "a/b"):
        monkeypatch.setenv("NAME", name)
        with pytest.raises(Unreachable, match="no usable ClusterName"):
            commands.cluster_name()


def test_a_machine_without_the_command_has_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSlurm, match="has no squeue on its PATH"):
        commands.jobs([7])
