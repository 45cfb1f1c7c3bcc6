"""Unpickling of what workers send: values, exceptions, meshes and ports.

Workers pickle results for a reader that has Monarch. Here its shapes and ``ValueMesh`` become meshgate's (see
``monarch_names``), its meshes and ports become proxies. A name that cannot be imported raises ``UnreadableResult``,
which names the module. Exceptions can always be read: a stand-in replaces one whose class cannot be imported.

Monarch pickles some of its functions by value. They are recognized by name, so that meshes and ports can be read
whatever Python version the workers run.

A worker can make the laptop run code while it unpickles a result. With ``data_only`` it cannot: names for which
``is_data_type`` is false raise ``UnreadableResult``, and neither functions nor classes arrive by value.
"""

from __future__ import annotations

import builtins
import io
import pickle
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import cloudpickle.cloudpickle as by_value

from meshgate.actors.api import MonarchActorError
from meshgate.errors import ActorError, UnreadableResult
from meshgate.serialization.monarch_names import (
    AS_DATA,
    LOCAL_EQUIVALENTS,
    ExceptionStandIn,
    PortAddress,
    is_data_type,
    is_of_workers,
    stand_in_for,
    unavailable_type,
    worker_object_type,
)
from meshgate.shapes.shape import Region, Shape
from meshgate_wire import Fragments, FragmentsFile
from meshgate_wire.fields import shorten

MAX_REPORT = 262_144  # characters of a traceback: users read it, and it is searched several times for the user's frames
Data: TypeAlias = bytes | bytearray | memoryview | Fragments


@dataclass(frozen=True, slots=True)
class MeshHandle:
    """A mesh of workers: one that the gateway holds for this session, by the (negative) number that the gateway chose,
    or the bytes of Monarch's ``reference`` to it, which an actor sent through a port."""

    object: int = 0
    reference: bytes = b""


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """What a pickle of a worker may do here.

    ``same_python``: whether the workers run this Python minor version; if not, a function pickled by value raises when
    it is called, instead of running foreign bytecode. ``data_only``: whether it may contain data types only.
    """

    same_python: bool = True
    data_only: bool = False

    @property
    def bytecode(self) -> bool:
        """Whether functions may arrive by value."""
        return self.same_python and not self.data_only


DEFAULT_RULES = ReadingRules()


@dataclass(frozen=True, slots=True)
class RemoteException:
    """What a worker pickled when an endpoint raised. ``exception`` is None if it cannot be unpickled here.

    ``sent``: an actor sent the exception itself through a port, so it is raised itself and not inside an
    ``ActorError``. False if its class cannot be imported here.
    """

    exception: BaseException | None
    message: str
    exception_formatted: str
    sent: bool = False

    def exception_to_raise(self) -> Exception | None:
        """The exception that an actor sent through a port; None if an endpoint raised it."""
        return self.exception if self.sent and isinstance(self.exception, Exception) else None


class MakeProxy(Protocol):
    """Makes proxies of the meshes, ports and references to kept values that an endpoint returned."""

    def hosts(self, handle: MeshHandle, region: Region) -> Any: ...

    def procs(self, handle: MeshHandle, hosts: Any, region: Region, root: Region) -> Any: ...

    def actors(self, handle: MeshHandle, Class: type, name: str, shape: Shape, procs: Any | None) -> Any: ...

    def port(self, address: str, rank: int | None, once: bool) -> Any: ...

    def kept(self, number: int, rank: int, label: str) -> Any: ...


def loads(
    data: Data,
    *,
    objects: Sequence[int] = (),
    make_proxy: MakeProxy | None = None,
    rules: ReadingRules = DEFAULT_RULES,
) -> Any:
    """The value that a worker pickled. Raises ``UnreadableResult``.

    ``objects``: the numbers of the meshes in it, in order.
    """
    try:
        return _Unpickler(data, objects, make_proxy, rules).load()
    except UnreadableResult:
        raise
    except Exception as error:
        raise UnreadableResult(
            f"cannot unpickle the result: {type(error).__name__}: {str(error).rstrip('.')}. If the workers have other "
            "versions of its packages, install these here; else return numbers, strings, containers or arrays"
        ) from error


def loads_exception(
    data: Data,
    *,
    objects: Sequence[int] = (),
    make_proxy: MakeProxy | None = None,
    rules: ReadingRules = DEFAULT_RULES,
) -> RemoteException:
    """The exception that an endpoint raised or sent. Never raises: ``message`` says why one cannot be read."""
    try:
        return _raised(_LenientUnpickler(data, objects, make_proxy, rules).load())
    except Exception as error:  # noqa: BLE001 (a user's constructor may raise anything)
        try:
            return _raised(_StandInUnpickler(_file(data)).load())
        except Exception:  # noqa: BLE001
            return RemoteException(None, f"A remote call failed, and its exception cannot be unpickled: {error}", "")


def _raised(value: Any) -> RemoteException:
    if not isinstance(value, BaseException):
        return RemoteException(None, f"A remote call failed with {value!r}.", "")
    if not isinstance(value, MonarchActorError):
        exception = _restore_builtin(value)
        sent = not isinstance(exception, ExceptionStandIn)
        formatted = shorten(ActorError(exception).exception_formatted, MAX_REPORT)
        return RemoteException(exception, "A remote actor call has failed.", formatted, sent)
    facts = value.__dict__
    exception = _restore_builtin(facts.get("exception"))
    message, formatted = (str(facts.get(name, "")) for name in ("message", "exception_formatted"))
    return RemoteException(exception, shorten(message, MAX_REPORT), shorten(formatted, MAX_REPORT))


def _restore_builtin(exception: object) -> BaseException | None:
    """Replaces the stand-in of a built-in exception by the exception, if its arguments allow it."""
    if isinstance(exception, ExceptionStandIn) and type(exception).__module__ == "builtins":
        kind = getattr(builtins, type(exception).__name__, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(*exception.args)
            except Exception:  # noqa: BLE001 (its arguments may be stand-ins too)
                return exception
    if exception is None or isinstance(exception, BaseException):
        return exception
    return ExceptionStandIn(exception)


class _ForeignCode:
    """The bytecode of a function of another Python version; only its name is read."""

    def __init__(self, *args: Any) -> None:
        self.co_name = str(args[11]) if len(args) > 11 else "<unknown>"


class _ForeignFunction:
    """A function whose bytecode must not run here; raises ``UnreadableResult`` when it is called."""

    def __init__(self, name: str, rules: ReadingRules) -> None:
        self.__name__ = name
        self._rules = rules

    def __call__(self, *_: object, **__: object) -> Any:
        if self._rules.data_only:
            raise UnreadableResult(
                f"cannot call {self.__name__}: it was pickled by value, as code, and this process reads data only "
                "(MESHGATE_RESULTS=data)"
            )
        raise UnreadableResult(
            f"cannot call {self.__name__}: it was pickled by value, as bytecode of another Python version. "
            "Define it in a module of your project, so that it is imported by name."
        )


def _file(data: Data) -> io.BytesIO | FragmentsFile:
    if not isinstance(data, Fragments):
        return io.BytesIO(data)
    return io.BytesIO(data.join()) if len(data.fragments) == 1 else data.open()


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


# Names that are methods of the unpickler.
_METHODS = {
    ("monarch._rust_bindings.monarch_hyperactor.pickle", "pop_mesh_reference"): "_pop",
    ("monarch._rust_bindings.monarch_hyperactor.host_mesh", "py_host_mesh_from_bytes"): "_reference",
    ("monarch._rust_bindings.monarch_hyperactor.proc_mesh", "py_proc_mesh_from_bytes"): "_reference",
    ("monarch._rust_bindings.monarch_hyperactor.actor_mesh", "py_actor_mesh_from_bytes"): "_reference",
    ("monarch._src.actor.host_mesh", "HostMesh"): "_hosts",
    ("monarch._src.actor.proc_mesh", "ProcMesh"): "_procs",
    ("monarch._src.actor.actor_mesh", "ActorMesh"): "_actors",
    ("_meshgate_kept", "KeptRef"): "_kept",
    ("cloudpickle.cloudpickle", "_builtin_type"): "_builtin_type",
    ("cloudpickle.cloudpickle", "_make_function"): "_make_function",
    ("cloudpickle.cloudpickle", "_function_setstate"): "_function_setstate",
    ("cloudpickle.cloudpickle", "_make_skeleton_class"): "_make_class",
    ("cloudpickle.cloudpickle", "_make_skeleton_enum"): "_make_enum",
    ("cloudpickle.cloudpickle", "_class_setstate"): "_class_setstate",
}

_CLASSES_BY_VALUE = frozenset({"_make_skeleton_class", "_make_skeleton_enum", "_class_setstate"})
_PARTS_OF_FUNCTIONS = frozenset({"_make_cell", "_make_empty_cell", "subimport", "_cell_set"})


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: Data, objects: Sequence[int], make_proxy: MakeProxy | None, rules: ReadingRules) -> None:
        super().__init__(_file(data))
        self._objects = iter(objects)
        self._make = make_proxy
        self._rules = rules
        self._local_classes: set[type] = set()

    def find_class(self, module: str, name: str, /) -> Any:
        if is_of_workers(module):
            return worker_object_type(module, name)
        if self._rules.data_only and not is_data_type(module, name):
            return self._find_without_running_code(module, name)
        method = _METHODS.get((module, name))
        if method is not None:
            return getattr(self, method)
        equivalent = LOCAL_EQUIVALENTS.get((module, name))
        if equivalent is not None:
            return equivalent
        try:
            return super().find_class(module, name)
        except Exception as error:  # noqa: BLE001 (an import may raise anything)
            return self._missing(module, name, error)

    def _find_without_running_code(self, module: str, name: str) -> Any:
        """What stands for a name other than a data type: a proxy, a type of meshgate, or a type without use here."""
        if (module, name) in _METHODS and name not in _CLASSES_BY_VALUE:
            return getattr(self, _METHODS[module, name])
        equivalent = self._constructor if (module, name) == ("builtins", "getattr") else None
        if equivalent or (equivalent := AS_DATA.get((module, name)) or LOCAL_EQUIVALENTS.get((module, name))):
            return equivalent
        if module.partition(".")[0] == "monarch":
            return unavailable_type(module, name)
        if module == "cloudpickle.cloudpickle" and name in _PARTS_OF_FUNCTIONS:
            return self._uncallable(name)
        return self._refused(module, name)

    def _uncallable(self, name: str) -> Callable[..., _ForeignFunction]:
        """Makes what stands for a part of a function that must not run here."""
        return lambda *_: _ForeignFunction(name, self._rules)

    def _constructor(self, owner: Any, name: str) -> Any:
        """``getattr`` for the alternative constructors of Monarch's types, by which they are pickled."""
        if name.startswith("from_") and any(owner is each for each in LOCAL_EQUIVALENTS.values()):
            return getattr(owner, name)
        return self._refused("builtins", "getattr")

    def _refused(self, module: str, name: str) -> Any:
        raise UnreadableResult(
            f"the result contains {module}.{name}, which is not a data type, and this process reads data only "
            "(MESHGATE_RESULTS=data). Return numbers, strings, containers, arrays or tensors; or leave "
            "MESHGATE_RESULTS unset if you trust the workers with this machine.",
            module=module,
        )

    def _missing(self, module: str, name: str, error: Exception) -> Any:
        if module.partition(".")[0] == "monarch":
            return unavailable_type(module, name)
        if name.endswith(("Error", "Exception", "Warning", "Interrupt", "Exit", "Timeout")):
            return stand_in_for(module, name)
        raise UnreadableResult(
            f"the result contains a {module}.{name}, which this machine cannot import: "
            f"{type(error).__name__}: {str(error).rstrip('.')}. Make module {module!r} importable here, or return "
            "something else.",
            module=module,
        ) from error

    # --- meshes and ports --------------------------------------------------------------------------------

    def _proxies(self) -> MakeProxy:
        if self._make is None:
            raise UnreadableResult(
                "the value contains a mesh or a port, which is supported in results of endpoints only"
            )
        return self._make

    def _pop(self) -> MeshHandle:
        number = next(self._objects, None)
        if number is None:
            raise UnreadableResult("the result contains more meshes than the gateway announced; please report this")
        return MeshHandle(number)

    def _reference(self, data: bytes) -> MeshHandle:
        return MeshHandle(reference=bytes(data))

    def _hosts(self, handle: MeshHandle, region: Region, *_: object) -> Any:
        return self._proxies().hosts(handle, region)

    def _procs(self, handle: MeshHandle, hosts: Any, region: Region, root: Region, *_: object) -> Any:
        return self._proxies().procs(handle, hosts, region, root)

    def _actors(self, Class: type, name: str, handle: MeshHandle, shape: Shape, procs: Any) -> Any:
        return self._proxies().actors(handle, Class, name, shape, procs)

    def _port(self, port: PortAddress, rank: int | None) -> Any:
        return self._proxies().port(port.address, rank, port.once)

    def _kept(self, number: int, position: int, rank: int, label: str, passed: object = None) -> Any:
        return self._proxies().kept(number, rank, label)

    # --- functions and classes pickled by value ----------------------------------------------------------

    def _builtin_type(self, name: str) -> Any:
        if name == "CodeType" and not self._rules.bytecode:
            return _ForeignCode
        if self._rules.data_only and name != "MethodType":  # of a function that arrived in the same way
            return self._refused("types", name)
        return by_value._builtin_type(name)

    def _make_function(self, code: Any, namespace: dict[str, Any], *args: Any) -> Any:
        module = str(namespace.get("__name__", ""))
        if module.startswith("monarch._src."):  # functions that Monarch pickles by value
            if code.co_name in ("_from_initialized_hy_host_mesh", "_from_initialized_hy_proc_mesh"):
                return _call
            if code.co_name == "_reconstruct_port":
                return self._port
        if isinstance(code, _ForeignCode):
            return _ForeignFunction(f"{module}.{code.co_name}", self._rules)
        return by_value._make_function(code, namespace, *args)

    def _function_setstate(self, function: Any, state: Any) -> Any:
        if isinstance(function, types.FunctionType):
            by_value._function_setstate(function, state)
        return function

    def _make_class(self, metaclass: Any, name: str, bases: Any, facts: Any, tracker: Any, extra: Any) -> Any:
        """The original class, unchanged, if this process sent it: cloudpickle would overwrite its methods."""
        return self._local_class(tracker) or by_value._make_skeleton_class(
            metaclass, name, bases, facts, tracker, extra
        )

    def _make_enum(
        self, bases: Any, name: str, qualname: str, members: Any, module: str, tracker: Any, extra: Any
    ) -> Any:
        return self._local_class(tracker) or by_value._make_skeleton_enum(
            bases, name, qualname, members, module, tracker, extra
        )

    def _local_class(self, tracker: str | None) -> type | None:
        known: type | None = by_value._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
        if known is not None:
            self._local_classes.add(known)
        return known

    def _class_setstate(self, kind: type, state: Any) -> type:
        if kind not in self._local_classes:
            by_value._class_setstate(kind, state)
        return kind


class _LenientUnpickler(_Unpickler):
    """Replaces whatever is missing by a stand-in."""

    def _missing(self, module: str, name: str, error: Exception) -> Any:
        return stand_in_for(module, name)

    def _refused(self, module: str, name: str) -> Any:
        return self._stand_in_class if name == "_make_skeleton_class" else stand_in_for(module, name)

    @staticmethod
    def _stand_in_class(metaclass: Any, name: str, bases: Any, facts: Any, *_: object) -> type:
        return stand_in_for(str(facts.get("__module__", "__main__")), name)

    def _make_class(self, metaclass: Any, name: str, bases: Any, facts: Any, tracker: Any, extra: Any) -> Any:
        """A stand-in for a class whose bytecode cannot run here: unlike the class, it can be printed."""
        if self._rules.same_python or self._local_class(tracker) is not None:
            return super()._make_class(metaclass, name, bases, facts, tracker, extra)
        stand_in = stand_in_for(str(facts.get("__module__", "__main__")), name)
        self._local_classes.add(stand_in)
        return stand_in


class _StandInUnpickler(pickle.Unpickler):
    """Imports and runs no user code: everything but ``ActorError`` becomes a stand-in."""

    def find_class(self, module: str, name: str, /) -> Any:
        if name == "ActorError" and module == "monarch._src.actor.actor_mesh":
            return ActorError
        if name == "_make_skeleton_class":
            return self._class
        return stand_in_for(module, name)

    @staticmethod
    def _class(metaclass: Any, name: str, bases: Any, facts: Any, *_: object) -> type:
        return stand_in_for(str(facts.get("__module__", "__main__")), name)
