"""Code objects and generated classes in a form that does not depend on the Python version.

Bytecode runs on one minor version of Python only. For workers with another one, a code object is sent as the text of
its file and its place in it, and compiled there; nothing of the file is executed. Everything else of a function or
class (its globals, its closure, its attributes) is pickled as always. Methods that ``dataclass`` and ``namedtuple``
generate have no file; such classes are generated again on the worker.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeAlias

import cloudpickle.cloudpickle as by_value

from meshgate.errors import UnpicklableArgument
from meshgate.serialization.stale_source import parse_source, source_text
from meshgate.serialization.worker_expressions import WorkerExpression

WorkerPython: TypeAlias = Callable[[], str]
"""Returns the Python version of the workers, such as ``3.11`` or ``3.11.7``. May wait for the gateway."""
_HERE = sys.version_info[:2]


class CodeWithoutSource(UnpicklableArgument):
    """Code cannot be sent to workers with another version of Python."""


def same_python() -> str:
    return f"{_HERE[0]}.{_HERE[1]}"


def code_as_source(worker_python: str) -> CodeAsSource | None:
    """How to send code to workers with this version of Python; None if they can run this process's bytecode."""
    major, minor = worker_python.split(".")[:2]
    there = (int(major), int(minor))
    return None if there == _HERE else CodeAsSource(there)


def _find_code(text: str, filename: str, name: str, line: int, index: int, free: tuple[str, ...]) -> types.CodeType:
    """Runs on the worker: the code object of this name and line, the one at ``index`` if there are several."""
    import sys  # noqa: PLC0415 - the source of this function is sent alone
    import types  # noqa: PLC0415

    compiled = sys.modules.setdefault("_meshgate_compiled", types.ModuleType("_meshgate_compiled")).__dict__
    top = compiled.get(text)
    if top is None:
        top = compiled[text] = compile(text, filename, "exec", dont_inherit=True)
    found, waiting = [], [top]
    while waiting:
        code = waiting.pop(0)
        waiting.extend(each for each in code.co_consts if isinstance(each, types.CodeType))
        if (code.co_name, code.co_firstlineno) == (name, line):
            found.append(code)
    if index >= len(found) or found[index].co_freevars != free:
        version = ".".join(map(str, sys.version_info[:2]))
        raise TypeError(f"Python {version} compiles {name} ({filename}, line {line}) differently than the driver's")
    return found[index]


_FIND = "(exec('from __future__ import annotations\\n' + code), _find_code(*place))[1]"


def _regenerate(Class: Any, state: Any, set_state: Any, fields: Any, options: Any) -> None:
    """Runs on the worker: fills the skeleton of a dataclass, and lets ``dataclass`` generate the methods again."""
    import dataclasses  # noqa: PLC0415 - the source of this function is sent alone

    set_state(Class, state)
    for name, arguments in fields.items():
        setattr(Class, name, dataclasses.field(**arguments))
    dataclasses.dataclass(**options)(Class)


_REGENERATE = "(exec('from __future__ import annotations\\n' + code), functools.partial(_regenerate, **given))[1]"
_FIELD_OPTIONS = ("default", "default_factory", "init", "repr", "hash", "compare", "metadata", "kw_only")
_CLASS_OPTIONS = ("init", "repr", "eq", "order", "unsafe_hash", "frozen", "match_args", "kw_only")


class CodeAsSource:
    """Reduces the code of one pickle for workers with Python ``version``."""

    def __init__(self, version: tuple[int, int]) -> None:
        self._version = version

    def reduce_code(self, code: types.CodeType) -> tuple[Any, ...]:
        """A reduction of ``code`` to its source. Raises UnpicklableArgument if there is none."""
        text = source_text(code.co_filename)
        if not text:
            raise self._error(code, f"the source of {code.co_filename} is not available")
        index = self._index(code, text)
        place = (text, code.co_filename, code.co_name, code.co_firstlineno, index, code.co_freevars)
        return eval, (_FIND, {"code": inspect.getsource(_find_code), "place": place})

    def _index(self, code: types.CodeType, text: str) -> int:
        """The index of ``code`` among those of its name and line in ``text``."""
        try:
            known = _candidates(text, code.co_filename, self._version)
        except SyntaxError as error:
            raise self._error(code, f"they cannot compile {code.co_filename}: {error}") from None
        candidates = known.get((code.co_name, code.co_firstlineno), [])
        if code in candidates:
            return candidates.index(code)
        raise self._error(code, f"{code.co_filename} has changed since this program loaded it")

    def _error(self, code: types.CodeType, reason: str) -> CodeWithoutSource:
        return CodeWithoutSource(
            f"cannot send {code.co_name}, line {code.co_firstlineno} of {code.co_filename}: its bytecode runs on "
            f"Python {same_python()} only, the workers run {self._version[0]}.{self._version[1]}, and {reason}. Define "
            "it in a module of your project, so that workers import it by name, or use their Python version.",
            argument=code.co_name,
        )

    def reduce_class(self, Class: type) -> tuple[Any, ...] | None:
        """A reduction of a class with generated methods; None for any other class."""
        if "__dataclass_params__" in Class.__dict__:
            return _reduce_dataclass(Class)
        if issubclass(Class, tuple) and "_field_defaults" in Class.__dict__:
            return _reduce_namedtuple(Class)
        return None


@functools.lru_cache(maxsize=32)  # a script usually has one
def _candidates(text: str, filename: str, version: tuple[int, int]) -> dict[tuple[str, int], list[types.CodeType]]:
    """The code objects of ``text`` by name and line, in the order of ``_find_code``. Raises SyntaxError if ``text``
    uses what Python ``version`` does not have, as far as ``ast`` knows."""
    parse_source(text, filename, version)
    found: dict[tuple[str, int], list[types.CodeType]] = {}
    for code in _nested(compile(text, filename, "exec", dont_inherit=True)):
        found.setdefault((code.co_name, code.co_firstlineno), []).append(code)
    return found


def _nested(top: types.CodeType) -> Iterator[types.CodeType]:
    waiting = collections.deque([top])
    while waiting:
        code = waiting.popleft()
        waiting.extend(each for each in code.co_consts if isinstance(each, types.CodeType))
        yield code


def _is_generated(value: Any) -> bool:
    """Whether ``value`` is a function without a file, such as those of ``dataclass``."""
    function = inspect.unwrap(value) if callable(value) else value
    return isinstance(function, types.FunctionType) and function.__code__.co_filename.startswith("<string>")


def _reduce_dataclass(Class: type) -> tuple[Any, ...]:
    make, arguments, (attributes, slots), _, _, set_state = by_value._dynamic_class_reduce(Class)
    generated = {"__dataclass_fields__", "__dataclass_params__", "__match_args__", "__replace__"}
    attributes = {
        name: value for name, value in attributes.items() if name not in generated and not _is_generated(value)
    }
    options = {
        name: getattr(Class.__dict__["__dataclass_params__"], name)
        for name in _CLASS_OPTIONS
        if hasattr(Class.__dict__["__dataclass_params__"], name)
    }
    if "__hash__" in attributes and not options.get("unsafe_hash"):
        del attributes["__hash__"]  # None, which dataclass sets again
    annotations = dict(inspect.get_annotations(Class))
    fields: dict[str, Any] = {}
    for name, field in Class.__dict__["__dataclass_fields__"].items():
        if name not in annotations:  # of a base
            continue
        # Written as text, these are recognized by the names in the class's module, which the worker does not have.
        if field._field_type is dataclasses._FIELD_CLASSVAR:  # type: ignore[attr-defined]
            annotations[name] = ClassVar
            continue
        if field._field_type is dataclasses._FIELD_INITVAR:  # type: ignore[attr-defined]
            annotations[name] = dataclasses.InitVar(object)
        given = {option: getattr(field, option) for option in _FIELD_OPTIONS}
        fields[name] = {key: value for key, value in given.items() if value is not dataclasses.MISSING}
        fields[name]["metadata"] = dict(field.metadata)
    known = Class.__dict__["__dataclass_fields__"]  # without the marker KW_ONLY, which the fields tell themselves
    attributes["__annotations__"] = {name: value for name, value in annotations.items() if name in known}
    names = {"code": inspect.getsource(_regenerate), "functools": functools}
    names["given"] = {"set_state": set_state, "fields": fields, "options": options}
    return make, arguments, (attributes, slots), None, None, WorkerExpression(eval, _REGENERATE, names)


def _reduce_namedtuple(Class: Any) -> tuple[Any, ...]:
    defaults = tuple(Class._field_defaults.values())
    base = WorkerExpression(
        functools.partial(collections.namedtuple, defaults=defaults, module=Class.__module__),
        Class.__name__,
        Class._fields,
    )
    generated = collections.namedtuple("generated", Class._fields).__dict__
    added = {
        name: value for name, value in Class.__dict__.items() if name not in generated and name != "__orig_bases__"
    }
    added["__doc__"], added["__qualname__"] = Class.__doc__, Class.__qualname__
    track = WorkerExpression(pkgutil.resolve_name, "cloudpickle.cloudpickle:_lookup_class_or_track")
    arguments = (by_value._get_or_create_tracker_id(Class), base)
    return track, arguments, (added, {}), None, None, by_value._class_setstate
