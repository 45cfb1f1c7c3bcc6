"""What a job may ask for; everything else is refused with the name of the argument."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from meshgate_slurm.spec import SlurmSpec, time_limit_minutes


def spec(**arguments: Any) -> SlurmSpec:
    return SlurmSpec.model_validate({"meshes": {"workers": 2}, **arguments})


def test_the_nodes_are_those_of_all_meshes() -> None:
    assert spec(meshes={"trainers": 3, "data": 1}).nodes == 4


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("10", 10), ("10:30", 10.5), ("01:30:00", 90), ("2-0", 2880), ("1-06:30", 1830), ("1-0:0:30", 1440.5)],
)
def test_times_are_those_of_slurm(text: str, minutes: float) -> None:
    assert time_limit_minutes(text) == minutes


def test_a_limit_can_be_none() -> None:
    assert time_limit_minutes("UNLIMITED") == float("inf")
    assert time_limit_minutes("1 hour") is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"meshes": {}}, "at least 1 item"),
        ({"meshes": {"my mesh": 1}}, "pattern"),
        ({"meshes": {"workers": 0}}, "greater than or equal to 1"),
        ({"time_limit": "1h"}, "not a time of Slurm's"),
        ({"mem": "lots"}, "not an amount of memory"),
        ({"job_name": "a/b"}, "log files can have this name"),
        ({"partition": " "}, "not empty"),
        ({"slurm_args": ("gpu",)}, "'gpu' is not an option"),
        ({"slurm_args": ("--nodes=3",)}, "--nodes cannot be set here: use meshes="),
        ({"slurm_args": ("-N3",)}, "-N cannot be set here: use meshes="),
        ({"slurm_args": ("--requeue",)}, "the job depends on its own value"),
        ({"slurm_args": ("-t 5",), "time_limit": "5"}, "slurm_args has -t and time_limit= is set as well"),
        ({"env": {"A=B": "1"}}, "'A=B' is not the name of a variable: use letters, digits and _, no digit first"),
        ({"env": {"A B": "1"}}, "'A B' is not the name of a variable"),
        ({"env": {"A\nid": "1"}}, r"'A\\nid' is not the name of a variable"),
        ({"env": {"A$(id)": "1"}}, "is not the name of a variable"),
        ({"env": {"": "1"}}, "'' is not the name of a variable"),
        ({"env": {"A": "1\0"}}, "the value of 'A' contains a null byte"),
        ({"share": True}, "exclusive=True contradicts share_node"),
        ({"ntasks_per_node": 4, "gpus_per_node": 2}, "each task needs at least one GPU"),
        ({"monarch_port": 22222, "exclusive": False}, "two jobs on a node would collide"),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        spec(**arguments)


def test_other_options_of_sbatch_pass() -> None:
    assert spec(slurm_args=("--constraint=a100", "-C b", "--time=5")).slurm_args[0] == "--constraint=a100"
