"""Signatures and fields are those of the installed Monarch, but for the listed differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conformance.signatures import DIFFERENCES, class_differences, differences


def test_every_difference_to_monarch_is_listed_and_every_listed_one_exists() -> None:
    found = differences()
    unlisted = {name: what for name, what in found.items() if name not in DIFFERENCES}
    assert unlisted == {}
    assert DIFFERENCES.keys() == found.keys()


class Theirs:
    def same(self, a: int, /, b: int = 1, *rest: int, c: int = 2, **more: int) -> None: ...
    def changed(self, a: int, b: int = 1, *, c: int = 2) -> None: ...
    def private(self, _a: int = 1) -> None: ...

    value = 1


def _lambda(*names: str) -> Callable[..., Any]:
    made: Callable[..., Any] = eval(f"lambda {', '.join(('self', *names))}: None")
    return made


@pytest.mark.parametrize(
    ("signature", "found"),
    [
        ("a, b=1, *, c=2, d=3", {}),
        ("a, b=1, c=2", {}),
        ("b=1, a=None, *, c=2", {"a": "at position 1, not 0", "b": "at position 0, not 1"}),
        ("a, *, b=1, c=2", {"b": "keyword-only"}),
        ("a, b=2, *, c=2", {"b": "default 2, not 1"}),
        ("a, b, *, c=2", {"b": "default <class 'inspect._empty'>, not 1"}),
        ("a, b=1", {"c": "missing"}),
        ("a, b=1, *, c=2, d", {"d": "required here only"}),
    ],
)
def test_a_difference_of_parameters_is_found(signature: str, found: dict[str, str]) -> None:
    ours = type("Ours", (Theirs,), {"changed": _lambda(signature)})
    assert dict(class_differences("T", Theirs, ours)) == {f"T.changed({name})": what for name, what in found.items()}


def test_a_method_that_is_a_value_here_is_found() -> None:
    assert dict(class_differences("T", Theirs, type("Ours", (Theirs,), {"same": 1}))).keys() == {"T.same"}
    assert dict(class_differences("T", Theirs, type("Ours", (), {}))).keys() == {
        "T.same",
        "T.changed",
        "T.private",
        "T.value",
    }


def test_a_field_that_is_missing_here_is_found() -> None:
    @dataclass
    class Config:
        first: int = 1
        second: int = 2

    @dataclass
    class Ours:
        first: int = 1

    assert dict(class_differences("T", Config, Ours)) == {"T.second": "field missing"}
