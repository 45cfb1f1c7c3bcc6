"""What actors are written with: Monarch's own where torchmonarch is installed, stand-ins where it is not.

This is the only module of the client that imports torchmonarch, and it does without. ``endpoints_of`` reads an
actor class of either kind and finds what is wrong with it before anything is sent, in Monarch's words.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from meshgate import standins

if TYPE_CHECKING:
    from meshgate.standins import (
        Actor,
        Context,
        Endpoint,
        EndpointProperty,
        concurrent_endpoint,
        context,
        current_actor_name,
        current_rank,
        current_size,
        endpoint,
        get_or_spawn_controller,
        this_host,
        this_proc,
    )

    HAS_MONARCH: bool

    class MonarchActorError(Exception): ...

    def _monarch_as_endpoint(*args: Any, **kwargs: Any) -> Any: ...

else:
    try:
        from monarch.actor import (
            Actor,
            Context,
            Endpoint,
            concurrent_endpoint,
            context,
            current_actor_name,
            current_rank,
            current_size,
            endpoint,
            get_or_spawn_controller,
            this_host,
            this_proc,
        )
        from monarch.actor import ActorError as MonarchActorError
        from monarch.actor import as_endpoint as _monarch_as_endpoint

        EndpointProperty = type(endpoint(lambda self: None))
        HAS_MONARCH = True
    except ImportError:
        from meshgate.standins import (
            Actor,
            Context,
            Endpoint,
            EndpointProperty,
            concurrent_endpoint,
            context,
            current_actor_name,
            current_rank,
            current_size,
            endpoint,
            get_or_spawn_controller,
            this_host,
            this_proc,
        )

        HAS_MONARCH = False

        class MonarchActorError(Exception):
            """Stands where Monarch's ``ActorError`` would."""

        def _monarch_as_endpoint(not_an_endpoint, **_):
            raise ValueError("expected an method of a spawned actor")


__all__ = [
    "Actor",
    "ActorClass",
    "Context",
    "Endpoint",
    "EndpointProperty",
    "EndpointSpec",
    "HAS_MONARCH",
    "MESH_ATTRIBUTES",
    "MonarchActorError",
    "as_endpoint",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "endpoint",
    "endpoints_of",
    "get_or_spawn_controller",
    "this_host",
    "this_proc",
]

# What an actor mesh of Monarch has itself; an endpoint of such a name could not be reached.
MESH_ATTRIBUTES = frozenset(
    {
        *("_class", "_endpoint", "_inner", "_labels", "_mesh_name", "_name", "_ndslice", "_new_with_shape"),
        *("_proc_mesh", "_shape", "extent", "flatten", "initialized", "rename", "size", "sizes", "slice"),
        *("split", "stop"),
    }
)

_MANY = 1 << 30  # more arguments than anyone passes

_DEADLOCK = (
    "Synchronous endpoints cannot be mixed with async endpoints because they can cause the asyncio loop to "
    "deadlock if they wait."
)


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """An endpoint as callers see it. ``placeholders``: how many leading parameters the call fills in (self, port)."""

    name: str
    signature: inspect.Signature
    explicit_response_port: bool = False
    is_async: bool = False
    placeholders: int = 1
    parameters: tuple[str, ...] = field(init=False)  # without the placeholders
    _counts: range = field(init=False, repr=False)  # of arguments by position that fit, where none go by name

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", tuple(self.signature.parameters)[self.placeholders :])
        object.__setattr__(self, "_counts", _fitting_counts(self.signature, self.placeholders))

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises ``TypeError`` where a call with these arguments does not fit the signature."""
        if kwargs or len(args) not in self._counts:  # bind() is slow, and words the error
            self.signature.bind(*(None,) * self.placeholders, *args, **kwargs)


def _fitting_counts(signature: inspect.Signature, placeholders: int) -> range:
    """Empty where some parameter must be named."""
    parameters = signature.parameters.values()
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return range(0)
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least = sum(p.default is p.empty for p in by_position) - placeholders
    unlimited = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    most = _MANY if unlimited else len(by_position) - placeholders
    return range(max(0, least), most + 1)


@dataclass(frozen=True, slots=True)
class ActorClass:
    """What the client must know of an actor class."""

    Class: type
    name: str
    kind: Literal["sync", "async"]
    endpoints: Mapping[str, EndpointSpec]

    def check_init(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises ``TypeError`` where the class cannot be made with these arguments."""
        inspect.signature(getattr(self.Class, "__init__")).bind(None, *args, **kwargs)  # noqa: B009


def endpoints_of(Class: type) -> ActorClass:
    """Reads an actor class. Raises ``ValueError``, as Monarch's ``spawn``, for one that cannot be spawned."""
    if not isinstance(Class, type) or not issubclass(Class, (Actor, standins.Actor)):
        raise ValueError(  # noqa: TRY004 (Monarch's type)
            f"{Class} must subclass monarch.service.Actor to spawn it."
        )
    endpoints = {}
    for name in dir(Class):
        found = inspect.getattr_static(Class, name)
        if isinstance(found, (EndpointProperty, standins.EndpointProperty)):
            if name in MESH_ATTRIBUTES:
                raise ValueError(
                    "ActorMesh has an attribute that collides with an endpoint name: "
                    f"attribute={name}, endpoint={found}. Rename the endpoint."
                )
            endpoints[name] = endpoint_spec(name, found)
    kind = _kind(Class, endpoints)
    return ActorClass(Class, f"{Class.__module__}.{Class.__qualname__}", kind, endpoints)


def endpoint_spec(name: str, found: Any) -> EndpointSpec:
    method = found._method
    concurrent = getattr(found, "_concurrent", False)
    explicit = bool(found._explicit_response_port)
    return EndpointSpec(
        name=name,
        signature=inspect.signature(method),
        # Monarch runs a concurrent endpoint as one that answers through a port of its own.
        explicit_response_port=explicit or concurrent,
        is_async=inspect.iscoroutinefunction(method),
        placeholders=2 if explicit else 1,
    )


def _kind(Class: type, endpoints: Mapping[str, EndpointSpec]) -> Literal["sync", "async"]:
    sync = sorted(name for name, spec in endpoints.items() if not spec.is_async)
    asynchronous = sorted(name for name, spec in endpoints.items() if spec.is_async)
    if sync and asynchronous:
        raise ValueError(f"{Class} mixes both async and sync endpoints.{_DEADLOCK}sync: {sync} async: {asynchronous}")
    cleanup = _hook_is_async(Class, "__cleanup__")
    if sync and cleanup:
        raise ValueError(
            f"{Class} has sync endpoints, but an async __cleanup__. Make sure __cleanup__ is also synchronous."
            f"{_DEADLOCK}sync: {sync}"
        )
    if asynchronous and cleanup is False:
        raise ValueError(
            f"{Class} has async endpoints, but a synchronous __cleanup__. Make sure __cleanup__ is also async."
            f"{_DEADLOCK}async: {asynchronous}"
        )
    for hook in ("__supervise__", "_handle_undeliverable_message"):
        if sync and _hook_is_async(Class, hook):
            raise ValueError(
                f"{Class} has sync endpoints, but an async {hook}. Make sure {hook} is also synchronous. sync: {sync}"
            )
    return "sync" if sync else "async"


def _hook_is_async(Class: type, name: str) -> bool | None:
    """None where the class does not define the hook itself."""
    hook = getattr(Class, name, None)
    if hook is None or getattr(hook, "_monarch_doc_stub", False):
        return None
    return inspect.iscoroutinefunction(hook)


def as_endpoint(not_an_endpoint: Any, *, propagate: Any = None, explicit_response_port: bool = False) -> Any:
    """Calls a method that is not marked as an endpoint as if it were: ``as_endpoint(actors.method).call(...)``.

    Raises ``ValueError`` for anything but a method of a spawned actor.
    """
    treat = getattr(type(not_an_endpoint), "__as_endpoint__", None)
    if treat is not None:
        return treat(not_an_endpoint, explicit_response_port=explicit_response_port)
    return _monarch_as_endpoint(not_an_endpoint, propagate=propagate, explicit_response_port=explicit_response_port)
