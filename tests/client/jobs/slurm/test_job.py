"""Arguments that are wrong are refused by name, before any connection is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshgate import SlurmJob, job_loads
from meshgate.jobs.slurm.job import build_spec


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"time_limit": "soon"}, r"SlurmJob\(time_limit='soon'\): not a time of Slurm's"),
        ({"meshes": {"workers": 0}}, r"SlurmJob\(meshes\['workers'\]=0\)"),
        ({"exclusive": False, "monarch_port": 22222}, "SlurmJob: monarch_port=22222 with exclusive=False"),
        ({"login": "-oProxyCommand=evil"}, "expected a destination of ssh"),
        ({"login": "a b"}, "expected a destination of ssh"),
        ({"out_of_cluster": True}, "out_of_cluster=True.*pass login= instead"),
        ({"attach_to": "tcp://n1:22222"}, "attach_to=.*pass login= instead"),
        ({"bind_to": "0.0.0.0"}, "bind_to=.*remove the argument"),
        ({"job_start_timeout": 0}, "job_start_timeout=0"),
        ({"sync_dirs": [__file__]}, "is not a directory"),
    ],
)
def test_each_error_names_its_argument(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SlurmJob(**{"meshes": {"workers": 1}, **arguments})


@pytest.mark.parametrize("argument", ["slurm_args", "sync_dirs"])
def test_one_text_is_not_a_list(argument: str) -> None:
    with pytest.raises(TypeError, match=f"{argument}='--x'.*expected a list"):
        SlurmJob({"workers": 1}, **{argument: "--x"})  # type: ignore[arg-type]


def test_meshes_that_are_not_numbers_by_name_are_rejected() -> None:
    with pytest.raises(
        TypeError, match=r"^SlurmJob: meshes=2: expected the number of nodes of each, such as \{'workers'"
    ):
        SlurmJob(2)  # type: ignore[arg-type]


def test_an_argument_of_none_has_its_default() -> None:
    assert build_spec({"meshes": {"workers": 1}, "mem": None, "lease": None}).idle_timeout == 1800


def test_meshes_can_be_added_and_nodes_shared() -> None:
    job = SlurmJob({})
    job.add_mesh("trainers", 2)
    job.add_mesh("data", 1)
    job.share_node(tasks_per_node=2, gpus_per_task=1, partition="gpu")
    spec = build_spec(job._arguments)
    assert (spec.meshes, spec.gpus_per_node, spec.exclusive, spec.share) == ({"trainers": 2, "data": 1}, 2, False, True)
    with pytest.raises(ValueError, match="meshes"):
        job.add_mesh("data", 0)


def test_a_job_that_is_not_running_can_be_saved(tmp_path: Path) -> None:
    job = SlurmJob(
        {"workers": 2}, login="me@login", partition="gpu", job_start_timeout=5, slurm_args=["--constraint=x"]
    )
    again = job_loads(job.dumps())
    assert isinstance(again, SlurmJob)
    assert repr(again) == "SlurmJob({'workers': 2}, login='me@login')"
    assert build_spec(again._arguments) == build_spec(job._arguments)
    assert not again.active
