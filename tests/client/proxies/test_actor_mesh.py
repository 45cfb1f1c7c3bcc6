from __future__ import annotations

import sys
from typing import Any

import pytest

from meshgate.actors.api import as_endpoint
from meshgate.proxies import ActorMeshProxy
from tests.client.scripted_gateway import ScriptedGateway


def test_only_endpoints_are_attributes(mesh: Any) -> None:
    assert mesh.add is mesh.add
    assert {"add", "echo", "ported"} <= set(dir(mesh))
    with pytest.raises(AttributeError, match="nope"):
        _ = mesh.nope
    assert isinstance(mesh, ActorMeshProxy)
    assert mesh.__name__ == "Counter"


def test_an_endpoint_of_a_class_that_was_defined_again_needs_a_new_mesh(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = mesh._class
    new = type(old.__name__, (old,), {**vars(old), "newer": vars(old)["add"]})
    monkeypatch.setattr(sys.modules[old.__module__], old.__name__, new)
    with pytest.raises(
        AttributeError, match=r"no endpoint 'newer'\. The class was defined again .*: spawn a mesh of the"
    ):
        _ = mesh.newer
    with pytest.raises(AttributeError, match=r"no endpoint 'newest'$"):
        _ = mesh.newest


def test_calling_a_plain_method_explains_as_endpoint(mesh: Any) -> None:
    with pytest.raises(
        RuntimeError, match=r"plain is not annotated as an endpoint. To call it as one, add a @endpoint"
    ):
        mesh.plain(1)


def test_as_endpoint_calls_a_plain_method(gateway: ScriptedGateway, mesh: Any) -> None:
    gateway.functions["plain"] = lambda rank, value: value + rank
    assert as_endpoint(mesh.plain).call(10).get(timeout=20).values() == [10, 11, 12, 13]
    with pytest.raises(TypeError, match="missing a required argument: 'value'"):
        as_endpoint(mesh.plain).call()
    with pytest.raises(ValueError, match="expected an method of a spawned actor"):
        as_endpoint(5)


def test_actor_meshes_can_be_annotated_with_their_class() -> None:
    assert ActorMeshProxy[Any].__origin__ is ActorMeshProxy
