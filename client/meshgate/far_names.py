"""Expressions that the far side evaluates while it unpickles, in nothing but the standard library and torchmonarch.

A worker may have no meshgate, and the laptop may have no Monarch, so neither can name the other's classes as pickle
does. ``Deferred(f, *args)`` pickles as the call ``f(*args)``; ``monarch("ValueMesh")`` as the object of that name.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

__all__ = ["Deferred", "WORKER_NAMES", "deferred_call", "far_name", "module_on_worker", "monarch"]

_SHAPES = "monarch._rust_bindings.monarch_hyperactor.shape"

# What meshgate exports under Monarch's name, and where a worker has it.
WORKER_NAMES = {
    **{
        name: f"monarch.actor:{name}"
        for name in (
            *("Accumulator", "Actor", "ActorError", "Channel", "Endpoint", "Extent", "Point", "Port"),
            *("PortReceiver", "ValueMesh", "as_endpoint", "concurrent_endpoint", "context", "current_actor_name"),
            *("current_rank", "current_size", "endpoint", "get_or_spawn_controller", "send", "this_host"),
            "this_proc",
        )
    },
    **{name: f"{_SHAPES}:{name}" for name in ("Region", "Shape", "Slice")},
    "EndpointProperty": "monarch._src.actor.endpoint:EndpointProperty",
    "FutureProxy": "monarch.actor:Future",
    "MeshTrait": "monarch._src.actor.shape:MeshTrait",
}


class Deferred:
    """A call that happens where this is unpickled. It cannot be called here; pickle only asks that it could."""

    __slots__ = ("_args", "_function")

    def __init__(self, function: Callable[..., Any] | Deferred, *args: Any) -> None:
        self._function = function
        self._args = args

    def __call__(self, *_: object, **__: object) -> Any:
        raise TypeError("this is evaluated on the far side only")

    def __reduce__(self) -> tuple[Any, ...]:
        return self._function, self._args


def far_name(path: str) -> Deferred:
    """The object that ``module:qualified.name`` names on the far side."""
    return Deferred(pkgutil.resolve_name, path)


def monarch(name: str) -> Deferred:
    """What a worker has in place of meshgate's ``name``."""
    return far_name(WORKER_NAMES[name])


def deferred_call(function: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """A reduction to ``function(*args, **kwargs)``, of which ``function`` may be deferred."""
    return (partial(function, **kwargs) if kwargs else function), args


_MODULE = (
    "__import__('importlib').import_module("
    "{name!r} if __import__('importlib.util').util.find_spec('meshgate') else 'monarch.actor')"
)


def module_on_worker(module: ModuleType) -> tuple[Any, ...] | None:
    """A script's ``import meshgate as kt``: on a worker without meshgate, ``kt`` is ``monarch.actor``."""
    if module.__name__.partition(".")[0] != "meshgate":
        return None
    return eval, (_MODULE.format(name=module.__name__),)
