"""Pickling of what is sent to workers: arguments, actor classes, functions.

The pickles are ordinary ones (protocol 5, cloudpickle for what cannot be imported by name), with three additions:

- Large buffers are sent out of band: immutable ones without a copy, mutable ones copied at the time of the call,
  which is when Monarch pickles too.
- Proxies and ports become references, which the gateway replaces with the real meshes and ports.
- meshgate's classes arrive as their Monarch equivalents.

A worker needs only the standard library, torchmonarch and what the user's objects need. A value that cannot be pickled
raises ``UnpicklableArgument`` before anything is sent.
"""

from __future__ import annotations

import ctypes
import functools
import io
import operator
import pickle
import pkgutil
import sys
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import cloudpickle
import cloudpickle.cloudpickle as by_value

from meshgate.actors import standins, telemetry
from meshgate.errors import (
    ActorError,
    ClassNotImportable,
    GatewayError,
    InvalidRequestError,
    UnpicklableArgument,
    unpicklable_argument,
)
from meshgate.serialization.code_as_source import (
    CodeAsSource,
    CodeWithoutSource,
    WorkerPython,
    code_as_source,
    same_python,
)
from meshgate.serialization.stale_source import current_class, source_text
from meshgate.serialization.unpicklable import UnpicklablePart, find_unpicklable_part
from meshgate.serialization.worker_expressions import (
    WORKER_NAMES,
    WorkerExpression,
    module_on_worker,
    monarch_object,
    reduce_to_call,
)
from meshgate.shapes.ndslice import Slice
from meshgate.shapes.shape import Extent, Point, Region, Shape
from meshgate.shapes.value_mesh import ValueMesh
from meshgate_wire import Sendable
from meshgate_wire.messages import Argument

Buffer: TypeAlias = bytes | memoryview
Resolve: TypeAlias = Callable[[object], Argument | None]

# Raised by ``resolve``, ``worker_python`` and for code without source, each with its own explanation.
_EXPLAINED = (InvalidRequestError, GatewayError, CodeWithoutSource)
OUT_OF_BAND_BYTES = 4096
COPY_CHUNK_BYTES = 1 << 20
MANY_BUFFERS = 1 << 15  # half of what a message may have: with so many, only those that are copied in pieces are added
# Registers a source text for tracebacks. Without a modification time, it is not compared with any file.
_REGISTER_SOURCE = (
    "text and __import__('linecache').cache.__setitem__("
    "filename, (len(text), None, text.splitlines(True), filename)) or None"
)
PROTOCOL = 5
# Monarch's objects that belong to a Monarch in this process: actors of the job that receive one end or hang.
_OF_LOCAL_MONARCH = frozenset(
    {"Port", "PortRef", "OncePortRef", "PortReceiver", "HostMesh", "ProcMesh", "ActorMesh", "Context", "Instance"}
)
_LOCAL_OBJECT = (
    "this {name} belongs to a Monarch on this machine, which the job's actors cannot reach. Nothing was sent. Import "
    "Channel from meshgate instead of monarch.actor, and use meshes of the job"
)
MIN_BYTES = 4096  # below this, torch's own pickling is as fast


@dataclass(frozen=True, slots=True)
class Pickled:
    """A pickle, its out-of-band buffers in order, and the objects that its persistent ids stand for."""

    data: bytes
    buffers: tuple[Sendable, ...] = ()
    arguments: tuple[Argument, ...] = ()


def dumps(value: object, resolve: Resolve | None = None, worker_python: WorkerPython = same_python) -> Pickled:
    """Pickles ``value`` for the workers. Raises ``UnpicklableArgument``.

    ``resolve(object)`` returns the reference for a proxy or a port and None for anything else. It is called with every
    object that is not a plain number, string or container. ``worker_python`` is called if ``value`` contains code.
    """
    try:
        return _dump(value, resolve, worker_python)
    except _EXPLAINED:
        raise
    except Exception as error:
        raise _unpicklable(value, "the value", resolve, error) from error


def dumps_call(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    resolve: Resolve | None = None,
    *,
    called: str = "",
    parameters: Sequence[str] = (),
    worker_python: WorkerPython = same_python,
) -> Pickled:
    """Pickles ``(args, kwargs)``.

    The error, if any, names ``called`` and, from ``parameters``, the names of positional arguments.
    """
    try:
        return _dump((args, dict(kwargs)), resolve, worker_python)
    except _EXPLAINED:
        raise
    except Exception as error:
        named = {_position(i, parameters): value for i, value in enumerate(args)}
        named |= {f"argument {name!r}": value for name, value in kwargs.items()}
        for name, value in named.items():
            if _pickling_error(value, resolve):
                raise _unpicklable(value, name, resolve, error, called) from error
        raise _unpicklable((args, dict(kwargs)), "the arguments", resolve, error, called) from error


def _position(index: int, parameters: Sequence[str]) -> str:
    named = f"argument {parameters[index]!r} " if index < len(parameters) else "argument "
    return f"{named}(position {index})"


def dump_class(Class: type, by_value: bool, worker_python: WorkerPython = same_python) -> bytes:
    """Pickles an actor class by value or by name. Raises ``ClassNotImportable`` or ``UnpicklableArgument``."""
    if not by_value:
        Class = current_class(Class)
        _require_importable(Class)
        return pickle.dumps(Class, PROTOCOL)
    try:
        return _dump(Class, None, worker_python, with_source=True).data
    except _EXPLAINED:
        raise
    except Exception as error:
        name = f"class {Class.__module__}.{Class.__qualname__}"
        raise _unpicklable(Class, name, None, error) from error


def _require_importable(Class: type) -> None:
    found: Any = sys.modules.get(Class.__module__)
    for part in Class.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not Class:
        raise ClassNotImportable(
            f"workers cannot import {Class.__qualname__}: module {Class.__module__!r} does not define it under that "
            "name. Define it at the top level of a module of your project.",
            module=Class.__module__,
        )


def pickled_by_value(obj: Any) -> bool:
    """Whether a class or function is pickled by value, since another process could not import it by name.

    This applies to definitions in a script, a notebook or a prompt, to definitions inside a function, and to modules
    that exist in memory only or were registered with ``cloudpickle.register_pickle_by_value``.
    """
    module = sys.modules.get(obj.__module__ or "")
    # A child that multiprocessing has spawned has the script under the second name.
    if module is None or module.__name__ in ("__main__", "__mp_main__") or "<locals>" in obj.__qualname__:
        return True
    if getattr(module, "__file__", None) is None and getattr(module, "__spec__", None) is None:
        return True
    registered = cloudpickle.list_registry_pickle_by_value()
    return any(module.__name__ == name or module.__name__.startswith(f"{name}.") for name in registered)


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """As cloudpickle does, but with the name of the file, which cloudpickle 3.1.3 replaces by ``<dynamic-code>``."""
    make, arguments = by_value._code_reduce(code)
    return make, (*arguments[:10], code.co_filename, *arguments[11:])


class _NeedsReferences(Exception):
    """The value contains a proxy, so it must be pickled with persistent ids."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles values without proxies; raises ``_NeedsReferences`` at the first proxy.

    A pickler with persistent ids calls ``persistent_id`` for every object, even numbers, which is many times slower.
    """

    def __init__(self, resolve: Resolve | None, worker_python: WorkerPython, with_source: bool = False) -> None:
        self.file = io.BytesIO()
        self._worker_python = worker_python
        self._as_source: CodeAsSource | None = None
        self._code_seen = False
        self._sources: dict[str, WorkerExpression] | None = {} if with_source else None
        self.buffers: list[Sendable] = []
        self.arguments: list[Argument] = []
        self._resolve = resolve
        # Not a bound method: the reference cycle would keep the buffers until a garbage collection. A class has none.
        take = None if with_source else functools.partial(_keep_in_band, self.buffers)
        super().__init__(self.file, protocol=PROTOCOL, buffer_callback=take)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        rule = _RULES.get(kind)
        if rule is not None:
            return rule(obj)
        # By the type alone: a user's class may answer for any attribute, ``__class__`` included, or raise.
        if issubclass(kind, (type, types.FunctionType)):
            return self._reduce_importable(obj)
        if (independent := self._reduce_version_bound(obj, kind)) is not None:
            return independent
        if issubclass(kind, types.ModuleType):
            return module_on_worker(obj) or NotImplemented
        if self._resolve is not None and self._resolve(obj) is not None:
            raise _NeedsReferences
        for base in kind.__mro__:
            if (reason := vars(base).get("_not_for_workers")) is not None:
                raise InvalidRequestError(reason)
        if kind.__name__ in _OF_LOCAL_MONARCH and kind.__module__.startswith("monarch."):
            raise InvalidRequestError(_LOCAL_OBJECT.format(name=kind.__name__))
        if kind.__name__ == "Tensor" and kind.__module__ == "torch":
            return reduce_tensor(obj) or NotImplemented
        return NotImplemented

    def _reduce_version_bound(self, obj: Any, kind: type) -> tuple[Any, ...] | None:
        """Reduces what another version of Python could not read, and code, whose tracebacks must name its file."""
        if kind is types.CodeType:
            return self._as_source.reduce_code(obj) if self._as_source is not None else _reduce_code(obj)
        if kind is typing.ForwardRef and self._as_source is not None:  # contains the code of its text
            return kind, (obj.__forward_arg__,)
        if kind.__module__ == "pathlib._local":  # the name of this module on Python 3.13 only
            return WorkerExpression(pkgutil.resolve_name, f"pathlib:{kind.__name__}"), (str(obj),)
        return None

    def _reduce_importable(self, obj: Any) -> Any:
        """Reduces a class or function: to Monarch's equivalent, or by value if workers cannot import it."""
        module = obj.__module__ or ""
        if module.startswith("meshgate.") and WORKER_NAMES.get(obj.__name__):
            return monarch_object(obj.__name__).__reduce__()
        if module == "pathlib._local":
            return pkgutil.resolve_name, (f"pathlib:{obj.__qualname__}",)
        if module == "builtins" or not pickled_by_value(obj):
            return super().reducer_override(obj)
        if not self._code_seen:
            self._code_seen = True
            self._as_source = code_as_source(self._worker_python())
        if isinstance(obj, type):
            generated = self._as_source.reduce_class(obj) if self._as_source is not None else None
            return generated or by_value._dynamic_class_reduce(obj)
        reduced = self._dynamic_function_reduce(obj)
        source = self._source(obj.__code__.co_filename)
        if source is not None:
            reduced[2][1]["__globals__"]["__loader__"] = source
        return reduced

    def _source(self, filename: str) -> WorkerExpression | None:
        """Registers the source for tracebacks on the worker, where the file may be missing or different."""
        if self._sources is None:
            return None
        if filename not in self._sources:
            names = {"filename": filename, "text": source_text(filename)}
            self._sources[filename] = WorkerExpression(eval, _REGISTER_SOURCE, names)
        return self._sources[filename]


class _ReferencePickler(_Pickler):
    """Pickles values that contain proxies, as persistent ids."""

    def __init__(self, resolve: Resolve, worker_python: WorkerPython) -> None:
        self._ids: dict[int, int] = {}
        self._referenced: list[object] = []  # keeps the ids in _ids valid
        self._find_reference = resolve
        super().__init__(None, worker_python)

    def persistent_id(self, obj: object) -> int | None:
        known = self._ids.get(id(obj))
        if known is not None:
            return known
        if isinstance(obj, (type, types.FunctionType, types.ModuleType)):
            return None
        argument = self._find_reference(obj)
        if argument is None:
            return None
        self.arguments.append(argument)
        self._referenced.append(obj)
        self._ids[id(obj)] = len(self.arguments) - 1
        return len(self.arguments) - 1


def _keep_in_band(out_of_band: list[Sendable], buffer: pickle.PickleBuffer) -> bool:
    """Whether ``buffer`` goes into the pickle. If not, appends it to ``out_of_band``."""
    view = buffer.raw()
    if view.nbytes < (OUT_OF_BAND_BYTES if len(out_of_band) < MANY_BUFFERS else COPY_CHUNK_BYTES):
        return True
    out_of_band.append(view if type(view.obj) is bytes else _copy(view))
    return False


def _copy(view: memoryview) -> Sendable:
    """Copies in pieces, since a single copy of gigabytes would block every other thread."""
    if view.nbytes <= COPY_CHUNK_BYTES:
        return bytes(view)
    pieces = []
    for at in range(0, view.nbytes, COPY_CHUNK_BYTES):
        pieces.append(bytes(view[at : at + COPY_CHUNK_BYTES]))
        time.sleep(0)  # releases the GIL, which a waiting thread would otherwise get after 5 ms
    return pieces


def _dump(
    value: object, resolve: Resolve | None, worker_python: WorkerPython = same_python, with_source: bool = False
) -> Pickled:
    pickler = _Pickler(resolve, worker_python, with_source)
    try:
        pickler.dump(value)
    except _NeedsReferences:
        assert resolve is not None
        pickler = _ReferencePickler(resolve, worker_python)
        pickler.dump(value)
    return Pickled(pickler.file.getvalue(), tuple(pickler.buffers), tuple(pickler.arguments))


def _pickling_error(value: object, resolve: Resolve | None) -> Exception | None:
    try:
        _dump(value, resolve)
    except Exception as error:  # noqa: BLE001 (whatever a user's __reduce__ raises)
        return error
    return None


def _unpicklable(
    value: object, name: str, resolve: Resolve | None, error: Exception, called: str = ""
) -> UnpicklableArgument:
    found = find_unpicklable_part(value, lambda part: _pickling_error(part, resolve))
    part = found or UnpicklablePart("", value, error)
    inside = f" (the {type(part.value).__qualname__} at {part.path})" if part.path else ""
    of = f" of {called}" if called else ""
    remedy = " Pass what it is made from, and create it on the worker."
    if type(part.error) is UnpicklableArgument:  # meshgate's own objects say themselves what to pass
        remedy = ""
    return unpicklable_argument(type(part.error))(
        f"cannot pickle {name}{of}{inside}: {str(part.error).rstrip('.')}. Nothing was sent.{remedy}",
        argument=name,
        path=part.path,
    )


# --- Monarch's equivalents of meshgate's classes -----------------------------------------------------------


def _reduce_slice(ranks: Slice) -> tuple[Any, ...]:
    return reduce_to_call(monarch_object("Slice"), offset=ranks.offset, sizes=ranks.sizes, strides=ranks.strides)


def _reduce_endpoint(prop: standins.EndpointProperty[..., Any]) -> tuple[Any, ...]:
    decorator = monarch_object("concurrent_endpoint" if prop._concurrent else "endpoint")
    return reduce_to_call(
        decorator,
        prop._method,
        propagate=prop._propagator,
        explicit_response_port=prop._explicit_response_port,
        instrument=prop._instrument,
    )


def _reduce_actor_error(error: ActorError) -> tuple[Any, ...]:
    state = {"exception_formatted": error.exception_formatted}
    return monarch_object("ActorError"), (error.exception, error.message), state


_RULES: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    ActorError: _reduce_actor_error,
    Extent: lambda extent: (monarch_object("Extent"), (extent.labels, extent.sizes)),
    Point: lambda point: (monarch_object("Point"), (point.rank, point.extent)),
    Region: lambda region: (monarch_object("Region"), (region.labels, region.slice())),
    Shape: lambda shape: (monarch_object("Shape"), (shape.labels, shape.ndslice)),
    Slice: _reduce_slice,
    ValueMesh: lambda mesh: (monarch_object("ValueMesh"), (mesh._shape, list(mesh.values()))),
    standins.EndpointProperty: _reduce_endpoint,
    telemetry.Instrument: lambda made: (operator.methodcaller(made.kind, made.name), (telemetry.Meter(),)),
    telemetry.Meter: lambda meter: (monarch_object("get_meter"), ()),
}


# This applies to plain CPU tensors without gradients; torch pickles all others, such as nested tensors and expanded
# views. This module does not import torch: a tensor exists only if torch has been imported.


def reduce_tensor(value: Any) -> tuple[Any, ...] | None:
    """A pickle reduction that needs only torch to rebuild ``value``, or None if torch must pickle it.

    Tensors that share memory no longer share it when they arrive, as a slice is sent without the rest of its tensor.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor or not _plain(torch, value):
        return None
    nbytes = value.numel() * value.element_size()
    if not MIN_BYTES <= nbytes <= value.untyped_storage().nbytes():  # larger than its memory: an expanded view
        return None
    value = value.contiguous()
    if not value.data_ptr():  # a tensor of zeros that autograd made without memory
        return None
    memory = (ctypes.c_char * nbytes).from_address(value.data_ptr())
    memory.tensor = value  # keeps the memory alive while the pickler copies it
    flat = WorkerExpression(functools.partial(torch.frombuffer, dtype=value.dtype), pickle.PickleBuffer(memory))
    return reduce_to_call(operator.methodcaller("reshape", tuple(value.shape)), flat)


def _plain(torch: Any, value: Any) -> bool:
    return bool(
        value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_nested
        and not value.requires_grad
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and not value.__dict__
    )
