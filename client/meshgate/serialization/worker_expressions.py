"""Expressions that a worker evaluates while it unpickles, using the standard library and torchmonarch only.

A worker may lack meshgate and the laptop may lack Monarch, so neither side can refer to the other's classes by name as
pickle does. ``WorkerExpression(f, *args)`` pickles as the call ``f(*args)``, ``monarch_object("ValueMesh")`` as the
object of that name.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

_SHAPES = "monarch._rust_bindings.monarch_hyperactor.shape"

# Each name that meshgate shares with Monarch, and where a worker finds Monarch's object.
WORKER_NAMES = {
    **{
        name: f"monarch.actor:{name}"
        for name in (
            *("Accumulator", "Actor", "ActorError", "Channel", "Endpoint", "Extent", "Point", "Port"),
            *("PortReceiver", "ValueMesh", "as_endpoint", "concurrent_endpoint", "context", "current_actor_name"),
            *("current_rank", "current_size", "endpoint", "get_meter", "get_or_spawn_controller", "returns_future"),
            *("send", "span", "this_host", "this_proc", "traced"),
        )
    },
    **{name: f"{_SHAPES}:{name}" for name in ("Region", "Shape", "Slice")},
    "EndpointProperty": "monarch._src.actor.endpoint:EndpointProperty",
    "FutureProxy": "monarch.actor:Future",
    "MeshTrait": "monarch._src.actor.shape:MeshTrait",
}


class WorkerExpression:
    """A call that the worker makes while it unpickles this object.

    It is callable only because pickle requires the first item of a reduction to be.
    """

    __slots__ = ("_args", "_function")

    def __init__(self, function: Callable[..., Any] | WorkerExpression, *args: Any) -> None:
        self._function = function
        self._args = args

    def __call__(self, *_: object, **__: object) -> Any:
        raise TypeError("a WorkerExpression is evaluated on workers only")

    def __reduce__(self) -> tuple[Any, ...]:
        return self._function, self._args


def monarch_object(name: str) -> WorkerExpression:
    """Monarch's object for meshgate's ``name``."""
    return WorkerExpression(pkgutil.resolve_name, WORKER_NAMES[name])


def reduce_to_call(function: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """A pickle reduction to ``function(*args, **kwargs)``; ``function`` may be a ``WorkerExpression``."""
    return (partial(function, **kwargs) if kwargs else function), args


_MODULE = (
    "__import__('importlib').import_module("
    "{name!r} if __import__('importlib.util').util.find_spec('meshgate') else 'monarch.actor')"
)


def module_on_worker(module: ModuleType) -> tuple[Any, ...] | None:
    """A pickle reduction for a module of meshgate: itself if the worker has meshgate, else ``monarch.actor``.

    It serves scripts with ``import meshgate as kt``. None for any other module.
    """
    if module.__name__.partition(".")[0] != "meshgate":
        return None
    return eval, (_MODULE.format(name=module.__name__),)
