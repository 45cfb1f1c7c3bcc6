"""``Actor`` and ``endpoint`` as type checkers see them: ``actors.step.call(1)`` is a ``FutureProxy[ValueMesh[int]]``.

At run time ``meshgate.Actor`` and ``meshgate.endpoint`` come from ``meshgate.actors.api``, which is below futures and
ports in the layers and so cannot name them. Nothing imports this module at run time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

from meshgate.actors import standins
from meshgate.proxies.kept import KeptMesh
from meshgate.proxies.ports import Port
from meshgate.session.futures import FutureProxy
from meshgate.shapes.value_mesh import ValueMesh

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Actor(standins.Actor):
    """Base class of actors. ``spawn`` is typed to return the actor's class, so a mesh's operations must be here."""

    if TYPE_CHECKING:

        @property
        def initialized(self) -> FutureProxy[None]: ...

        def stop(self, reason: str = "stopped by client") -> FutureProxy[None]: ...


class Endpoint(Protocol[P, R]):
    """An endpoint of a spawned actor: the ways to call it."""

    def call(self, *args: P.args, **kwargs: P.kwargs) -> FutureProxy[ValueMesh[R]]:
        """Calls every actor of the mesh and returns one value for each rank."""

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> FutureProxy[R]:
        """Calls the only actor of the mesh."""

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> FutureProxy[R]:
        """Calls one actor of the mesh, chosen at random."""

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[FutureProxy[R]]:
        """Calls every actor of the mesh and yields a future for each reply, in the order of arrival."""

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls every actor of the mesh without waiting for replies."""

    def keep(self, *args: P.args, **kwargs: P.kwargs) -> KeptMesh[R]:
        """Calls every actor of the mesh; the results stay in their processes."""


class EndpointProperty(Generic[P, R]):
    """A method decorated with ``endpoint``."""

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: type | None = None) -> Endpoint[P, R]: ...


class _Decorator(Protocol):
    """``endpoint(...)`` with options only."""

    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], Awaitable[R]]) -> EndpointProperty[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], R]) -> EndpointProperty[P, R]: ...


class _ConcurrentDecorator(Protocol):
    """``concurrent_endpoint(...)`` with options only."""

    def __call__(self, function: Callable[Concatenate[Any, P], Awaitable[R]]) -> EndpointProperty[P, R]: ...


class _PortDecorator(Protocol):
    """``endpoint(explicit_response_port=True)``: callers receive what is sent to the port."""

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
) -> _PortDecorator: ...
@overload
def endpoint(
    method: None = None,
    *,
    propagate: Any = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> _Decorator: ...
def endpoint(method: Any = None, **options: Any) -> Any:
    """Decorates a method that others may call once the actor is spawned."""
    return standins.endpoint(method, **options)


@overload
def concurrent_endpoint(
    method: Callable[Concatenate[Any, P], Awaitable[R]],
    *,
    propagate: Any = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> EndpointProperty[P, R]: ...
@overload
def concurrent_endpoint(
    method: Callable[Concatenate[Any, Port[R], P], Awaitable[object]],
    *,
    propagate: Any = None,
    explicit_response_port: Literal[True],
    instrument: bool = True,
) -> EndpointProperty[P, R]: ...
@overload
def concurrent_endpoint(
    method: None = None,
    *,
    propagate: Any = None,
    explicit_response_port: Literal[True],
    instrument: bool = True,
) -> _PortDecorator: ...
@overload
def concurrent_endpoint(
    method: None = None,
    *,
    propagate: Any = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> _ConcurrentDecorator: ...
def concurrent_endpoint(method: Any = None, **options: Any) -> Any:
    """Decorates an async method whose calls run concurrently."""
    return standins.concurrent_endpoint(method, **options)
