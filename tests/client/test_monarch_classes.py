"""Objects of meshgate beside Monarch's classes; the tests run where torchmonarch is installed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import cloudpickle
import monarch.actor
import pydantic
import pytest

import meshgate
from meshgate.proxies.client import Client
from tests.client.laptop import run_without

EXTENT = meshgate.Extent(["hosts", "gpus"], [2, 2])
FAILURE = meshgate.MeshFailure("trainers", "killed", (1,), {1: "workers-0"})
VALUES = meshgate.ValueMesh(EXTENT.region.as_shape(), [0, 1, 2, 3])


def test_objects_of_the_program_are_monarchs_and_meshgates(client: Client) -> None:
    hosts = client.attach_hosts("workers", 2)
    procs = hosts.spawn_procs(per_host={"gpus": 2})
    for value, name in (
        (hosts, "HostMesh"),
        (hosts.slice(hosts=0), "HostMesh"),
        (procs, "ProcMesh"),
        (VALUES, "ValueMesh"),
        (FAILURE, "MeshFailure"),
        (hosts.initialized, "Future"),
    ):
        assert isinstance(value, getattr(monarch.actor, name)), name
        assert isinstance(value, getattr(meshgate, name)), name
        assert type(value).__module__.startswith("meshgate."), name


def test_one_class_is_not_another_of_monarchs(client: Client) -> None:
    hosts = client.attach_hosts("workers", 2)
    assert not isinstance(hosts, monarch.actor.ProcMesh)
    assert not isinstance(hosts, meshgate.ProcMesh)
    assert not isinstance(VALUES, monarch.actor.Future)


def test_without_monarch_the_class_is_meshgates_and_monarch_is_not_imported() -> None:
    code = """
        import sys, meshgate
        values = meshgate.ValueMesh(meshgate.Shape.unity(), [1])
        assert values.__class__ is type(values) is meshgate.ValueMesh
        assert isinstance(values, meshgate.ValueMesh) and not isinstance(values, meshgate.MeshFailure)
        assert meshgate.Extent(["a"], [1]) != 5
        print([name for name in sys.modules if name.startswith("monarch")])
    """
    assert run_without(code=code).decode().strip() == "[]"


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_objects_are_pickled_as_meshgates(dumps: Any) -> None:
    failure, values = pickle.loads(dumps(FAILURE)), pickle.loads(dumps(VALUES))
    assert (type(failure), failure) == (meshgate.MeshFailure, FAILURE)
    assert (type(values), list(values.values())) == (meshgate.ValueMesh, [0, 1, 2, 3])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_are_meshgates(copied: Any) -> None:
    assert type(copied(VALUES)) is meshgate.ValueMesh
    assert copied(FAILURE) == FAILURE
    assert repr(copied(FAILURE)) == repr(FAILURE)
    assert repr(FAILURE).startswith("MeshFailure(mesh_name='trainers', reason='killed', ranks=(1,)")


def test_failures_are_equal_by_their_fields() -> None:
    assert meshgate.MeshFailure("trainers", "killed", (1,), {1: "workers-0"}) == FAILURE
    assert meshgate.MeshFailure("trainers", "killed", (2,), {1: "workers-0"}) != FAILURE
    assert FAILURE != ("trainers", "killed", (1,), {1: "workers-0"})
    assert len({FAILURE, copy.copy(FAILURE)}) == 1


def test_pydantic_accepts_them_as_either_class() -> None:
    class Settings(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)

        ours: meshgate.ValueMesh[int]
        theirs: monarch.actor.ValueMesh[Any]

    settings = Settings(ours=VALUES, theirs=VALUES)  # type: ignore[arg-type]
    assert settings.ours is settings.theirs is VALUES


def test_points_and_extents_equal_monarchs() -> None:
    theirs = monarch.actor.Extent(["hosts", "gpus"], [2, 2])
    assert EXTENT.__eq__(theirs)
    point = meshgate.Point(3, EXTENT)
    assert point == monarch.actor.Point(3, theirs)
    assert point != monarch.actor.Point(2, theirs)
    assert point != monarch.actor.Point(3, monarch.actor.Extent(["hosts", "gpus"], [4, 2]))
