"""Actor classes are inspected and checked as by Monarch, whether written with Monarch or with the stand-ins."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import monarch.actor
import pytest
from monarch._src.actor import actor_mesh
from monarch._src.actor.actor_mesh import ActorMesh, _actor_kind

from meshgate.actors import standins
from meshgate.actors.actor_class import MESH_ATTRIBUTES, endpoints_of

NAMESPACES = [pytest.param(monarch.actor, id="monarch"), pytest.param(standins, id="stand-ins")]


def trainer(api: Any) -> type:
    class Trainer(api.Actor):
        def __init__(self, rate: float, *, name: str = "x") -> None: ...

        @api.endpoint
        def step(self, batch: int, *, scale: float = 1.0) -> int:
            return batch

        @api.endpoint(explicit_response_port=True)
        def with_port(self, port: Any, text: str) -> None: ...

        def plain(self) -> None: ...

    return Trainer


def asynchronous(api: Any) -> type:
    class Asynchronous(api.Actor):
        @api.endpoint
        async def step(self, batch: int) -> int:
            return batch

        @api.concurrent_endpoint
        async def concurrent(self, batch: int) -> int:
            return batch

        @api.concurrent_endpoint(explicit_response_port=True)
        async def concurrent_with_port(self, port: Any, batch: int) -> None: ...

    return Asynchronous


@pytest.mark.parametrize("api", NAMESPACES)
def test_endpoints_are_found(api: Any) -> None:
    actor = endpoints_of(trainer(api))
    assert (actor.kind, sorted(actor.endpoints)) == ("sync", ["step", "with_port"])
    assert actor.name == f"{__name__}.trainer.<locals>.Trainer"
    assert not actor.endpoints["step"].explicit_response_port
    assert actor.endpoints["with_port"].explicit_response_port
    actor = endpoints_of(asynchronous(api))
    assert actor.kind == "async"
    assert {name: spec.explicit_response_port for name, spec in actor.endpoints.items()} == {
        "concurrent": True,
        "step": False,
        "concurrent_with_port": True,
    }
    assert all(spec.is_async for spec in actor.endpoints.values())


@pytest.mark.parametrize("api", NAMESPACES)
def test_endpoints_of_base_classes_are_found(api: Any) -> None:
    class Special(trainer(api)):  # type: ignore[misc]
        @api.endpoint
        def more(self) -> None: ...

    assert sorted(endpoints_of(Special).endpoints) == ["more", "step", "with_port"]


@pytest.mark.parametrize("api", NAMESPACES)
def test_an_actor_without_endpoints_is_async_as_in_monarch(api: Any) -> None:
    assert endpoints_of(type("Idle", (api.Actor,), {})).kind == "async"


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("step", (1,), {}),
    ("step", (), {"batch": 1}),
    ("step", (1,), {"scale": 2.0}),
    ("step", (), {}),
    ("step", (1, 2), {}),
    ("step", (1,), {"batch": 1}),
    ("step", (1,), {"unknown": 1}),
    ("with_port", ("x",), {}),
    ("with_port", (), {}),
    ("with_port", ("x", "y"), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS)
@pytest.mark.parametrize("api", NAMESPACES)
def test_wrong_arguments_raise_what_monarch_raises(
    api: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    _assert_same_error(api, trainer, name, args, kwargs)


@pytest.mark.parametrize("name", ["step", "concurrent", "concurrent_with_port"])
@pytest.mark.parametrize(("args", "kwargs"), [((1,), {}), ((), {}), ((1, 2), {}), ((), {"batch": 1}), ((), {"x": 1})])
@pytest.mark.parametrize("api", NAMESPACES)
def test_wrong_arguments_of_concurrent_endpoints_raise_what_monarch_raises(
    api: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    _assert_same_error(api, asynchronous, name, args, kwargs)


def _assert_same_error(
    api: Any, make: Callable[[Any], type], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    found = inspect.getattr_static(make(monarch.actor), name)
    specifier = actor_mesh.MethodSpecifier
    method = specifier.ExplicitPort if found._explicit_response_port else specifier.ReturnsResponse
    expected = _text_of_type_error(
        lambda: actor_mesh._check_endpoint_arguments(method(name), inspect.signature(found._method), args, kwargs)
    )
    spec = endpoints_of(make(api)).endpoints[name]
    assert _text_of_type_error(lambda: spec.check(args, kwargs)) == expected


def _text_of_type_error(operation: Callable[[], None]) -> str | None:
    try:
        operation()
    except TypeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("api", NAMESPACES)
def test_wrong_constructor_arguments_raise_type_error(api: Any) -> None:
    actor = endpoints_of(trainer(api))
    actor.check_init((0.1,), {"name": "y"})
    with pytest.raises(TypeError, match="missing a required argument: 'rate'"):
        actor.check_init((), {})
    with pytest.raises(TypeError, match="too many positional arguments"):
        actor.check_init((0.1, 2), {})


def mixed(api: Any) -> type:
    class Mixed(api.Actor):
        @api.endpoint
        def one(self) -> None: ...

        @api.endpoint
        async def two(self) -> None: ...

    return Mixed


def async_cleanup(api: Any) -> type:
    class AsyncCleanup(api.Actor):
        @api.endpoint
        def one(self) -> None: ...

        async def __cleanup__(self, exc: Exception | None) -> None: ...

    return AsyncCleanup


def sync_cleanup(api: Any) -> type:
    class SyncCleanup(api.Actor):
        @api.endpoint
        async def one(self) -> None: ...

        def __cleanup__(self, exc: Exception | None) -> None: ...

    return SyncCleanup


def async_supervise(api: Any) -> type:
    class AsyncSupervise(api.Actor):
        @api.endpoint
        def one(self) -> None: ...

        async def __supervise__(self, failure: Any) -> bool:
            return True

    return AsyncSupervise


def async_undeliverable(api: Any) -> type:
    class AsyncUndeliverable(api.Actor):
        @api.endpoint
        def one(self) -> None: ...

        async def _handle_undeliverable_message(self, message: Any) -> bool:
            return True

    return AsyncUndeliverable


@pytest.mark.parametrize("make", [mixed, async_cleanup, sync_cleanup, async_supervise, async_undeliverable])
@pytest.mark.parametrize("api", NAMESPACES)
def test_an_inconsistent_class_raises_what_monarch_raises(api: Any, make: Callable[[Any], type]) -> None:
    theirs = make(monarch.actor)
    with pytest.raises(ValueError, match="sync") as expected:
        _actor_kind(theirs)
    ours = make(api)
    with pytest.raises(ValueError, match="sync") as got:
        endpoints_of(ours)
    assert str(got.value) == str(expected.value).replace(str(theirs), str(ours))


@pytest.mark.parametrize("name", sorted(MESH_ATTRIBUTES))
@pytest.mark.parametrize("api", NAMESPACES)
def test_an_endpoint_may_not_have_the_name_of_a_mesh_attribute(api: Any, name: str) -> None:
    clash = type("Clash", (api.Actor,), {name: api.endpoint(lambda self: None)})
    with pytest.raises(ValueError, match=f"collides with an endpoint name: attribute={name}"):
        endpoints_of(clash)


def test_the_mesh_attributes_are_monarchs() -> None:
    class Empty(monarch.actor.Actor): ...

    mesh = ActorMesh(Empty, "empty", None, None, None)  # type: ignore[arg-type]
    found = {*dir(ActorMesh), *vars(mesh)} - {name for name in dir(ActorMesh) if name.startswith("__")}
    assert {name for name in found if not name.startswith("_abc") and name != "__name__"} - {
        "_is_protocol"
    } == MESH_ATTRIBUTES


@pytest.mark.parametrize("wrong", [object, int, 5, "Trainer", lambda: None])
def test_only_actor_classes_are_accepted(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"must subclass monarch\.service\.Actor to spawn it"):
        endpoints_of(wrong)
