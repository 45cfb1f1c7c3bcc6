from __future__ import annotations

import ast

import pytest

from tests.mutation.__main__ import PARTS, modules_of, sample
from tests.mutation.mutants import mutants_of
from tests.programs import ROOT


def lines(source: str) -> list[str]:
    """What each mutant of a line has in its place."""
    return [mutant.source for mutant in mutants_of(source)]


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = a is not b", ["x = a is b"]),
        ("x = a and b", ["x = a or b"]),
        ("x = not a", ["x = bool(a)"]),
        ("x = a + b", ["x = a - b"]),
        ("x -= a", ["x += a"]),
        ("x = 3", ["x = 4"]),
        ("x = a if b else c", ["x = a if (not b) else c"]),
        ("f(a)", ["pass"]),
        ("a.b = c", ["pass"]),
        ("del a[b]", ["pass"]),
        ("x = 'é' < b", ["x = 'é' <= b"]),
    ],
)
def test_a_statement_has_these_mutants(source: str, mutants: list[str]) -> None:
    assert lines(source) == mutants


@pytest.mark.parametrize(
    "source",
    [
        "log.info('%d', a + 1)",
        "raise ValueError(a + 1)",
        "x = f'{a + 1}'",
        "x = 'a' + b",
        "x: Literal[1]",
        "def __repr__(self):\n    return a < b",
        '"""A docstring."""',
        "x = True",
    ],
)
def test_what_only_readers_see_has_none(source: str) -> None:
    assert lines(source) == []


@pytest.mark.parametrize("part", PARTS)
def test_each_part_has_modules_whose_mutants_are_programs(part: str) -> None:
    for place in PARTS[part]:
        assert (ROOT / place).exists(), f"move the place of {part} in tests/mutation/__main__.py"
    assert modules_of(part)
    for planted in sample(part, each=50, module=None, seed=0):
        ast.parse(planted.mutant.source)
        assert planted.mutant.source != (ROOT / planted.module).read_text()


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    assert sample("wire", 10, None, seed=3) == sample("wire", 10, None, seed=3)
    assert sample("wire", 10, None, seed=3) != sample("wire", 10, None, seed=4)
