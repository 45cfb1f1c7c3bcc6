"""Stand-ins for Monarch's ``Actor``, ``endpoint`` and related names, for a laptop without torchmonarch.

They let a module that defines actors be imported on both sides. They record each endpoint's signature and options, so
that calls are checked on the laptop; the actors themselves run on workers and are always Monarch's. Functions that need
a running actor raise ``RuntimeError`` here.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar

from meshgate.shapes.mesh_trait import MeshTrait
from meshgate.shapes.ndslice import Slice
from meshgate.shapes.shape import Point, Shape

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
R = TypeVar("R")

running_context: contextvars.ContextVar[Context | None] = contextvars.ContextVar("meshgate_actor", default=None)
"""The context of an actor that runs in this process, as in a test; ``actors.api.acting_as`` sets it."""


class Endpoint(Generic[P, R]):
    """An endpoint of a spawned actor, for annotations."""


class EndpointProperty(Generic[P, R]):
    """A method decorated with ``endpoint``, and the decorator's options."""

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


def endpoint(
    method: Any = None,
    *,
    propagate: Any = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Decorates a method that others may call once the actor is spawned. The options are Monarch's."""
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
    """Decorates an async method whose calls run concurrently. The options are Monarch's."""
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
    raise NotImplementedError("an actor is not a mesh; use the mesh that spawn() returns")


class Actor(MeshTrait):
    """Base class of actors: subclass it and decorate the methods that others may call with ``endpoint``."""

    @functools.cached_property
    def logger(self) -> logging.Logger:
        return logging.getLogger(type(self).__name__)

    # spawn() is typed to return the actor's class, so type checkers must find a mesh's operations here.

    @property
    def _ndslice(self) -> Slice:
        _not_a_mesh()

    @property
    def _labels(self) -> Iterable[str]:
        _not_a_mesh()

    def _new_with_shape(self, shape: Shape) -> Self:
        _not_a_mesh()

    @property
    def initialized(self) -> Any:
        _not_a_mesh()

    def stop(self, reason: str = "stopped by client") -> Any:
        _not_a_mesh()


def _only_inside_an_actor(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name}() works inside an actor, on a worker. This process is a driver without torchmonarch and runs no "
        f"actors: call {name}() in an endpoint."
    )


class Context:
    """The type of ``context()`` inside an actor, for annotations."""

    actor_instance: Any
    message_rank: Point


def _running(name: str) -> Context:
    return running_context.get() or _only_inside_an_actor(name)


def context() -> Context:
    """The running actor and message. Only inside an actor."""
    return _running("context")


def current_rank() -> Point:
    """The point of this actor among the called ones. Only inside an actor."""
    return _running("current_rank").message_rank


def current_size() -> dict[str, int]:
    """The number of called actors in each dimension. Only inside an actor."""
    return dict(_running("current_size").message_rank.extent)


def current_actor_name() -> str:
    """The id of this actor. Only inside an actor."""
    return str(_running("current_actor_name").actor_instance.actor_id)


def this_host() -> Any:
    """The host that this actor runs on. Only inside an actor."""
    _only_inside_an_actor("this_host")


def this_proc() -> Any:
    """The process that this actor runs in. Only inside an actor."""
    _only_inside_an_actor("this_proc")


def get_or_spawn_controller(name: str, Class: type, *args: Any, **kwargs: Any) -> Any:
    """The only actor with this name, spawned if it does not exist. Only inside an actor."""
    _only_inside_an_actor("get_or_spawn_controller")
