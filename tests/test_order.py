"""Slow tests are what workers begin with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.order import slow_first


@pytest.mark.parametrize(
    ("tests", "workers", "ordered"),
    [
        ("abcdE", 1, "Eabcd"),
        ("abCdeFghI", 3, "CabFdeIgh"),
        ("abcdeF", 2, "Fabcde"),
        ("ABcd", 2, "AcBd"),
        ("abc", 2, "abc"),
        ("AbZcde", 2, "AZbcde"),
    ],
)
def test_each_worker_begins_with_its_share_and_modules_stay_together(tests: str, workers: int, ordered: str) -> None:
    found = slow_first(tests, str.isupper, lambda test: "a module of two" if test in "AZ" else test, workers)
    assert "".join(found) == ordered


@given(st.lists(st.integers(), unique=True), st.integers(1, 5))
def test_every_test_stays_and_those_that_are_not_slow_keep_their_order(tests: list[int], workers: int) -> None:
    ordered = slow_first(tests, lambda test: test % 3 == 0, lambda test: test % 2, workers)
    assert sorted(ordered) == sorted(tests)
    assert [test for test in ordered if test % 3] == [test for test in tests if test % 3]
