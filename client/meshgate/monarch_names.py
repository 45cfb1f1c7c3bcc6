"""What Monarch's names mean on the laptop, when a worker's pickle says them.

Monarch pickles some of its functions as code; those are recognised by their names, so that reading a mesh or a port
never depends on the worker's Python version. Names of Monarch's that mean nothing here stand for ``Absent`` types.
"""

from __future__ import annotations

import functools
import importlib
import io
import types
from dataclasses import dataclass
from typing import Any, NoReturn

from meshgate import actors
from meshgate.errors import ActorError, SupervisionError, UnreadableResult
from meshgate.extent import Extent, Point
from meshgate.ndslice import Slice
from meshgate.shape import Region, Shape
from meshgate.value_mesh import ValueMesh

__all__ = ["MEANINGS", "PortAddress", "absent", "require_module"]


class _Shared:
    """``Shared.from_value(mesh)``, a future that is done: the mesh itself."""

    @staticmethod
    def from_value(value: Any) -> Any:
        return value


class _PortId:
    @staticmethod
    def from_string(address: str) -> str:
        return address


@dataclass(frozen=True, slots=True)
class PortAddress:
    """Where a port is, as Monarch writes it. ``once``: it takes one message."""

    address: str
    once: bool = False


def require_module(name: str, needed_by: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnreadableResult(
            f"{needed_by} needs module {name!r}, which this machine cannot import ({error}). "
            f"Install {name.partition('.')[0]!r} here, or return something else.",
            module=name,
        ) from error


def _load_storage(data: bytes) -> Any:
    """The memory of a tensor; on a laptop always main memory."""
    torch = require_module("torch", "a tensor in the result")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


@functools.lru_cache(maxsize=1024)
def absent(module: str, name: str) -> type:
    """A type that may be named, and fails when something of it is made."""

    def refuse(cls: type, *_: object, **__: object) -> NoReturn:
        raise UnreadableResult(f"a {module}.{name} cannot be had outside the cluster", module=module)

    return type(name.rpartition(".")[2], (), {"__module__": module, "__qualname__": name, "__new__": refuse})


_NATIVE = "monarch._rust_bindings.monarch_hyperactor"

MEANINGS: dict[tuple[str, str], Any] = {
    ("monarch._src.actor.actor_mesh", "Actor"): actors.Actor,
    ("monarch._src.actor.actor_mesh", "ActorError"): ActorError,
    ("monarch._src.actor.actor_mesh", "Point"): Point,
    ("monarch._src.actor.actor_mesh", "ValueMesh"): ValueMesh,
    ("monarch._src.actor.endpoint", "EndpointProperty"): actors.EndpointProperty,
    ("monarch._src.actor.pickle", "_load_from_bytes"): _load_storage,
    ("monarch._src.actor.source_loader", "RemoteImportLoader"): types.SimpleNamespace,
    (f"{_NATIVE}.mailbox", "OncePortRef"): functools.partial(PortAddress, once=True),
    (f"{_NATIVE}.mailbox", "PortId"): _PortId,
    (f"{_NATIVE}.mailbox", "PortRef"): PortAddress,
    (f"{_NATIVE}.pytokio", "Shared"): _Shared,
    (f"{_NATIVE}.supervision", "SupervisionError"): SupervisionError,
    **{(f"{_NATIVE}.shape", kind.__name__): kind for kind in (Extent, Point, Region, Shape, Slice)},
}
