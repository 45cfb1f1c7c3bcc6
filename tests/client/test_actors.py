"""Actor classes are read and checked as Monarch does it, whether they are written with Monarch or the stand-ins."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import monarch.actor
import pytest
from monarch._src.actor import actor_mesh
from monarch._src.actor.actor_mesh import ActorMesh, _actor_kind

from meshgate import actors, standins
from meshgate.actors import MESH_ATTRIBUTES, ActorClass, endpoints_of
from tests.client.laptop import run_without

WRITTEN_WITH = [pytest.param(monarch.actor, id="monarch"), pytest.param(standins, id="stand-ins")]


def trainer(kit: Any) -> type:
    class Trainer(kit.Actor):
        def __init__(self, rate: float, *, name: str = "x") -> None: ...

        @kit.endpoint
        def step(self, batch: int, *, scale: float = 1.0) -> int:
            return batch

        @kit.endpoint(explicit_response_port=True)
        def answer_later(self, port: Any, what: str) -> None: ...

        def plain(self) -> None: ...

    return Trainer


def asynchronous(kit: Any) -> type:
    class Asynchronous(kit.Actor):
        @kit.endpoint
        async def step(self, batch: int) -> int:
            return batch

        @kit.concurrent_endpoint
        async def side_by_side(self, batch: int) -> int:
            return batch

        @kit.concurrent_endpoint(explicit_response_port=True)
        async def through_port(self, port: Any, batch: int) -> None: ...

    return Asynchronous


@pytest.mark.parametrize("kit", WRITTEN_WITH)
def test_an_actor_class_is_read(kit: Any) -> None:
    read = endpoints_of(trainer(kit))
    assert (read.kind, sorted(read.endpoints)) == ("sync", ["answer_later", "step"])
    assert read.name == f"{__name__}.trainer.<locals>.Trainer"
    assert not read.endpoints["step"].explicit_response_port
    assert read.endpoints["answer_later"].explicit_response_port
    read = endpoints_of(asynchronous(kit))
    assert read.kind == "async"
    assert {name: spec.explicit_response_port for name, spec in read.endpoints.items()} == {
        "side_by_side": True,
        "step": False,
        "through_port": True,
    }
    assert all(spec.is_async for spec in read.endpoints.values())


@pytest.mark.parametrize("kit", WRITTEN_WITH)
def test_an_endpoint_of_a_base_class_counts(kit: Any) -> None:
    class Special(trainer(kit)):  # type: ignore[misc]
        @kit.endpoint
        def more(self) -> None: ...

    assert sorted(endpoints_of(Special).endpoints) == ["answer_later", "more", "step"]


@pytest.mark.parametrize("kit", WRITTEN_WITH)
def test_an_actor_without_endpoints_is_async_as_monarchs(kit: Any) -> None:
    assert endpoints_of(type("Idle", (kit.Actor,), {})).kind == "async"


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("step", (1,), {}),
    ("step", (), {"batch": 1}),
    ("step", (1,), {"scale": 2.0}),
    ("step", (), {}),
    ("step", (1, 2), {}),
    ("step", (1,), {"batch": 1}),
    ("step", (1,), {"nonsense": 1}),
    ("answer_later", ("x",), {}),
    ("answer_later", (), {}),
    ("answer_later", ("x", "y"), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS)
@pytest.mark.parametrize("kit", WRITTEN_WITH)
def test_wrong_arguments_raise_what_monarch_raises(
    kit: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    _same_check(kit, trainer, name, args, kwargs)


@pytest.mark.parametrize("name", ["step", "side_by_side", "through_port"])
@pytest.mark.parametrize(("args", "kwargs"), [((1,), {}), ((), {}), ((1, 2), {}), ((), {"batch": 1}), ((), {"x": 1})])
@pytest.mark.parametrize("kit", WRITTEN_WITH)
def test_wrong_arguments_of_concurrent_endpoints_raise_what_monarch_raises(
    kit: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    _same_check(kit, asynchronous, name, args, kwargs)


def _same_check(
    kit: Any, make: Callable[[Any], type], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    found = inspect.getattr_static(make(monarch.actor), name)
    specifier = actor_mesh.MethodSpecifier
    how = specifier.ExplicitPort if found._explicit_response_port else specifier.ReturnsResponse
    expected = _text_of_type_error(
        lambda: actor_mesh._check_endpoint_arguments(how(name), inspect.signature(found._method), args, kwargs)
    )
    spec = endpoints_of(make(kit)).endpoints[name]
    assert _text_of_type_error(lambda: spec.check(args, kwargs)) == expected


def _text_of_type_error(operation: Callable[[], None]) -> str | None:
    try:
        operation()
    except TypeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kit", WRITTEN_WITH)
def test_wrong_constructor_arguments_raise_at_once(kit: Any) -> None:
    read = endpoints_of(trainer(kit))
    read.check_init((0.1,), {"name": "y"})
    with pytest.raises(TypeError, match="missing a required argument: 'rate'"):
        read.check_init((), {})
    with pytest.raises(TypeError, match="too many positional arguments"):
        read.check_init((0.1, 2), {})


def mixed(kit: Any) -> type:
    class Mixed(kit.Actor):
        @kit.endpoint
        def one(self) -> None: ...

        @kit.endpoint
        async def two(self) -> None: ...

    return Mixed


def async_cleanup(kit: Any) -> type:
    class AsyncCleanup(kit.Actor):
        @kit.endpoint
        def one(self) -> None: ...

        async def __cleanup__(self, exc: Exception | None) -> None: ...

    return AsyncCleanup


def sync_cleanup(kit: Any) -> type:
    class SyncCleanup(kit.Actor):
        @kit.endpoint
        async def one(self) -> None: ...

        def __cleanup__(self, exc: Exception | None) -> None: ...

    return SyncCleanup


def async_supervise(kit: Any) -> type:
    class AsyncSupervise(kit.Actor):
        @kit.endpoint
        def one(self) -> None: ...

        async def __supervise__(self, failure: Any) -> bool:
            return True

    return AsyncSupervise


def async_undeliverable(kit: Any) -> type:
    class AsyncUndeliverable(kit.Actor):
        @kit.endpoint
        def one(self) -> None: ...

        async def _handle_undeliverable_message(self, message: Any) -> bool:
            return True

    return AsyncUndeliverable


@pytest.mark.parametrize("make", [mixed, async_cleanup, sync_cleanup, async_supervise, async_undeliverable])
@pytest.mark.parametrize("kit", WRITTEN_WITH)
def test_an_inconsistent_class_raises_what_monarch_raises(kit: Any, make: Callable[[Any], type]) -> None:
    theirs = make(monarch.actor)
    with pytest.raises(ValueError, match="sync") as expected:
        _actor_kind(theirs)
    mine = make(kit)
    with pytest.raises(ValueError, match="sync") as got:
        endpoints_of(mine)
    assert str(got.value) == str(expected.value).replace(str(theirs), str(mine))


@pytest.mark.parametrize("name", sorted(MESH_ATTRIBUTES))
@pytest.mark.parametrize("kit", WRITTEN_WITH)
def test_an_endpoint_may_not_hide_what_a_mesh_has(kit: Any, name: str) -> None:
    clash = type("Clash", (kit.Actor,), {name: kit.endpoint(lambda self: None)})
    with pytest.raises(ValueError, match=f"collides with an endpoint name: attribute={name}"):
        endpoints_of(clash)


def test_the_attributes_of_a_mesh_are_those_of_monarchs() -> None:
    class Nothing(monarch.actor.Actor): ...

    mesh = ActorMesh(Nothing, "nothing", None, None, None)  # type: ignore[arg-type]
    found = {*dir(ActorMesh), *vars(mesh)} - {name for name in dir(ActorMesh) if name.startswith("__")}
    assert {name for name in found if not name.startswith("_abc") and name != "__name__"} - {
        "_is_protocol"
    } == MESH_ATTRIBUTES


@pytest.mark.parametrize("wrong", [object, int, 5, "Trainer", lambda: None])
def test_what_is_no_actor_class_cannot_be_spawned(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"must subclass monarch\.service\.Actor to spawn it"):
        endpoints_of(wrong)


def test_where_monarch_is_installed_its_own_objects_are_used() -> None:
    assert actors.HAS_MONARCH
    for name in ("Actor", "endpoint", "concurrent_endpoint", "current_rank", "current_size", "context", "this_host"):
        assert getattr(actors, name) is getattr(monarch.actor, name)
    assert isinstance(endpoints_of(trainer(actors)), ActorClass)


def test_options_of_endpoints_are_refused_as_monarch_refuses_them() -> None:
    for kit in (monarch.actor, standins):
        with pytest.raises(ValueError, match="concurrent_endpoint does not wrap @endpoint"):
            kit.concurrent_endpoint(kit.endpoint(lambda self: None))
        with pytest.raises(ValueError, match="concurrent_endpoint can only wrap async endpoints"):
            kit.concurrent_endpoint(lambda self: None)


def test_a_method_that_is_no_endpoint_can_be_treated_as_one() -> None:
    class NotAnEndpoint:
        def __as_endpoint__(self, explicit_response_port: bool) -> str:
            return f"treated, port: {explicit_response_port}"

    assert actors.as_endpoint(NotAnEndpoint(), explicit_response_port=True) == "treated, port: True"
    with pytest.raises(ValueError, match="expected an method of a spawned actor"):
        actors.as_endpoint(print)


def test_a_stand_in_actor_is_no_mesh() -> None:
    actor = trainer(standins)(0.1)
    for what in (lambda: actor.slice(gpus=0), actor.stop, lambda: actor.initialized, lambda: len(actor)):
        with pytest.raises(NotImplementedError, match="an actor is not a mesh"):
            what()
    assert actor.logger.name == "Trainer"


def test_a_laptop_without_monarch_has_stand_ins() -> None:
    told = run_without(
        "monarch",
        code="""
        import json
        from meshgate import actors

        class T(actors.Actor):
            @actors.endpoint
            def f(self, x: int) -> int: return x

        def text(call):
            try: call()
            except Exception as error: return type(error).__name__ + ": " + str(error)

        read = actors.endpoints_of(T)
        print(json.dumps({
            "monarch": actors.HAS_MONARCH,
            "endpoints": list(read.endpoints),
            "check": text(lambda: read.endpoints["f"].check((), {})),
            "as_endpoint": text(lambda: actors.as_endpoint(print)),
            "outside": {name: text(getattr(actors, name)) for name in (
                "context", "current_rank", "current_size", "current_actor_name", "this_host", "this_proc")},
        }))
        """,
    )
    facts = json.loads(told)
    assert (facts["monarch"], facts["endpoints"]) == (False, ["f"])
    assert facts["check"] == "TypeError: missing a required argument: 'x'"
    assert facts["as_endpoint"] == "ValueError: expected an method of a spawned actor"
    for name, text in facts["outside"].items():
        assert text.startswith(f"RuntimeError: {name}() works inside an actor, on a worker.")
