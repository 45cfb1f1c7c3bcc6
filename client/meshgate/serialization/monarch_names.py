"""What takes the place of names in a worker's pickle: equivalents of Monarch's, and stand-ins of exceptions.

A Monarch name without an equivalent becomes a type that can be referred to but not instantiated. No equivalent is a
``functools.partial``: a pickle could set another function or other arguments in it.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import io
import json
import operator
import pkgutil
import types
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from meshgate.actors import api
from meshgate.errors import ActorError, SupervisionError, UnreadableResult, ValueLostError
from meshgate.serialization.worker_expressions import WorkerExpression
from meshgate.shapes.ndslice import Slice
from meshgate.shapes.shape import Extent, Point, Region, Shape
from meshgate.shapes.value_mesh import ValueMesh

_MODULES = ("monarch._src.rdma", "monarch._rust_bindings.rdma")


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
    ("_meshgate_kept", "ValueLostError"): ValueLostError,
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


# An endpoint returns one, and the program passes it to another actor: the driver keeps what was pickled, and sends it
# on.


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


class ExceptionStandIn(Exception):
    """Base of all stand-ins. Accepts any arguments and any pickled state."""

    def __setstate__(self, state: Any) -> None:
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        for part in (attributes, slots):
            if isinstance(part, dict):
                self.__dict__.update({str(name): value for name, value in part.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        kind = type(self)
        if kind is ExceptionStandIn:
            return ExceptionStandIn, self.args, self.__dict__
        return _rebuild, (kind.__module__, kind.__qualname__, self.args), self.__dict__

    def __call__(self, *args: object, **_: object) -> ExceptionStandIn:
        """Makes an instance if the class itself was pickled by value, and is represented by a stand-in."""
        return ExceptionStandIn(*args)

    # pickle calls these if the class derives from a dict or a list.

    def __setitem__(self, key: object, value: object) -> None:
        self.__dict__.setdefault("items", {})[key] = value

    def append(self, value: object) -> None:
        self.__dict__.setdefault("elements", []).append(value)

    def extend(self, values: Any) -> None:
        self.__dict__.setdefault("elements", []).extend(values)


@functools.lru_cache(maxsize=1024)
def stand_in_for(module: str, qualname: str) -> type[ExceptionStandIn]:
    """The stand-in class for ``module.qualname``; always the same one."""
    name = qualname.rpartition(".")[2]
    namespace = {"__module__": module, "__qualname__": qualname, "__doc__": f"Stands for {module}.{qualname}."}
    return type(name, (ExceptionStandIn,), namespace)


def _rebuild(module: str, qualname: str, args: tuple[Any, ...]) -> ExceptionStandIn:
    return stand_in_for(module, qualname)(*args)


# A pickle can call whatever it can name. Nothing listed here runs code that the pickle brings, imports a module that
# the pickle chooses, or reads or writes files.


_NAMES: dict[str, frozenset[str]] = {
    "builtins": frozenset(
        {"bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "range", "set", "slice"}
        | {"str", "tuple"}
    ),
    "_codecs": frozenset({"encode"}),  # how older pickle protocols write bytes
    "collections": frozenset({"Counter", "OrderedDict", "defaultdict", "deque"}),
    "datetime": frozenset({"date", "datetime", "time", "timedelta", "timezone"}),
    "decimal": frozenset({"Decimal"}),
    "fractions": frozenset({"Fraction"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath", "PureWindowsPath"}),
    "uuid": frozenset({"UUID"}),
    "numpy": frozenset({"dtype", "ndarray"}),
    "torch": frozenset(
        {"Size", "device", "bfloat16", "bool", "complex64", "complex128", "float16", "float32", "float64"}
        | {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    ),
    "torch._utils": frozenset({"_rebuild_parameter", "_rebuild_tensor_v2"}),
}

for _version in ("core", "_core"):  # numpy 1 and numpy 2
    _NAMES[f"numpy.{_version}.multiarray"] = frozenset({"_reconstruct", "scalar"})
    _NAMES[f"numpy.{_version}.numeric"] = frozenset({"_frombuffer"})


def is_data_type(module: str, name: str) -> bool:
    """Whether a result may contain ``module.name``: a type that holds data, its constructor, or a built-in error."""
    if name in _NAMES.get(module, ()):
        return True
    value = getattr(builtins, name, None) if module == "builtins" else None
    return isinstance(value, type) and issubclass(value, Exception)
