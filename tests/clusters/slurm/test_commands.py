"""The part of a node that goes with some of its GPUs; what becomes of commands that cannot run."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from meshgate_slurm import commands
from meshgate_slurm.commands import NoSlurm, Refused, Unanswered, Unreachable, share_of_node


def test_the_share_is_that_of_the_smallest_node_with_enough_gpus() -> None:
    nodes = [(64, 512_000, "gpu:a100:8(S:0-1),nvme:1"), (32, 100_000, "gpu:4"), (4, 8000, "(null)")]
    assert share_of_node(nodes, 2) == (16, 50_000)
    assert share_of_node(nodes, 8) == (64, 512_000)
    with pytest.raises(commands.SlurmError, match="no node of the partition has 9 GPUs"):
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


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("Invalid account or account/partition combination specified", "`sacctmgr show assoc where user=$USER "),
        ("Invalid qos specification", "Set account= and qos=. "),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "`sacctmgr show qos` the limits",
        ),
        (
            "Invalid partition name specified",
            "Set partition= and time_limit=. The partitions and their limits: %R %l, b",
        ),
        ("Requested time limit is invalid (missing or exceeds some limit)", "their limits: %R %l, b"),
        ("Requested node configuration is not available", "CPUs, MB of memory and GPUs: %R %c %m %G, b"),
        ("Node count specification invalid", "The partitions and their nodes: %R %D, b"),
        ("Invalid feature specification", "The features of the nodes: %f, b"),
    ],
)
def test_a_refusal_says_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, remedy: str
) -> None:
    fake(
        tmp_path, sbatch=f'echo "sbatch: error: {words}" >&2; exit 1', sinfo='echo "${2#--format=}"; echo "b "; echo b'
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(Refused) as refused:
        commands.submit("", directory="/")
    first, second = str(refused.value).splitlines()
    assert first == f"Slurm refused the job: sbatch: error: {words}"
    assert remedy in second


def test_a_refusal_names_a_few_values_and_none_without_sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(
        tmp_path,
        sbatch="echo invalid partition >&2; exit 1",
        sinfo="i=0; while [ $((i+=1)) -le 17 ]; do echo p$i; done",
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(Refused, match=r"their limits: p1, p2, .*, p16, …$"):
        commands.submit("", directory="/")
    fake(tmp_path, sinfo="exit 1")
    with pytest.raises(Refused, match=r"invalid partition$"):
        commands.submit("", directory="/")


def fake(directory: Path, **scripts: str) -> None:
    for name, script in scripts.items():
        (directory / name).write_text(f"#!/bin/sh\n{script}\n")
        (directory / name).chmod(0o755)


def test_a_machine_without_the_command_has_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSlurm, match="has no squeue on its PATH"):
        commands.jobs([7])


@pytest.mark.parametrize(
    "words",
    [
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    ],
)
def test_a_controller_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    failing = f"echo '{words}' >&2; exit 1"
    fake(tmp_path, squeue=failing, scancel=failing)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for attempt in (lambda: commands.jobs([7]), lambda: commands.cancel(7)):
        with pytest.raises(Unanswered, match=r"(?s)slurm_load_jobs error.*Try again once `scontrol ping` says UP"):
            attempt()


def submissions(tmp_path: Path) -> int:
    return (tmp_path / "sbatch.calls").read_text().count("sbatch")


# Slurm takes the job, but the answer to sbatch is lost; then squeue gets no answer at first.
LOST = """echo sbatch >>{0}/sbatch.calls
grep -o 'comment=.*' | head -1 | cut -d= -f2 >{0}/comment
echo "sbatch: error: Batch job submission failed: {1}" >&2; exit 1"""
LISTED = """[ -e {0}/asked ] || {{ : >{0}/asked; echo "slurm_load_jobs error: Socket timed out" >&2; exit 1; }}
echo "6 other"; echo "7 $(cat {0}/comment)" """


def test_a_job_whose_submission_got_no_answer_is_found_and_not_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, sbatch=LOST.format(tmp_path, "Socket timed out"), squeue=LISTED.format(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert commands.submit("#!/bin/bash\ntrue\n", directory="/") == 7
    assert submissions(tmp_path) == 1


def test_a_submission_without_an_answer_or_a_job_may_not_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "FIND_TIMEOUT", 0.1)
    fake(tmp_path, sbatch=LOST.format(tmp_path, "Socket timed out"), squeue="echo '6 other'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(Unreachable, match=r"(?s)Slurm may have taken the job.*meshgate-.*`scancel` with") as lost:
        commands.submit("#!/bin/bash\ntrue\n", directory="/")
    assert not isinstance(lost.value, Unanswered)


def test_a_submission_that_reached_no_controller_may_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "Unable to contact slurm controller (connect failure)"
    fake(tmp_path, sbatch=LOST.format(tmp_path, words), squeue="exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(Unanswered, match=r"connect failure(?s:.*)`scontrol ping` says UP$"):
        commands.submit("#!/bin/bash\ntrue\n", directory="/")
    assert submissions(tmp_path) == 1


def test_a_node_has_a_problem_if_slurm_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for reason, problem in (("memory errors", "DOWN: memory errors"), ("", "")):
        fake(tmp_path, scontrol=f"""echo '{{"nodes": [{{"state": ["DOWN"], "reason": "{reason}"}}]}}'""")
        assert commands.node_problem("n1") == problem
        assert commands.node_state("n1") == (problem or "DOWN")
