"""What a driver must know of an actor class: its endpoints, their signatures, and whether it can be spawned.

``endpoints_of`` reads classes that are written with Monarch and classes that are written with the stand-ins. It raises
Monarch's errors, in Monarch's words, before anything is sent.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meshgate.actors import api, standins
from meshgate.suggestions import wrong_arguments

# Attributes of Monarch's ActorMesh. An endpoint with one of these names would be unreachable.
MESH_ATTRIBUTES = frozenset(
    {
        *("_class", "_endpoint", "_inner", "_labels", "_mesh_name", "_name", "_ndslice", "_new_with_shape"),
        *("_proc_mesh", "_shape", "extent", "flatten", "initialized", "rename", "size", "sizes", "slice"),
        *("split", "stop"),
    }
)

_UNLIMITED = 1 << 30  # more arguments than anyone passes

_DEADLOCK = (
    "Synchronous endpoints cannot be mixed with async endpoints because they can cause the asyncio loop to "
    "deadlock if they wait."
)


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """An endpoint as its callers see it.

    ``placeholders``: the number of leading parameters that callers do not pass (``self``, the response port).
    """

    name: str
    signature: inspect.Signature
    explicit_response_port: bool = False
    is_async: bool = False
    placeholders: int = 1
    parameters: tuple[str, ...] = field(init=False)  # without the placeholders
    valid_counts: range = field(init=False, repr=False)  # of positional arguments, if there are no keyword arguments

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", tuple(self.signature.parameters)[self.placeholders :])
        object.__setattr__(self, "valid_counts", _positional_counts(self.signature, self.placeholders))

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises ``TypeError`` if the arguments do not match the signature."""
        if kwargs or len(args) not in self.valid_counts:  # bind() is slow, but its errors are Monarch's
            self.signature.bind(*(None,) * self.placeholders, *args, **kwargs)


def _positional_counts(signature: inspect.Signature, placeholders: int) -> range:
    """How many positional arguments are valid without keyword arguments; empty if a keyword is required."""
    parameters = signature.parameters.values()
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return range(0)
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least = sum(p.default is p.empty for p in by_position) - placeholders
    unlimited = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    most = _UNLIMITED if unlimited else len(by_position) - placeholders
    return range(max(0, least), most + 1)


@dataclass(frozen=True, slots=True)
class ActorClass:
    """An actor class, its endpoints, and the kind of all its methods."""

    Class: type
    name: str
    kind: Literal["sync", "async"]
    endpoints: Mapping[str, EndpointSpec]

    def check_init(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises ``TypeError`` if the arguments do not match the constructor's signature."""
        Class: Any = self.Class
        if Class.__init__ is object.__init__ and Class.__new__ is object.__new__:
            # Their signatures take anything, and the workers would fail.
            if args or kwargs:
                wanted = ", ".join(("self", *(["..."] if args else []), *kwargs))
                raise TypeError(
                    f"{Class.__name__}() takes no arguments, because the class has no __init__: define one that takes "
                    f"them, def __init__({wanted})"
                )
            return
        signature = inspect.signature(Class.__init__)
        try:
            signature.bind(None, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{Class.__name__}(): {wrong_arguments(error, signature, kwargs)}") from None


def is_endpoint(found: object) -> bool:
    """Whether ``found``, in an actor class, has the decorator ``@endpoint``."""
    return isinstance(found, (api.EndpointProperty, standins.EndpointProperty))


def endpoints_of(Class: type) -> ActorClass:
    """Reads an actor class. Raises the ``ValueError`` of Monarch's ``spawn`` if it cannot be spawned."""
    if not isinstance(Class, type) or not issubclass(Class, (api.Actor, standins.Actor)):
        raise ValueError(  # noqa: TRY004 (Monarch's type)
            f"{Class} must subclass monarch.service.Actor to spawn it.{_how_to_spawn(Class)}"
        )
    endpoints = {}
    for name in dir(Class):
        found = inspect.getattr_static(Class, name)
        if is_endpoint(found):
            if name in MESH_ATTRIBUTES:
                raise ValueError(
                    "ActorMesh has an attribute that collides with an endpoint name: "
                    f"attribute={name}, endpoint={found}. Rename the endpoint."
                )
            endpoints[name] = _endpoint_spec(name, found)
    kind = _kind(Class, endpoints)
    return ActorClass(Class, f"{Class.__module__}.{Class.__qualname__}", kind, endpoints)


def _how_to_spawn(found: object) -> str:
    if isinstance(found, type):
        return f" Define it as class {found.__name__}(Actor), with the Actor of meshgate or monarch.actor"
    if isinstance(found, (api.Actor, standins.Actor)):
        name = type(found).__name__
        return f" Pass the class and the arguments of its constructor: spawn(name, {name}, ...), not {name}(...)"
    return f" It is of type {type(found).__name__}: spawn(name, Class, ...) needs the class of the actors"


def _endpoint_spec(name: str, found: Any) -> EndpointSpec:
    method = found._method
    concurrent = getattr(found, "_concurrent", False)
    explicit = bool(found._explicit_response_port)
    return EndpointSpec(
        name=name,
        signature=inspect.signature(method),
        # Monarch runs a concurrent endpoint as one that replies through a port.
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
    """None if the class does not define the hook."""
    hook = getattr(Class, name, None)
    if hook is None or getattr(hook, "_monarch_doc_stub", False):
        return None
    return inspect.iscoroutinefunction(hook)
