"""What goes to the workers: arguments, actor classes, functions.

The pickles are ordinary ones (protocol 5, cloudpickle for what has no importable name), with three additions. Large
buffers travel beside the pickle, uncopied where nobody can change them and copied at the call where somebody can,
since Monarch too pickles at the call. Proxies and ports become references that the gateway turns into the real
thing. And what is meshgate's here arrives as Monarch's there. Nothing but the standard library, torchmonarch and
what the user's own objects need is asked of the far side.

What cannot be pickled raises ``UnpicklableArgument`` before anything is sent.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import cloudpickle
import cloudpickle.cloudpickle as by_value

from meshgate import standins
from meshgate.errors import ActorError, ClassNotImportable, InvalidRequestError, UnpicklableArgument
from meshgate.extent import Extent, Point
from meshgate.far_names import WORKER_NAMES, Deferred, deferred_call, module_on_worker, monarch
from meshgate.ndslice import Slice
from meshgate.old_code import renewed, text_of
from meshgate.refusals import Refusal, find_refusal
from meshgate.shape import Region, Shape
from meshgate.tensors import reduce_tensor
from meshgate.value_mesh import ValueMesh
from meshgate_wire import Sendable
from meshgate_wire.messages import Argument

__all__ = [
    "Buffer",
    "Pickled",
    "Resolve",
    "dump_class",
    "dumps",
    "dumps_call",
    "require_same_python",
    "travels_by_value",
]

Buffer: TypeAlias = bytes | memoryview
Resolve: TypeAlias = Callable[[object], Argument | None]

OUT_OF_BAND = 4096
COPIED_AT_ONCE = 1 << 20
# Puts a text where tracebacks look for source. No modification time: it is not compared with any file.
_QUOTABLE = (
    "text and __import__('linecache').cache.__setitem__("
    "filename, (len(text), None, text.splitlines(True), filename)) or None"
)
PROTOCOL = 5


@dataclass(frozen=True, slots=True)
class Pickled:
    """A pickle, the large buffers beside it in the order they are needed, and what its persistent ids stand for.

    ``code``: what travels as code rather than by name. Code runs only on the Python minor version it was made by.
    """

    data: bytes
    buffers: tuple[Sendable, ...] = ()
    arguments: tuple[Argument, ...] = ()
    code: tuple[str, ...] = ()


def dumps(value: object, resolve: Resolve | None = None) -> Pickled:
    """Pickles ``value`` for the workers.

    ``resolve(object)`` gives what stands for a proxy or a port, None for anything else; it is asked about every
    object that is not a plain number, text or container. Raises ``UnpicklableArgument``.
    """
    try:
        return _dump(value, resolve)
    except InvalidRequestError:  # resolve refuses, and says why
        raise
    except Exception as error:
        raise _explain(value, "the value", resolve, error) from error


def dumps_call(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    resolve: Resolve | None = None,
    *,
    called: str = "",
    parameters: Sequence[str] = (),
) -> Pickled:
    """Pickles ``(args, kwargs)``. ``called`` and ``parameters`` (names of the positional ones) are for the error."""
    try:
        return _dump((args, dict(kwargs)), resolve)
    except InvalidRequestError:  # resolve refuses, and says why
        raise
    except Exception as error:
        named = {_position(i, parameters): value for i, value in enumerate(args)}
        named |= {f"argument {name!r}": value for name, value in kwargs.items()}
        for name, value in named.items():
            if _fails(value, resolve):
                raise _explain(value, name, resolve, error, called) from error
        raise _explain((args, dict(kwargs)), "the arguments", resolve, error, called) from error


def _position(index: int, parameters: Sequence[str]) -> str:
    named = f"argument {parameters[index]!r} " if index < len(parameters) else "argument "
    return f"{named}(position {index})"


def dump_class(Class: type, by_value: bool) -> bytes:
    """Pickles an actor class: as code, or as its name. Raises ``ClassNotImportable`` or ``UnpicklableArgument``."""
    if not by_value:
        Class = renewed(Class)
        _require_importable(Class)
        return pickle.dumps(Class, PROTOCOL)
    try:
        return _dump(Class, None, with_source=True).data
    except Exception as error:
        name = f"class {Class.__module__}.{Class.__qualname__}"
        raise _explain(Class, name, None, error) from error


def _require_importable(Class: type) -> None:
    found: Any = sys.modules.get(Class.__module__)
    for part in Class.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not Class:
        raise ClassNotImportable(
            f"{Class.__qualname__} is not what module {Class.__module__!r} has under that name, so the workers cannot "
            "find it. Define it at the top level of a module of your project.",
            module=Class.__module__,
        )


def travels_by_value(thing: Any) -> bool:
    """Whether a class or function has no name that another process could import it by.

    So it is for what a script, a notebook or a prompt defines, for what is defined inside a function, and for
    modules that exist in memory only or were registered with ``cloudpickle.register_pickle_by_value``.
    """
    module = sys.modules.get(thing.__module__ or "")
    if module is None or module.__name__ == "__main__" or "<locals>" in thing.__qualname__:
        return True
    if getattr(module, "__file__", None) is None and getattr(module, "__spec__", None) is None:
        return True
    registered = cloudpickle.list_registry_pickle_by_value()
    return any(module.__name__ == name or module.__name__.startswith(f"{name}.") for name in registered)


def require_same_python(code: Sequence[str], python: str) -> None:
    """Raises ``UnpicklableArgument`` where ``code`` travels by value and the workers run another Python.

    ``python``: the workers' version, such as ``3.11`` or ``3.11.7``.
    """
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    there = ".".join(python.split(".")[:2])
    if code and here != there:
        raise UnpicklableArgument(
            f"{', '.join(code)} would travel as code, which only Python {here} can run; the workers run {there}. "
            "Define it in a module of your project, so that it travels by name, or use the workers' Python here.",
            argument=code[0],
        )


class _NeedsReferences(Exception):
    """The value holds a proxy, so persistent ids are needed after all."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles what holds no proxy; raises ``_NeedsReferences`` at the first one.

    A pickler with persistent ids asks about every single object, numbers too, which is many times slower.
    """

    def __init__(self, resolve: Resolve | None, with_source: bool = False) -> None:
        self.file = io.BytesIO()
        self._sources: dict[str, Deferred] | None = {} if with_source else None
        self.buffers: list[Sendable] = []
        self.arguments: list[Argument] = []
        self.code: dict[str, None] = {}
        self._resolve = resolve
        # Not a method of this object: that would keep the buffers until a garbage collection.
        super().__init__(self.file, protocol=PROTOCOL, buffer_callback=functools.partial(_in_band, self.buffers))

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        rule = _RULES.get(kind)
        if rule is not None:
            return rule(obj)
        if isinstance(obj, (type, types.FunctionType)):
            return self._named(obj)
        if isinstance(obj, types.ModuleType):
            return module_on_worker(obj) or NotImplemented
        if self._resolve is not None and self._resolve(obj) is not None:
            raise _NeedsReferences
        if kind.__name__ == "Tensor" and kind.__module__ == "torch":
            return reduce_tensor(obj) or NotImplemented
        return NotImplemented

    def _named(self, obj: Any) -> Any:
        """A class or function: Monarch's own instead of ours, code instead of a name nobody could import."""
        module = obj.__module__ or ""
        if module.startswith("meshgate.") and WORKER_NAMES.get(obj.__name__):
            return monarch(obj.__name__).__reduce__()
        if obj.__module__ == "builtins" or not travels_by_value(obj):
            return super().reducer_override(obj)
        self.code[f"{obj.__module__}.{obj.__qualname__}"] = None
        if isinstance(obj, type):
            return by_value._dynamic_class_reduce(obj)
        reduced = self._dynamic_function_reduce(obj)
        source = self._source(obj.__code__.co_filename)
        if source is not None:
            reduced[2][1]["__globals__"]["__loader__"] = source
        return reduced

    def _source(self, filename: str) -> Deferred | None:
        """Lets tracebacks on the worker quote code that is in no file there, or in one that is another by now."""
        if self._sources is None:
            return None
        if filename not in self._sources:
            names = {"filename": filename, "text": text_of(filename)}
            self._sources[filename] = Deferred(eval, _QUOTABLE, names)
        return self._sources[filename]


class _ReferencePickler(_Pickler):
    """Pickles what holds proxies too."""

    def __init__(self, resolve: Resolve) -> None:
        self._ids: dict[int, int] = {}
        self._held: list[object] = []  # keeps the ids in _ids valid
        self._ask = resolve
        super().__init__(None)

    def persistent_id(self, obj: object) -> int | None:
        known = self._ids.get(id(obj))
        if known is not None:
            return known
        if isinstance(obj, (type, types.FunctionType, types.ModuleType)):
            return None
        argument = self._ask(obj)
        if argument is None:
            return None
        self.arguments.append(argument)
        self._held.append(obj)
        self._ids[id(obj)] = len(self.arguments) - 1
        return len(self.arguments) - 1


def _in_band(beside: list[Sendable], buffer: pickle.PickleBuffer) -> bool:
    """Whether ``buffer`` goes into the pickle; otherwise it is put ``beside`` it."""
    view = buffer.raw()
    if view.nbytes < OUT_OF_BAND:
        return True
    beside.append(view if type(view.obj) is bytes else _copy(view))
    return False


def _copy(view: memoryview) -> Sendable:
    """In pieces: a copy of gigabytes in one would keep every other thread from running."""
    if view.nbytes <= COPIED_AT_ONCE:
        return bytes(view)
    pieces = []
    for at in range(0, view.nbytes, COPIED_AT_ONCE):
        pieces.append(bytes(view[at : at + COPIED_AT_ONCE]))
        time.sleep(0)  # lets go of the interpreter: who waits for it would otherwise wait 5 ms each time
    return pieces


def _dump(value: object, resolve: Resolve | None, with_source: bool = False) -> Pickled:
    pickler = _Pickler(resolve, with_source)
    try:
        pickler.dump(value)
    except _NeedsReferences:
        assert resolve is not None
        pickler = _ReferencePickler(resolve)
        pickler.dump(value)
    return Pickled(pickler.file.getvalue(), tuple(pickler.buffers), tuple(pickler.arguments), tuple(pickler.code))


def _fails(value: object, resolve: Resolve | None) -> Exception | None:
    try:
        _dump(value, resolve)
    except Exception as error:  # noqa: BLE001 (whatever a user's __reduce__ raises)
        return error
    return None


def _explain(
    value: object, name: str, resolve: Resolve | None, error: Exception, called: str = ""
) -> UnpicklableArgument:
    refusal = find_refusal(value, lambda part: _fails(part, resolve)) or Refusal("", value, error)
    inside = f": the {type(refusal.value).__qualname__} at {refusal.path} in it refuses" if refusal.path else ""
    of = f" of {called}" if called else ""
    return UnpicklableArgument(
        f"{name}{of} cannot travel to the workers{inside}: {refusal.error}. Nothing was sent. "
        "Pass what it is made from instead, and make it on the worker.",
        argument=name,
        path=refusal.path,
    )


# --- what is meshgate's here and Monarch's there -----------------------------------------------------------


def _reduce_slice(ranks: Slice) -> tuple[Any, ...]:
    return deferred_call(monarch("Slice"), offset=ranks.offset, sizes=ranks.sizes, strides=ranks.strides)


def _reduce_endpoint(found: standins.EndpointProperty[..., Any]) -> tuple[Any, ...]:
    mark = monarch("concurrent_endpoint" if found._concurrent else "endpoint")
    return deferred_call(
        mark,
        found._method,
        propagate=found._propagator,
        explicit_response_port=found._explicit_response_port,
        instrument=found._instrument,
    )


def _reduce_actor_error(error: ActorError) -> tuple[Any, ...]:
    state = {"exception_formatted": error.exception_formatted}
    return monarch("ActorError"), (error.exception, error.message), state


_RULES: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    ActorError: _reduce_actor_error,
    Extent: lambda extent: (monarch("Extent"), (extent.labels, extent.sizes)),
    Point: lambda point: (monarch("Point"), (point.rank, point.extent)),
    Region: lambda region: (monarch("Region"), (region.labels, region.slice())),
    Shape: lambda shape: (monarch("Shape"), (shape.labels, shape.ndslice)),
    Slice: _reduce_slice,
    ValueMesh: lambda mesh: (monarch("ValueMesh"), (mesh._shape, list(mesh.values()))),
    standins.EndpointProperty: _reduce_endpoint,
}
