"""An AppDef is read completely, or refused with the name of the role and the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torchx import specs

from meshgate.jobs.spmd.appdef import read_appdef, refuse_unmapped

ARGS = ["torchrun", "--nnodes=2", "--nproc-per-node=8", "-m", "train"]


def app(*more: specs.Role, **fields: Any) -> specs.AppDef:
    role = specs.Role(**{"name": "trainer", "image": "img", "entrypoint": "run.sh", "args": ARGS, **fields})
    return specs.AppDef(name="my-training", roles=[role, *more])


def test_an_entrypoint_that_runs_its_arguments_is_a_wrapper() -> None:
    role = read_appdef(app(num_replicas=2, env={"A": "1"}, resource=specs.Resource(cpu=4, gpu=8, memMB=1024)))
    assert (role.command, role.wrapper, role.replicas) == (tuple(ARGS), ("run.sh",), 2)
    assert (role.image, role.environment, role.cpus, role.gpus, role.memory_mb) == ("img", {"A": "1"}, 4, 8, 1024)


def test_an_entrypoint_may_be_the_command_itself() -> None:
    role = read_appdef(app(entrypoint="/usr/bin/python", args=["-m", "torchrun", "train.py"]))
    assert role.command == ("/usr/bin/python", "-m", "torchrun", "train.py")
    assert role.wrapper == ()


def test_resources_that_are_not_given_are_left_to_the_job() -> None:
    role = read_appdef(app())
    assert (role.cpus, role.gpus, role.memory_mb) == (None, None, None)


@pytest.mark.parametrize(
    ("appdef", "message"),
    [
        (specs.AppDef(name="x", roles=[]), "the AppDef 'x' has 0 roles"),
        (app(specs.Role(name="other", image="")), "has 2 roles: SPMD jobs have one"),
        (app(args=["bash", "x"]), r"role 'trainer' runs 'run.sh bash x': expected torchrun"),
        (app(num_replicas=0), "num_replicas=0: expected at least 1"),
    ],
)
def test_what_is_not_one_role_with_torchrun_is_refused(appdef: specs.AppDef, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_appdef(appdef)


def test_what_is_not_an_appdef_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a command as a list of strings, or a torchx AppDef, not 3"):
        read_appdef(3)


def test_the_first_project_of_the_workspace_is_the_directory(tmp_path: Path) -> None:
    assert read_appdef(app(workspace=specs.Workspace({str(tmp_path): ""}))).workspace == str(tmp_path)
    with pytest.raises(ValueError, match=r"its workspace .*/nowhere is not a directory"):
        read_appdef(app(workspace=specs.Workspace({str(tmp_path / "nowhere"): ""})))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_replicas", 1),
        ("max_retries", 2),
        ("port_map", {"http": 80}),
        ("mounts", [specs.BindMount("/a", "/b")]),
    ],
)
def test_fields_that_a_job_does_not_take_are_named(field: str, value: Any) -> None:
    refuse_unmapped(app(), "kubernetes")
    with pytest.raises(ValueError, match=f"role 'trainer': {field} is not supported with the scheduler kubernetes"):
        refuse_unmapped(app(**{field: value}), "kubernetes")


@pytest.mark.parametrize("field", ["capabilities", "devices"])
def test_resources_that_a_job_does_not_take_are_named(field: str) -> None:
    resource = specs.Resource(cpu=1, gpu=0, memMB=1, **{field: {"x": 1}})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"resource\.{field} is not supported"):
        refuse_unmapped(app(resource=resource), "kubernetes")
