"""What comes from the workers: values, exceptions, meshes and ports.

Monarch's worker pickles a result as if Monarch were to open it. Here its names mean something else (see
``monarch_names``): its shapes and ``ValueMesh`` become ours, its meshes and ports become proxies. A name that the
laptop cannot import raises ``UnreadableResult`` with the module's name, except in errors: an error is always told,
with a likeness of its exception where the exception itself cannot be had.
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

from meshgate.actors import MonarchActorError
from meshgate.errors import ActorError, UnreadableResult
from meshgate.failures import Raised
from meshgate.likeness import Likeness, likeness_of
from meshgate.monarch_names import MEANINGS, PortAddress, absent
from meshgate.shape import Region, Shape
from meshgate_wire import Fragments, FragmentsFile

__all__ = ["MakeProxy", "MeshHandle", "loads", "loads_raised"]

Data: TypeAlias = bytes | bytearray | memoryview | Fragments


@dataclass(frozen=True, slots=True)
class MeshHandle:
    """A mesh that the gateway holds for this session, by the (negative) number it gave it."""

    object: int


class MakeProxy(Protocol):
    """Makes proxies of the meshes and ports that an endpoint returned; the client's dispatch implements it."""

    def hosts(self, handle: MeshHandle, region: Region) -> Any: ...

    def procs(self, handle: MeshHandle, hosts: Any, region: Region, root: Region) -> Any: ...

    def actors(self, handle: MeshHandle, Class: type, name: str, shape: Shape, procs: Any | None) -> Any: ...

    def port(self, address: str, rank: int | None, once: bool) -> Any: ...


def loads(
    data: Data, *, objects: Sequence[int] = (), make_proxy: MakeProxy | None = None, same_python: bool = True
) -> Any:
    """The value that a worker pickled. ``objects``: the numbers of the meshes that it pops, in order.

    ``same_python``: whether the workers run this Python minor version. Where not, a function that came as code
    raises when it is called, rather than running code of another version. Raises ``UnreadableResult``.
    """
    try:
        return _Unpickler(data, objects, make_proxy, same_python).load()
    except UnreadableResult:
        raise
    except Exception as error:
        raise UnreadableResult(f"the result cannot be read here: {type(error).__name__}: {error}") from error


def loads_raised(
    data: Data, *, objects: Sequence[int] = (), make_proxy: MakeProxy | None = None, same_python: bool = True
) -> Raised:
    """What an endpoint raised. Never raises: what cannot be read is told in ``message``."""
    try:
        return _raised(_LenientUnpickler(data, objects, make_proxy, same_python).load())
    except Exception as error:  # noqa: BLE001 (whatever the constructor of a user's exception raises)
        try:
            return _raised(_LikenessUnpickler(_file(data)).load())
        except Exception:  # noqa: BLE001
            return Raised(None, f"A remote call failed, and its error cannot be read here: {error}", "")


def _raised(value: Any) -> Raised:
    if not isinstance(value, BaseException):
        return Raised(None, f"A remote call failed with {value!r}.", "")
    if not isinstance(value, MonarchActorError):
        return Raised(value, "A remote actor call has failed.", ActorError(value).exception_formatted)
    facts = value.__dict__
    exception = _revived(facts.get("exception"))
    return Raised(exception, str(facts.get("message", "")), str(facts.get("exception_formatted", "")))


def _revived(exception: object) -> BaseException | None:
    """The likeness of a built-in exception is made the real one, where it can be."""
    if isinstance(exception, Likeness) and type(exception).__module__ == "builtins":
        kind = getattr(builtins, type(exception).__name__, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(*exception.args)
            except Exception:  # noqa: BLE001 (its arguments are likenesses too)
                return exception
    if exception is None or isinstance(exception, BaseException):
        return exception
    return Likeness(exception)


class _ForeignCode:
    """The code of a function of another Python version, of which only the name is looked at."""

    def __init__(self, *args: Any) -> None:
        self.co_name = str(args[11]) if len(args) > 11 else "<unknown>"


class _ForeignFunction:
    """A function that cannot run here, and says so when it is called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: object, **__: object) -> Any:
        raise UnreadableResult(
            f"function {self.__name__} came as code of another Python version and cannot run here. "
            "Define it in a module of your project, so that it travels by name."
        )


def _file(data: Data) -> io.BytesIO | FragmentsFile:
    if not isinstance(data, Fragments):
        return io.BytesIO(data)
    return io.BytesIO(data.join()) if len(data.fragments) == 1 else data.open()


def _made(make: Callable[..., Any], *args: Any) -> Any:
    return make(*args)


# What these names mean is a method of the unpickler.
_OWN = {
    ("monarch._rust_bindings.monarch_hyperactor.pickle", "pop_mesh_reference"): "_pop",
    ("monarch._src.actor.host_mesh", "HostMesh"): "_hosts",
    ("monarch._src.actor.proc_mesh", "ProcMesh"): "_procs",
    ("monarch._src.actor.actor_mesh", "ActorMesh"): "_actors",
    ("cloudpickle.cloudpickle", "_builtin_type"): "_builtin_type",
    ("cloudpickle.cloudpickle", "_make_function"): "_make_function",
    ("cloudpickle.cloudpickle", "_function_setstate"): "_function_setstate",
    ("cloudpickle.cloudpickle", "_make_skeleton_class"): "_make_class",
    ("cloudpickle.cloudpickle", "_make_skeleton_enum"): "_make_enum",
    ("cloudpickle.cloudpickle", "_class_setstate"): "_class_setstate",
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: Data, objects: Sequence[int], make_proxy: MakeProxy | None, same_python: bool) -> None:
        super().__init__(_file(data))
        self._objects = iter(objects)
        self._make = make_proxy
        self._same_python = same_python
        self._known_classes: set[type] = set()

    def find_class(self, module: str, name: str, /) -> Any:
        own = _OWN.get((module, name))
        if own is not None:
            return getattr(self, own)
        meaning = MEANINGS.get((module, name))
        if meaning is not None:
            return meaning
        try:
            return super().find_class(module, name)
        except Exception as error:  # noqa: BLE001 (a module may raise anything while it is imported)
            return self._missing(module, name, error)

    def _missing(self, module: str, name: str, error: Exception) -> Any:
        if module.partition(".")[0] == "monarch":
            return absent(module, name)
        if name.endswith(("Error", "Exception", "Warning", "Interrupt", "Exit", "Timeout")):
            return likeness_of(module, name)
        raise UnreadableResult(
            f"the result holds a {module}.{name}, and this machine cannot import it: "
            f"{type(error).__name__}: {error}. Module {module!r} must be importable on the laptop too, "
            "or the endpoint return something else.",
            module=module,
        ) from error

    # --- meshes and ports --------------------------------------------------------------------------------

    def _proxies(self) -> MakeProxy:
        if self._make is None:
            raise UnreadableResult("a mesh or port has no meaning here")
        return self._make

    def _pop(self) -> MeshHandle:
        number = next(self._objects, None)
        if number is None:
            raise UnreadableResult("the result names more meshes than the gateway sent")
        return MeshHandle(number)

    def _hosts(self, handle: MeshHandle, region: Region, *_: object) -> Any:
        return self._proxies().hosts(handle, region)

    def _procs(self, handle: MeshHandle, hosts: Any, region: Region, root: Region, *_: object) -> Any:
        return self._proxies().procs(handle, hosts, region, root)

    def _actors(self, Class: type, name: str, handle: MeshHandle, shape: Shape, procs: Any) -> Any:
        return self._proxies().actors(handle, Class, name, shape, procs)

    def _port(self, port: PortAddress, rank: int | None) -> Any:
        return self._proxies().port(port.address, rank, port.once)

    # --- what came as code -------------------------------------------------------------------------------

    def _builtin_type(self, name: str) -> Any:
        if name == "CodeType" and not self._same_python:
            return _ForeignCode
        return by_value._builtin_type(name)

    def _make_function(self, code: Any, namespace: dict[str, Any], *args: Any) -> Any:
        module = str(namespace.get("__name__", ""))
        if module.startswith("monarch._src."):  # functions that Monarch pickles as code
            if code.co_name in ("_from_initialized_hy_host_mesh", "_from_initialized_hy_proc_mesh"):
                return _made
            if code.co_name == "_reconstruct_port":
                return self._port
        if isinstance(code, _ForeignCode):
            return _ForeignFunction(f"{module}.{code.co_name}")
        return by_value._make_function(code, namespace, *args)

    def _function_setstate(self, function: Any, state: Any) -> Any:
        if isinstance(function, types.FunctionType):
            by_value._function_setstate(function, state)
        return function

    def _make_class(self, metaclass: Any, name: str, bases: Any, facts: Any, tracker: Any, extra: Any) -> Any:
        """The class itself where it came from here, untouched: cloudpickle would overwrite its methods."""
        return self._own_class(tracker) or by_value._make_skeleton_class(metaclass, name, bases, facts, tracker, extra)

    def _make_enum(
        self, bases: Any, name: str, qualname: str, members: Any, module: str, tracker: Any, extra: Any
    ) -> Any:
        return self._own_class(tracker) or by_value._make_skeleton_enum(
            bases, name, qualname, members, module, tracker, extra
        )

    def _own_class(self, tracker: str | None) -> type | None:
        known: type | None = by_value._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
        if known is not None:
            self._known_classes.add(known)
        return known

    def _class_setstate(self, kind: type, state: Any) -> type:
        if kind not in self._known_classes:
            by_value._class_setstate(kind, state)
        return kind


class _LenientUnpickler(_Unpickler):
    """Whatever is missing becomes a likeness of it."""

    def _missing(self, module: str, name: str, error: Exception) -> Any:
        return likeness_of(module, name)

    def _make_class(self, metaclass: Any, name: str, bases: Any, facts: Any, tracker: Any, extra: Any) -> Any:
        """An exception's class whose methods cannot run here could not even be printed: a likeness can."""
        if self._same_python or self._own_class(tracker) is not None:
            return super()._make_class(metaclass, name, bases, facts, tracker, extra)
        likeness = likeness_of(str(facts.get("__module__", "__main__")), name)
        self._known_classes.add(likeness)
        return likeness


class _LikenessUnpickler(pickle.Unpickler):
    """Imports and runs nothing of the user's: all but ``ActorError`` itself becomes likenesses."""

    def find_class(self, module: str, name: str, /) -> Any:
        if name == "ActorError" and module == "monarch._src.actor.actor_mesh":
            return ActorError
        if name == "_make_skeleton_class":
            return self._class
        return likeness_of(module, name)

    @staticmethod
    def _class(metaclass: Any, name: str, bases: Any, facts: Any, *_: object) -> type:
        return likeness_of(str(facts.get("__module__", "__main__")), name)
