"""The batch script."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from meshgate_slurm.script import (
    DIRECTORY,
    SPEC,
    Connect,
    batch_script,
    client_script,
    gateway_script,
    log_directory,
    log_pattern,
)
from meshgate_slurm.spec import SlurmSpec

CONNECT = Connect(["10.0.0.1:5000", "10.1.0.1:5000"], "s3cret")


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_the_loss_of_a_node_neither_ends_nor_restarts_the_job() -> None:
    script = batch_script(SlurmSpec(meshes={"workers": 2}), "/env/bin/python", "/logs", CONNECT)
    assert {"--no-kill", "--no-requeue", "--exclusive", "--nodes=2"} <= set(directives(script))
    (step,) = [line for line in script.splitlines() if line.startswith("srun ")]
    assert " --export=ALL " in step  # whatever sbatch exports
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--ntasks=2", "--ntasks-per-node=1"} <= set(step.split())
    assert step.endswith("/env/bin/python -u -m meshgate_worker.slurm")


def test_arguments_become_options_of_sbatch() -> None:
    spec = SlurmSpec(
        meshes={"workers": 1}, time_limit="1:00", partition="gpu", gpus_per_node=2, cpus_per_task=3, mem="4G",
        account="a", qos="q", exclusive=False, slurm_args=("--constraint=x",), ntasks_per_node=2, job_name="name",
    )  # fmt: skip
    expected = (
        "--time=1:00 --partition=gpu --gpus-per-node=2 --cpus-per-task=3 --mem=4G --account=a --qos=q --constraint=x "
        "--ntasks-per-node=2 --job-name=name --output=/logs/slurm_%j_name.log"
    )
    found = directives(batch_script(spec, "python", "/logs", CONNECT))
    assert set(expected.split()) <= set(found)
    assert "--exclusive" not in found


@pytest.mark.parametrize("option", ["--chdir={}", "--chdir {}", "-D{}", "-D {}", '--chdir="{}"'])
def test_a_directory_that_the_node_does_not_have_ends_the_job(tmp_path: Path, option: str) -> None:
    """Slurm itself goes on in /tmp."""
    chosen = tmp_path / "it's"
    spec = SlurmSpec(meshes={"workers": 1}, slurm_args=("--chdir=/other", option.format(chosen)))
    for script in (
        batch_script(spec, "python", "/logs", CONNECT),
        client_script(spec, "python", "/logs", "client"),
        gateway_script(spec, "python", "/logs", "/d"),
    ):
        shown = re.sub(r"^(exec|srun) ", "echo started; exit; ", script, flags=re.MULTILINE)
        chosen.rmdir() if chosen.exists() else None
        ran = subprocess.run(["bash", "-c", shown], cwd="/tmp", capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout) == (1, "")
        assert f"has no directory {chosen}, which slurm_args names (--chdir)" in ran.stderr
        chosen.mkdir()
        ran = subprocess.run(["bash", "-c", shown], cwd=chosen, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout) == (0, "started\n")


def test_variables_reach_the_workers_whatever_they_contain(tmp_path: Path) -> None:
    spec = SlurmSpec(meshes={"workers": 1}, env={"TEXT": "it's $HOME; `x`"})
    script = batch_script(spec, "python", str(tmp_path), CONNECT)
    shown = script.replace("srun", "printenv TEXT MESHGATE_SLURM_GATEWAY MESHGATE_SLURM_SECRET; : srun")
    out = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["it's $HOME; `x`", "10.0.0.1:5000,10.1.0.1:5000", "s3cret"]


def test_a_path_with_spaces_is_one_option_and_one_with_a_line_break_is_refused() -> None:
    spec = SlurmSpec(meshes={"workers": 1})
    assert '--output="/my logs/slurm_%j_monarch_job.log"' in batch_script(spec, "python", "/my logs", CONNECT)
    with pytest.raises(ValueError, match="line break"):
        batch_script(spec, "python", "/a\nb", CONNECT)


def test_each_worker_has_a_log_of_its_own() -> None:
    assert log_pattern(SlurmSpec(meshes={"workers": 1}), "/logs", "7", "n1") == "/logs/slurm_7_monarch_job_n1.log"


def test_the_script_of_a_client_runs_it_on_the_first_node_and_hides_the_specification() -> None:
    spec = SlurmSpec(meshes={"workers": 2}, env={"TEXT": "it's"})
    script = client_script(spec, "/env/bin/python", "/logs", "python train.py --name 'a b'")
    *_, last = script.splitlines()
    assert shlex.split(last)[-3:] == ["-m", "meshgate_slurm.batch", "python train.py --name 'a b'"]
    assert {"--no-kill", "--no-requeue", "--nodes=2"} <= set(directives(script))
    assert "srun" not in script
    exported = script.replace(last, f"printenv TEXT {SPEC}")
    text, specification = subprocess.run(
        ["bash", "-c", exported], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert (text, SlurmSpec.model_validate_json(specification)) == ("it's", spec)
    with pytest.raises(ValueError, match="line break"):
        client_script(spec, "/env\n/python", "/logs", "true")


def test_the_script_of_a_gateway_on_the_first_node_has_its_directory_and_no_token() -> None:
    spec = SlurmSpec(meshes={"workers": 2}, gateway_on="node")
    *_, last = (script := gateway_script(spec, "/env/bin/python", "/logs", "/home/ann/.meshgate")).splitlines()
    assert shlex.split(last) == ["exec", "/env/bin/python", "-u", "-m", "meshgate_slurm.batch"]
    assert f"export {DIRECTORY}=/home/ann/.meshgate" in script
    assert "SECRET" not in script


def test_logs_are_below_the_home_directory_unless_the_job_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    assert log_directory(SlurmSpec(meshes={"workers": 1})) == "/home/ann/.meshgate/slurm/logs"
    assert log_directory(SlurmSpec(meshes={"workers": 1}, log_dir="~/logs")) == "/home/ann/logs"
