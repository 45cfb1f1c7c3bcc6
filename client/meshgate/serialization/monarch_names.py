"""The laptop's equivalents of the Monarch names in a worker's pickle.

A Monarch name without an equivalent becomes a type that can be referred to but not instantiated. No equivalent is a
``functools.partial``: a pickle could set another function or other arguments in it.
"""

from __future__ import annotations

import functools
import importlib
import io
import types
from dataclasses import dataclass
from typing import Any, NoReturn

from meshgate.actors import api
from meshgate.errors import ActorError, SupervisionError, UnreadableResult
from meshgate.shapes.ndslice import Slice
from meshgate.shapes.shape import Extent, Point, Region, Shape
from meshgate.shapes.value_mesh import ValueMesh


class _Shared:
    """Monarch's future of a mesh: ``Shared.from_value(mesh)``, and waiting for it, is the mesh itself."""

    @staticmethod
    def from_value(value: Any) -> Any:
        return value

    block_on = from_value


class _PortId:
    @staticmethod
    def from_string(address: str) -> str:
        return address


@dataclass(frozen=True, slots=True)
class PortAddress:
    """The address of a port, in Monarch's notation. ``once``: the port accepts a single message."""

    address: str
    once: bool = False


def _load_storage(data: bytes, weights_only: bool = False) -> Any:
    """The memory of a tensor, loaded into main memory whatever the worker's device."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise UnreadableResult(
            f"the result contains a tensor, and this machine cannot import torch ({error}). "
            "Install torch here, or return something else, such as tensor.numpy().",
            module="torch",
        ) from error
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)


def _load_storage_as_data(data: bytes) -> Any:
    return _load_storage(data, weights_only=True)


def _once_port(address: str) -> PortAddress:
    return PortAddress(address, once=True)


@functools.lru_cache(maxsize=1024)
def unavailable_type(module: str, name: str) -> type:
    """A type that can be referred to, and raises ``UnreadableResult`` when it is instantiated."""

    def fail(cls: type, *_: object, **__: object) -> NoReturn:
        raise UnreadableResult(
            f"the result contains a {module}.{name}, which exists on workers only. Return something else.",
            module=module,
        )

    return type(name.rpartition(".")[2], (), {"__module__": module, "__qualname__": name, "__new__": fail})


_NATIVE = "monarch._rust_bindings.monarch_hyperactor"

LOCAL_EQUIVALENTS: dict[tuple[str, str], Any] = {
    ("monarch._src.actor.actor_mesh", "Actor"): api.Actor,
    ("monarch._src.actor.actor_mesh", "ActorError"): ActorError,
    ("monarch._src.actor.actor_mesh", "Point"): Point,
    ("monarch._src.actor.actor_mesh", "ValueMesh"): ValueMesh,
    ("monarch._src.actor.endpoint", "EndpointProperty"): api.EndpointProperty,
    ("monarch._src.actor.pickle", "_load_from_bytes"): _load_storage,
    ("monarch._src.actor.source_loader", "RemoteImportLoader"): types.SimpleNamespace,
    (f"{_NATIVE}.mailbox", "OncePortRef"): _once_port,
    (f"{_NATIVE}.mailbox", "PortId"): _PortId,
    (f"{_NATIVE}.mailbox", "PortRef"): PortAddress,
    (f"{_NATIVE}.pytokio", "Shared"): _Shared,
    (f"{_NATIVE}.supervision", "SupervisionError"): SupervisionError,
    **{(f"{_NATIVE}.shape", kind.__name__): kind for kind in (Extent, Point, Region, Shape, Slice)},
}

AS_DATA: dict[tuple[str, str], Any] = {
    ("monarch._src.actor.pickle", "_load_from_bytes"): _load_storage_as_data,
    ("torch.storage", "_load_from_bytes"): _load_storage_as_data,
}
"""Equivalents that run no code of the worker, where those of ``LOCAL_EQUIVALENTS`` or of torch may."""
