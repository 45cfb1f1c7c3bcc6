"""Limits that contradict each other or the minimum are rejected."""

from __future__ import annotations

import pytest

from meshgate_wire import Limits
from meshgate_wire.frames import PeerLimits
from meshgate_wire.limits import MIN_LIMITS


@pytest.mark.parametrize("name", list(MIN_LIMITS))
def test_a_limit_below_the_minimum_is_rejected(name: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"Limits\.{name} is {MIN_LIMITS[name] - 1}, but every peer relies on at least {MIN_LIMITS[name]}",
    ):
        Limits(**{name: MIN_LIMITS[name] - 1})


def test_the_minimum_limits_are_consistent() -> None:
    limits = Limits(**MIN_LIMITS)
    assert PeerLimits.of(limits).model_dump() == MIN_LIMITS


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"window": 2**31}, "must be at most 2147483647"),
        ({"max_frame": 2**22}, "must exceed max_frame"),
        ({"max_message": 2**34}, "must be at least Limits.max_message"),
        ({"chunk": 100}, "at least 1024"),
        ({"chunk": 2**27}, "at most 64 MiB"),
        ({"small_message": 65537}, "must be at most 65536"),
        ({"max_unacknowledged": -1}, "max_unacknowledged must not be negative"),
    ],
)
def test_inconsistent_limits_are_rejected(wrong: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Limits(**wrong)
