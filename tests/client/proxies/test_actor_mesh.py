from __future__ import annotations

import sys
from typing import Any

import pytest

from meshgate import suggestions
from meshgate.actors.api import Actor, as_endpoint
from meshgate.jobs.state import JobState
from meshgate.proxies import ActorMeshProxy, ProcMeshProxy
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
    with pytest.raises(AttributeError, match=r"no endpoint 'newest'\. Its endpoints: add, echo, ported\. "):
        _ = mesh.newest


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ad", r"Counter has no endpoint 'ad'. Did you mean 'add'? Its endpoints: add, echo, ported"),
        ("silce", r"Counter has no endpoint 'silce'. Did you mean 'slice'? Its endpoints: add, echo, ported"),
        (
            "losses",
            "Counter has no endpoint 'losses'. Its endpoints: add, echo, ported. What else an actor has stays in its "
            "process: let an endpoint return it",
        ),
    ],
)
def test_a_wrong_endpoint_is_answered_with_those_that_exist(mesh: Any, name: str, text: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(mesh, name)
    assert str(caught.value) == f"tests.client.counting.{text}"
    assert caught.value.obj is None  # Python would repeat the suggestion


class Undecorated(Actor):
    rate = 3

    def step(self) -> None: ...


def test_a_class_without_endpoints_is_answered_with_the_decorator(procs: ProcMeshProxy) -> None:
    mesh: Any = procs.spawn("undecorated", Undecorated)
    with pytest.raises(AttributeError, match=r"has no endpoint 'losses', because no method .* decorator @endpoint$"):
        _ = mesh.losses
    with pytest.raises(AttributeError) as caught:
        mesh.step.call()
    assert str(caught.value) == (
        "step is a method of the class Undecorated, not an endpoint: add the decorator @endpoint to it, or call it "
        "with as_endpoint(actors.step).call(...)"
    )
    with pytest.raises(AttributeError) as caught:
        mesh.rate.call()
    assert str(caught.value) == (
        "rate is an attribute of the class Undecorated, not an endpoint: read it as Undecorated.rate. To get that of "
        "an actor, let an endpoint return it"
    )
    assert repr(mesh.step) == "<step is a method of the class Undecorated, not an endpoint>"


@pytest.mark.parametrize("name", ["__len_hint__", "_repr_svg_", "_ipython_canary_method_should_not_exist_"])
def test_names_that_libraries_ask_for_are_answered_without_suggestions(
    mesh: Any, procs: ProcMeshProxy, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(suggestions, "closest", None)  # which would be called
    future = mesh.initialized
    for each in (mesh, mesh.add, mesh.plain, procs, future, JobState({})):
        assert not hasattr(each, name)


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
