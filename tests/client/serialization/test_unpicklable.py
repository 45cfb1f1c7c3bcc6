"""The innermost unpicklable object is found, with its path."""

from __future__ import annotations

import functools
import threading
from typing import Any

import cloudpickle
import pytest

from meshgate.serialization.unpicklable import MAX_DEPTH, MAX_TRIES, find_unpicklable_part


def pickling_error(value: object) -> Exception | None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001
        return error
    return None


class Model:
    def __init__(self) -> None:
        self.layers = [{"name": "first"}, {"name": "second", "lock": threading.Lock()}]


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


class Stateful:
    def __getstate__(self) -> dict[str, object]:
        return {"handle": threading.Lock()}


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("not picklable")


class UnpicklableState:
    def __getstate__(self) -> Any:
        raise RuntimeError("no state")


def closure_over(value: object) -> Any:
    return lambda: value


LOCK = threading.Lock()
UNPICKLABLE = Unpicklable()


@pytest.mark.parametrize(
    ("value", "path", "reason"),
    [
        (threading.Lock(), "", "cannot pickle '_thread.lock' object"),
        (Model(), ".layers[1]['lock']", "cannot pickle '_thread.lock' object"),
        (Slotted([Slotted(threading.Lock())]), ".inner[0].inner", "lock"),
        (Stateful(), ".handle", "lock"),
        (Unpicklable(), "", "not picklable"),
        (UnpicklableState(), "", "no state"),
        ({"a": [1, (2, Unpicklable())]}, "['a'][1][1]", "not picklable"),
        ({Unpicklable(): 1}, ".keys()", "not picklable"),
        (functools.partial(print, Unpicklable()), ".args[0]", "not picklable"),
        (closure_over(Unpicklable()), " variable 'value'", "not picklable"),
        (lambda: LOCK, " global 'LOCK'", "lock"),
        (lambda x=UNPICKLABLE: x, " default 0", "not picklable"),
        (Model().layers[1].get, ".__self__['lock']", "lock"),
        ((n for n in range(3)), "", "generator"),
    ],
)
def test_the_innermost_unpicklable_part_is_found(value: Any, path: str, reason: str) -> None:
    found = find_unpicklable_part(value, pickling_error)
    assert found is not None
    assert found.path.startswith(path) if path else not found.path
    assert reason in str(found.error)


def test_an_open_file_is_found() -> None:
    with open(__file__, "rb") as file:
        found = find_unpicklable_part({"file": file}, pickling_error)
        assert found is not None
        assert (found.path, found.value) == ("['file']", file)


def test_a_picklable_value_has_no_unpicklable_part() -> None:
    assert find_unpicklable_part({"a": [1, "text", None]}, pickling_error) is None


def test_a_value_that_contains_itself_ends_the_search() -> None:
    cycle: list[Any] = [threading.Lock()]
    cycle.insert(0, cycle)
    found = find_unpicklable_part(cycle, pickling_error)
    assert found is not None
    assert found.path == "[1]"


def test_the_search_is_limited_in_depth_and_in_tries() -> None:
    deep: Any = LOCK
    for _ in range(2 * MAX_DEPTH):
        deep = [deep]
    found = find_unpicklable_part(deep, pickling_error)
    assert found is not None
    assert found.path == "[0]" * (MAX_DEPTH - 1)
    calls: list[object] = []
    wide = [*range(1000, 1000 + 2 * MAX_TRIES), LOCK]

    def counting_error(value: object) -> Exception | None:
        calls.append(value)
        return pickling_error(value)

    found = find_unpicklable_part(wide, counting_error)
    assert found is not None
    assert (found.path, len(calls)) == ("", MAX_TRIES + 1)
