"""Objects of Monarch's that only actors can use, such as RDMA buffers, while they pass through the driver.

An endpoint returns one, and the program passes it to another actor: the driver keeps what was pickled, and sends it on.
"""

from __future__ import annotations

import functools
import json
import operator
import pkgutil
from typing import Any, ClassVar, NoReturn

from meshgate.serialization.worker_expressions import WorkerExpression

_MODULES = ("monarch._src.rdma", "monarch._rust_bindings.rdma")


def is_of_workers(module: str) -> bool:
    """Whether objects of ``module`` are of use in actors only."""
    return any(module == each or module.startswith(f"{each}.") for each in _MODULES)


class WorkerObject:
    """An object as it was pickled: the arguments of its class, and its state."""

    _monarch_class: ClassVar[tuple[str, str]]
    _args: tuple[Any, ...]
    _initialized: bool
    _state: Any

    def __new__(cls, *args: Any) -> WorkerObject:
        made = super().__new__(cls)
        vars(made).update(_args=args, _initialized=False, _state=None)
        return made

    def __init__(self, *_: Any) -> None:
        self._initialized = True  # pickle called the class, and not only its __new__

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        kind = WorkerExpression(pkgutil.resolve_name, ":".join(self._monarch_class))
        if self._initialized:
            return kind, self._args, self._state
        return WorkerExpression(operator.methodcaller, "__new__", kind, *self._args), (kind,), self._state

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        kind = self._monarch_class[1]
        raise AttributeError(f"an {kind} can be used in actors only: pass it to an endpoint, and use {name!r} there")

    def __repr__(self) -> str:
        return f"<{self._monarch_class[1]}, for actors>"


class _Buffer(WorkerObject):
    """An ``RDMABuffer``."""

    def size(self) -> int:
        """The number of bytes."""
        return int(json.loads(self._state["_buffer"]._args[0])["size"])


@functools.lru_cache(maxsize=64)
def worker_object_type(module: str, name: str) -> type[WorkerObject]:
    """The type that keeps objects of Monarch's class ``module.name``."""
    base = _Buffer if name == "RDMABuffer" else WorkerObject
    return type(name, (base,), {"__module__": module, "_monarch_class": (module, name)})
