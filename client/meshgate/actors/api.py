"""The names that actors are written with: Monarch's own if torchmonarch is installed, else the stand-ins.

No other module of the client imports torchmonarch.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshgate.actors.standins import running_context
from meshgate.monarch_classes import monarch_api

if TYPE_CHECKING:
    from meshgate.actors.standins import (
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
    from meshgate.actors.telemetry import get_meter, span, traced

    class MonarchActorError(Exception): ...

    class MonarchSupervisionError(Exception): ...

    def _monarch_as_endpoint(*args: Any, **kwargs: Any) -> Any: ...

    def monarchs_returns_future(function: Any) -> Any: ...

    _monarch_context = running_context

else:
    try:
        from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError as MonarchSupervisionError
        from monarch._src.actor.actor_mesh import _context as _monarch_context
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
            get_meter,
            get_or_spawn_controller,
            span,
            this_host,
            this_proc,
            traced,
        )
        from monarch.actor import ActorError as MonarchActorError
        from monarch.actor import as_endpoint as _monarch_as_endpoint
        from monarch.actor import returns_future as monarchs_returns_future
    except ImportError:
        from meshgate.actors.standins import (
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
        from meshgate.actors.telemetry import get_meter, span, traced
        from meshgate.errors import ActorError as MonarchActorError
        from meshgate.errors import SupervisionError as MonarchSupervisionError

        _monarch_context = running_context

        def _monarch_as_endpoint(not_an_endpoint, **_):
            raise ValueError("expected an method of a spawned actor")

        def monarchs_returns_future(function):
            return function

    else:
        from meshgate.errors import ActorError, MeshgateError

        EndpointProperty = type(endpoint(lambda self: None))
        # Lets a handler for Monarch's ActorError catch ours, though meshgate.errors imports no Monarch.
        ActorError.__bases__ = (MeshgateError, MonarchActorError)


__all__ = [
    "Actor", "Context", "Endpoint", "EndpointProperty", "MonarchActorError", "MonarchSupervisionError", "acting_as",
    "as_endpoint", "concurrent_endpoint", "context", "current_actor_name", "current_rank", "current_size", "endpoint",
    "get_meter", "get_or_spawn_controller", "in_worker_process", "inside_actor", "monarchs", "monarchs_returns_future",
    "span", "this_host", "this_proc", "traced",
]  # fmt: skip


def inside_actor() -> bool:
    """Whether an actor of Monarch's runs in this task or thread, and not only a Monarch that the program started."""
    if _monarch_context is running_context:
        return False
    present = _monarch_context.get(None)
    return present is not None and present is not local_client()


def in_worker_process() -> bool:
    """Whether Monarch started this process for actors."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == "monarch._src.actor.bootstrap_main"


def monarchs(name: str) -> Any:
    """Monarch's object called ``name``, in a process that has Monarch."""
    return MonarchSupervisionError if name == "SupervisionError" else monarch_api()[name]


def local_client() -> Any:
    """The context of the Monarch that runs in this process because the program started it, or None."""
    starter = getattr(sys.modules.get("monarch._src.actor.actor_mesh"), "_client_context", None)
    return starter.try_get() if starter is not None else None


def as_endpoint(not_an_endpoint: Any, *, propagate: Any = None, explicit_response_port: bool = False) -> Any:
    """Treats a method that is not marked as an endpoint as one: ``as_endpoint(actors.method).call(...)``.

    Raises ``ValueError`` for anything but a method of a spawned actor.
    """
    convert = inspect.getattr_static(type(not_an_endpoint), "__as_endpoint__", None)
    if convert is not None:
        return convert(not_an_endpoint, explicit_response_port=explicit_response_port)
    return _monarch_as_endpoint(not_an_endpoint, propagate=propagate, explicit_response_port=explicit_response_port)


@contextlib.contextmanager
def acting_as(context: Context) -> Iterator[None]:
    """Makes ``context`` the result of ``context()`` in this task or thread, for actors that run without Monarch."""
    tokens = [(variable, variable.set(context)) for variable in (running_context, _monarch_context)]
    try:
        yield
    finally:
        for variable, token in reversed(tokens):
            variable.reset(token)
