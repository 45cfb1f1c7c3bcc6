from __future__ import annotations

import inspect
import pickle
import sys
from typing import Any

import pytest

from meshgate import Actor, endpoint, suggestions
from meshgate.actors.actor_class import endpoints_of
from meshgate.actors.api import as_endpoint
from meshgate.errors import StaleCodeWarning
from meshgate.jobs.state import JobState
from meshgate.proxies import ActorMeshProxy, ProcMeshProxy, actor_mesh
from meshgate.proxies.actor_mesh import actor_class_from, actor_class_of, actor_class_to_spawn, signatures_of
from meshgate.shapes.shape import Shape
from meshgate.shapes.value_mesh import ValueMesh
from meshgate_wire.messages import MeshRef, SpawnActors
from tests.client.counting import Counter
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


def test_an_endpoint_that_was_added_to_the_class_itself_needs_a_new_mesh(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh._class, "newer", vars(mesh._class)["add"], raising=False)  # as %autoreload 2 does
    with pytest.raises(AttributeError, match=r"no endpoint 'newer'\. The class was defined again .*: spawn a mesh"):
        _ = mesh.newer


def test_a_wrong_endpoint_may_be_a_method_of_meshes(mesh: Any) -> None:
    with pytest.raises(AttributeError, match=r"'silce'\. Did you mean 'slice'\? Its endpoints: add, echo") as caught:
        mesh.silce(gpus=0)
    assert caught.value.obj is None  # Python would repeat the suggestion


class Stepper(Actor):
    @endpoint
    def step(self) -> None: ...


def test_an_endpoint_is_suggested_before_a_method_of_the_mesh(procs: ProcMeshProxy) -> None:
    mesh: Any = procs.spawn("steppers", Stepper)
    with pytest.raises(AttributeError, match=r"no endpoint 'stpe'\. Did you mean 'step'\? Its endpoints: step$"):
        _ = mesh.stpe  # as similar to "stop"


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
    result = ValueMesh(Shape.unity(), [1])
    for each in (mesh, mesh.add, mesh.plain, procs, future, result, JobState({})):
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


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


UNPRINTABLE = Unprintable()


class Trainer(Actor):
    @endpoint
    def step(self, batch: int, *rest: Any, rate: float = 0.5, how: Any = UNPRINTABLE, **more: Any) -> str:
        return ""

    @endpoint(explicit_response_port=True)
    def through_port(self, port: Any, value: int) -> None:
        pass


def spawned(class_name: str) -> SpawnActors:
    signatures = signatures_of(endpoints_of(Trainer))
    header = SpawnActors(
        object=3, procs=MeshRef(object=2), name="t", class_name=class_name, kind="sync", endpoints=signatures
    )
    return SpawnActors.model_validate_json(header.model_dump_json())


def test_endpoints_have_the_signatures_that_they_were_spawned_with() -> None:
    original = endpoints_of(Trainer)
    rebuilt = actor_class_from(spawned(original.name))
    assert rebuilt.Class is Trainer
    assert sorted(rebuilt.endpoints) == ["step", "through_port"]
    step = rebuilt.endpoints["step"]
    assert list(step.signature.parameters) == ["self", "batch", "rest", "rate", "how", "more"]
    assert str(step.signature).startswith("(self, batch: 'int', *rest: 'Any', rate: 'float' = 0.5, how: 'Any' = <")
    for name, spec in rebuilt.endpoints.items():
        before = original.endpoints[name]
        assert (spec.parameters, spec.placeholders) == (before.parameters, before.placeholders)
        assert spec.explicit_response_port == before.explicit_response_port
        assert spec.valid_counts == before.valid_counts
    step.check((1, 2, 3), {"rate": 1.0, "other": 2})
    with pytest.raises(TypeError, match="batch"):
        step.check((), {})


def test_a_class_that_is_not_imported_here_has_a_stand_in() -> None:
    rebuilt = actor_class_from(spawned("project.of.someone.Else"))
    assert rebuilt.Class.__name__ == "Else"
    assert rebuilt.Class.__module__ == "project.of.someone"
    assert inspect.isclass(rebuilt.Class)


class WithStop(Actor):
    @endpoint
    def stop(self) -> None: ...  # type: ignore[override]


class Mixed(Actor):
    @endpoint
    def one(self) -> None: ...

    @endpoint
    async def two(self) -> None: ...


def test_a_class_is_inspected_once() -> None:
    assert actor_class_of(Counter) is actor_class_of(Counter)


def test_a_class_of_a_changed_script_warns_that_it_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Actor):
        @endpoint
        def here(self) -> int: ...

    monkeypatch.setattr(actor_mesh, "changed_script", lambda Class: "train.py")
    warning = r"train\.py was saved since this program started, and \S+Local is spawned as it was then: .*Restart the"
    with pytest.warns(StaleCodeWarning, match=warning):
        assert actor_class_to_spawn(Local)[1] is True


@pytest.mark.parametrize(
    ("Class", "message"),
    [
        (int, "must subclass monarch.service.Actor to spawn it"),
        (WithStop, "collides with an endpoint name"),
        (Mixed, "mixes both async and sync endpoints"),
    ],
)
def test_a_class_that_cannot_be_spawned_raises_monarchs_error(procs: ProcMeshProxy, Class: type, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        procs.spawn("name", Class)


class WithoutInit(Actor):
    @endpoint
    def step(self) -> None: ...


@pytest.mark.parametrize(
    ("Class", "args", "kwargs", "text"),
    [
        (Counter, (1, 2), {}, "Counter(): too many positional arguments"),
        (Counter, (), {"strat": 1}, "Counter(): got an unexpected keyword argument 'strat'. Did you mean 'start'?"),
        (
            WithoutInit,
            (1,),
            {"rate": 2},
            "WithoutInit() takes no arguments, because the class has no __init__: define one that takes them, "
            "def __init__(self, ..., rate)",
        ),
    ],
)
def test_wrong_constructor_arguments_raise_before_anything_is_sent(
    gateway: ScriptedGateway, procs: ProcMeshProxy, Class: Any, args: Any, kwargs: Any, text: str
) -> None:
    with pytest.raises(TypeError) as caught:
        procs.spawn("counters", Class, *args, **kwargs)
    assert str(caught.value) == text
    procs.initialized.get(timeout=20)
    assert gateway.got(SpawnActors) == []


def test_a_modules_class_is_sent_by_name_and_a_local_one_as_code(
    gateway: ScriptedGateway, procs: ProcMeshProxy
) -> None:
    class Local(Actor):
        @endpoint
        def here(self) -> int: ...

    received: list[bytes] = []
    gateway.on[SpawnActors] = lambda session, header, buffers: received.append(buffers[0].join())
    procs.spawn("counters", Counter)
    procs.spawn("local", Local)
    procs.initialized.get(timeout=20)
    assert pickle.loads(received[0]) is Counter
    assert len(received[0]) < 100
    assert b"here" in received[1]
    header = gateway.got(SpawnActors)[0]
    assert header.class_name == f"{Counter.__module__}.Counter"
    assert header.kind == "sync"
