"""The order of tests in a run with several workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def slow_first(
    tests: Sequence[T], is_slow: Callable[[T], bool], module: Callable[[T], object], workers: int
) -> list[T]:
    """Gives each worker a part of the slow tests to begin with: a slow one at the end of the run would run alone.

    Those of one module stay together, as two workers would each start what its tests share, such as a Ray cluster.

    Workers begin with consecutive parts of equal size (xdist's worksteal) and take tests from the ends of others later.
    """
    slow, others = ([test for test in tests if is_slow(test) == wanted] for wanted in (True, False))
    modules = list(dict.fromkeys(map(module, slow)))
    ordered: list[T] = []
    for worker in range(workers):
        size = (len(tests) - len(ordered)) // (workers - worker)
        first = [test for test in slow if module(test) in modules[worker::workers]]
        ordered += first + others[: max(0, size - len(first))]
        del others[: max(0, size - len(first))]
    return ordered + others
