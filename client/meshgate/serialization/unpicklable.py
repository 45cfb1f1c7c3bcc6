"""Finds the innermost object that makes a value unpicklable.

The search descends from the value into a part that cannot be pickled on its own, until no part of it fails. The path to
that object is written as in code: ``.hooks['log'].lock``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 40
MAX_TRIES = 2_000


@dataclass(frozen=True, slots=True)
class UnpicklablePart:
    """The innermost object that cannot be pickled, the path to it, and the error."""

    path: str
    value: object
    error: Exception


def find_unpicklable_part(value: object, fails: Callable[[object], Exception | None]) -> UnpicklablePart | None:
    """The innermost failing part of ``value``; None if ``value`` does not fail.

    ``fails(object)`` returns the error of pickling it, or None. The search stops after ``MAX_TRIES`` calls.
    """
    error = fails(value)
    if error is None:
        return None
    found = UnpicklablePart("", value, error)
    seen = {id(value)}
    budget = iter(range(MAX_TRIES))
    while len(seen) < MAX_DEPTH:
        deeper = _first_failing(found, fails, seen, budget)
        if deeper is None:
            return found
        found = deeper
        seen.add(id(found.value))
    return found


def _first_failing(
    outer: UnpicklablePart, fails: Callable[[object], Exception | None], seen: set[int], budget: Iterator[int]
) -> UnpicklablePart | None:
    for step, part in _parts(outer.value):
        if id(part) in seen:
            continue
        if next(budget, None) is None:
            return None
        error = fails(part)
        if error is not None:
            return UnpicklablePart(outer.path + step, part, error)
    return None


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    """The objects that are pickled as part of ``value``, each with its path from there."""
    if isinstance(value, (str, bytes, bytearray, int, float, complex, type(None))):
        return
    yield from _items(value)
    if isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        yield from ((f".{name}", getattr(value, name, None)) for name in ("__self__", "__func__"))
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, type):
        yield from ((f".{name}", item) for name, item in vars(value).items() if name not in ("__dict__", "__weakref__"))
    elif not any("__reduce_ex__" in vars(kind) for kind in type(value).__mro__[:-1]):  # else its class decides
        yield from _state_parts(value)


def _items(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"[{key!r}]", item
            yield f".keys() {key!r}", key
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{position}]", item) for position, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f" element {item!r}", item) for item in value)


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" variable {name!r}", cell.cell_contents
        except ValueError:  # unbound variable
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f" global {name!r}", function.__globals__[name]
    for position, item in enumerate(function.__defaults__ or ()):
        yield f" default {position}", item


def _state_parts(value: Any) -> Iterator[tuple[str, object]]:
    getstate = getattr(type(value), "__getstate__", None)
    if getstate is not None and getstate is not getattr(object, "__getstate__", None):
        try:
            state = value.__getstate__()
        except Exception:  # noqa: BLE001 (a user's method; its error is the one that is reported)
            return
        if isinstance(state, dict):
            yield from ((f".{name}", item) for name, item in state.items())
        return
    yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                yield f".{name}", getattr(value, name)
