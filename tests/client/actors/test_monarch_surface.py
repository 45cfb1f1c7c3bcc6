"""Every public name of the installed Monarch is available, or listed with the reason why it is not."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import monarch.actor
import monarch.config
import pytest
from monarch._src.actor.actor_mesh import ActorMesh

import meshgate
from benchmarks.sections import section
from meshgate.actors.monarch_surface import (
    AVAILABLE_JOB_NAMES,
    FORMER,
    JOB_MODULES,
    OWNERS,
    UNAVAILABLE,
    UNAVAILABLE_JOB_NAMES,
    missing_attribute,
)
from meshgate.errors import JobUnsupported
from tests.client.jobs.fake_job import FakeJob
from tests.conformance.page import PAGE, job_names_table, names_table, settings_table, signatures_table


def monarchs(name: str) -> Any:
    return ActorMesh if name == "ActorMesh" else getattr(monarch.actor, name)


def test_every_name_of_monarch_actor_is_available_or_listed() -> None:
    missing = {name for name in monarch.actor.__all__ if not hasattr(meshgate, name)}
    assert missing <= UNAVAILABLE.keys()


def test_every_name_of_monarch_config_is_available_or_listed() -> None:
    ours = getattr(meshgate, "config", None)
    missing = {f"config.{name}" for name in monarch.config.__all__ if not hasattr(ours, name)}
    assert missing <= UNAVAILABLE.keys()


@pytest.mark.parametrize(("ours", "theirs"), OWNERS.items())
def test_every_member_of_monarchs_classes_is_available_or_listed(ours: str, theirs: str) -> None:
    members = [name for name in dir(monarchs(theirs)) if not name.startswith("_")]
    missing = {f"{theirs}.{name}" for name in members if not hasattr(getattr(meshgate, ours), name)}
    assert missing <= UNAVAILABLE.keys()


def test_nothing_that_is_listed_is_available() -> None:
    classes = {theirs: getattr(meshgate, ours) for ours, theirs in OWNERS.items()}
    classes["config"] = getattr(meshgate, "config", None)
    for name in UNAVAILABLE:
        owner, _, member = name.rpartition(".")
        assert not hasattr(classes[owner] if owner else meshgate, member), name


def test_everything_that_is_listed_is_monarchs() -> None:
    owners = {theirs: monarchs(theirs) for theirs in OWNERS.values()} | {"": monarch.actor, "config": monarch.config}
    for name in UNAVAILABLE:
        owner, _, member = name.partition("(")[0].rpartition(".")
        assert hasattr(owners[owner], member), name


def test_the_error_of_a_missing_name_gives_the_reason() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'attach', unlike Monarch: the job starts the workers"):
        meshgate.attach  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        meshgate.nothing  # noqa: B018
    assert "job.sync() brings the code" in missing_attribute("HostMeshProxy", "sync_workspace")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LoginJob", ": use SlurmJob(login=...), which works over ssh, KubernetesJob, or on this machine ProcessJob"),
        ("PortForwarder", ": job.forward(), or `meshgate forward`"),
        (
            "proc_mesh",
            ": the hosts of a job spawn processes, as in ProcessJob({'workers': 1}).state().workers",
        ),
        ("serve", ": it is meshgate.spmd.serve"),
        ("attach", ", unlike Monarch: the job starts the workers and attaches to them"),
        ("ProcesJob", ". Did you mean 'ProcessJob'?"),
    ],
)
def test_old_and_misspelt_names_say_what_replaces_them_also_to_an_import(name: str, reason: str) -> None:
    with pytest.raises(AttributeError) as missing:
        getattr(meshgate, name)
    assert str(missing.value).startswith(f"module 'meshgate' has no attribute {name!r}{reason}")
    assert missing.value.obj is None  # Python would repeat the suggestion
    with pytest.raises(ImportError) as failed:
        exec(f"from meshgate import {name}")
    assert str(failed.value).startswith(f"cannot import {name!r} from meshgate{reason}")


def test_former_names_are_neither_here_nor_in_this_monarch() -> None:
    assert not [name for name in FORMER if hasattr(meshgate, name) or hasattr(monarch.actor, name)]


def test_modules_of_the_package_can_be_imported_and_private_names_are_answered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "from meshgate import testing; print(testing.__name__)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "meshgate.testing\n"
    monkeypatch.setattr(meshgate, "importlib", None)  # which would be used
    assert not hasattr(meshgate, "__wrapped__")


def test_the_documentation_lists_what_is_not_available() -> None:
    assert section(PAGE, "names") == names_table()
    assert section(PAGE, "settings") == settings_table()
    assert section(PAGE, "signatures") == signatures_table()


def resolve(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def monarchs_names() -> Iterator[str]:
    for module in JOB_MODULES:
        yield from (f"{module}.{name}" for name in importlib.import_module(module).__all__)


def members(name: str) -> set[str]:
    """The public members that a class defines itself, not those that it has from JobTrait."""
    found = resolve(name)
    if not inspect.isclass(found) or dataclasses.is_dataclass(found):  # its fields are parameters
        return set()
    inherited = {each for base in found.__mro__[1:] for each in vars(base)}
    return {each for each in vars(found) if not each.startswith("_") and each not in inherited}


def is_name(listed: str) -> bool:
    return "(" not in listed and listed.rpartition(".")[0] in JOB_MODULES


def test_every_job_name_is_available_or_listed() -> None:
    assert set(monarchs_names()) == {*AVAILABLE_JOB_NAMES, *filter(is_name, UNAVAILABLE_JOB_NAMES)}


@pytest.mark.parametrize(("theirs", "ours"), AVAILABLE_JOB_NAMES.items())
def test_every_member_is_available_or_listed(theirs: str, ours: str) -> None:
    missing = {f"{theirs}.{member}" for member in members(theirs) if not hasattr(resolve(ours), member)}
    assert missing <= UNAVAILABLE_JOB_NAMES.keys()


def test_members_that_are_listed_are_monarchs_and_missing_or_refused_here() -> None:
    for name in UNAVAILABLE_JOB_NAMES:
        owner, _, member = name.rpartition(".")
        if owner in JOB_MODULES or "(" in name:
            continue
        assert hasattr(resolve(owner), member), name
        if hasattr(resolve(AVAILABLE_JOB_NAMES[owner]), member):
            with pytest.raises(JobUnsupported):
                getattr(FakeJob(1), member)(*(["a", "b"] if "mount" in member else []))


def test_the_documentation_lists_the_job_names() -> None:
    assert section(PAGE, "job names") == job_names_table()
