"""What an actor is written with, for a laptop without torchmonarch.

A module that defines actors imports on both ends: where torchmonarch is installed it gets Monarch's own classes
(see ``meshgate.actors``), elsewhere these. They carry an endpoint's signature and options, so that calls are
checked on the laptop; an actor itself runs on a worker, always as a true Monarch actor. What only makes sense
inside an actor raises ``RuntimeError`` here.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, NoReturn, ParamSpec, Protocol, TypeVar, overload

from meshgate.shape import MeshTrait, Point, Shape, Slice

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from typing_extensions import Self

    from meshgate.channel import Port
    from meshgate.future import FutureProxy
    from meshgate.value_mesh import ValueMesh

__all__ = [
    "Actor",
    "Context",
    "Endpoint",
    "EndpointProperty",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "endpoint",
    "get_or_spawn_controller",
    "this_host",
    "this_proc",
]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Endpoint(Protocol[P, R]):
    """An endpoint of a spawned actor, for type checkers: the messages one can send to it."""

    def call(self, *args: P.args, **kwargs: P.kwargs) -> FutureProxy[ValueMesh[R]]:
        """Calls every actor of the mesh; a value a rank."""

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> FutureProxy[R]:
        """Calls the only actor of the mesh."""

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> FutureProxy[R]:
        """Calls one actor of the mesh, chosen at random."""

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[FutureProxy[R]]:
        """Calls every actor of the mesh; answers come one by one."""

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls every actor of the mesh and waits for none."""


class EndpointProperty(Generic[P, R]):
    """A method marked with ``endpoint``, and the options it was marked with."""

    def __init__(
        self,
        method: Callable[..., Any],
        propagator: Any = None,
        explicit_response_port: bool = False,
        instrument: bool = True,
        concurrent: bool = False,
    ) -> None:
        self._method = method
        self._propagator = propagator
        self._explicit_response_port = explicit_response_port
        self._instrument = instrument
        self._concurrent = concurrent

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: type | None = None) -> Endpoint[P, R]: ...


class _Mark(Protocol):
    """``endpoint(...)``, called with options alone."""

    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], Awaitable[R]]) -> EndpointProperty[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], R]) -> EndpointProperty[P, R]: ...


class _PortedMark(Protocol):
    """``endpoint(explicit_response_port=True)``: what the port takes is what callers get."""

    def __call__(self, function: Callable[Concatenate[Any, Port[R], P], object]) -> EndpointProperty[P, R]: ...


@overload
def endpoint(
    method: Callable[Concatenate[Any, P], Awaitable[R]],
    *,
    propagate: Any = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> EndpointProperty[P, R]: ...
@overload
def endpoint(
    method: Callable[Concatenate[Any, P], R],
    *,
    propagate: Any = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> EndpointProperty[P, R]: ...
@overload
def endpoint(
    method: Callable[Concatenate[Any, Port[R], P], object],
    *,
    propagate: Any = None,
    explicit_response_port: Literal[True],
    instrument: bool = True,
) -> EndpointProperty[P, R]: ...
@overload
def endpoint(
    method: None = None,
    *,
    propagate: Any = None,
    explicit_response_port: Literal[True],
    instrument: bool = True,
) -> _PortedMark: ...
@overload
def endpoint(
    method: None = None,
    *,
    propagate: Any = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> _Mark: ...
def endpoint(
    method: Any = None,
    *,
    propagate: Any = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Marks a method as one that others may call once the actor is spawned. Options as Monarch's ``endpoint``."""
    if method is None:
        return functools.partial(
            endpoint,
            propagate=propagate,
            explicit_response_port=explicit_response_port,
            instrument=instrument,
        )
    return EndpointProperty(method, propagate, explicit_response_port, instrument)


def concurrent_endpoint(
    method: Any = None,
    *,
    propagate: Any = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Marks an async method whose calls run side by side. Options as Monarch's ``concurrent_endpoint``."""
    if method is None:
        return functools.partial(
            concurrent_endpoint,
            propagate=propagate,
            explicit_response_port=explicit_response_port,
            instrument=instrument,
        )
    if isinstance(method, EndpointProperty):
        raise ValueError(  # noqa: TRY004 (Monarch's type)
            "concurrent_endpoint does not wrap @endpoint; pass endpoint options to @concurrent_endpoint"
        )
    if not inspect.iscoroutinefunction(method):
        raise ValueError("concurrent_endpoint can only wrap async endpoints")
    return EndpointProperty(method, propagate, explicit_response_port, instrument, concurrent=True)


def _not_a_mesh(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError("an actor is not a mesh; what spawn() returns is")


class Actor(MeshTrait):
    """Base class of actors: subclass it and mark its public methods with ``endpoint``."""

    @functools.cached_property
    def logger(self) -> logging.Logger:
        return logging.getLogger(type(self).__name__)

    # spawn() is typed to return the actor's class, so a type checker must find a mesh's operations here.

    @property
    def _ndslice(self) -> Slice:
        _not_a_mesh()

    @property
    def _labels(self) -> Iterable[str]:
        _not_a_mesh()

    def _new_with_shape(self, shape: Shape) -> Self:
        _not_a_mesh()

    @property
    def initialized(self) -> FutureProxy[None]:
        _not_a_mesh()

    def stop(self, reason: str = "stopped by client") -> FutureProxy[None]:
        _not_a_mesh()


def _only_inside_an_actor(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name}() works inside an actor, on a worker. This process is the driver, and torchmonarch is not installed "
        f"in it, so it has no actors of its own: call {name}() in an endpoint."
    )


class Context:
    """What ``context`` returns inside an actor, for annotations."""

    actor_instance: Any
    message_rank: Point


def context() -> Context:
    """What runs now: the actor and the message. Only inside an actor."""
    _only_inside_an_actor("context")


def current_rank() -> Point:
    """Where this actor stands among those that were called. Only inside an actor."""
    _only_inside_an_actor("current_rank")


def current_size() -> dict[str, int]:
    """How many actors were called, for each dimension. Only inside an actor."""
    _only_inside_an_actor("current_size")


def current_actor_name() -> str:
    """The id of this actor. Only inside an actor."""
    _only_inside_an_actor("current_actor_name")


def this_host() -> Any:
    """The host that this actor runs on. Only inside an actor."""
    _only_inside_an_actor("this_host")


def this_proc() -> Any:
    """The process that this actor runs in. Only inside an actor."""
    _only_inside_an_actor("this_proc")


def get_or_spawn_controller(name: str, Class: type, *args: Any, **kwargs: Any) -> Any:
    """The one actor of this name, spawned if need be. Only inside an actor."""
    _only_inside_an_actor("get_or_spawn_controller")
