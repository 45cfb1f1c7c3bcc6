"""Every public name of Monarch's job modules is available, or listed with the reason why it is not."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.sections import section
from meshgate.errors import JobUnsupported
from meshgate.jobs.monarch_names import AVAILABLE, MODULES, UNAVAILABLE
from tests.client.jobs.fake_job import FakeJob
from tests.conformance.page import PAGE, job_names_table


def resolve(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def monarchs_names() -> Iterator[str]:
    for module in MODULES:
        yield from (f"{module}.{name}" for name in importlib.import_module(module).__all__)


def members(name: str) -> set[str]:
    """The public members that a class defines itself, not those that it has from JobTrait."""
    found = resolve(name)
    if not inspect.isclass(found) or dataclasses.is_dataclass(found):  # its fields are parameters
        return set()
    inherited = {each for base in found.__mro__[1:] for each in vars(base)}
    return {each for each in vars(found) if not each.startswith("_") and each not in inherited}


def is_name(listed: str) -> bool:
    return "(" not in listed and listed.rpartition(".")[0] in MODULES


def test_every_name_is_available_or_listed() -> None:
    assert set(monarchs_names()) == {*AVAILABLE, *filter(is_name, UNAVAILABLE)}


@pytest.mark.parametrize(("theirs", "ours"), AVAILABLE.items())
def test_every_member_is_available_or_listed(theirs: str, ours: str) -> None:
    missing = {f"{theirs}.{member}" for member in members(theirs) if not hasattr(resolve(ours), member)}
    assert missing <= UNAVAILABLE.keys()


def test_members_that_are_listed_are_monarchs_and_missing_or_refused_here() -> None:
    for name in UNAVAILABLE:
        owner, _, member = name.rpartition(".")
        if owner in MODULES or "(" in name:
            continue
        assert hasattr(resolve(owner), member), name
        if hasattr(resolve(AVAILABLE[owner]), member):
            with pytest.raises(JobUnsupported):
                getattr(FakeJob(1), member)(*(["a", "b"] if "mount" in member else []))


def test_the_documentation_lists_the_same_names() -> None:
    assert section(PAGE, "job names") == job_names_table()
