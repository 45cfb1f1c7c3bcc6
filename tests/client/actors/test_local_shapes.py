from __future__ import annotations

import operator
from typing import Any

import monarch.actor
import pytest

from meshgate.actors.local_shapes import equal_from_both_sides
from meshgate.shapes.shape import Extent, Point

EXTENT, OTHER_EXTENT = (["hosts", "gpus"], [2, 3]), (["hosts", "gpus"], [3, 2])


@pytest.fixture(autouse=True, params=["once", "twice"])
def _compared(request: pytest.FixtureRequest) -> None:
    equal_from_both_sides()
    if request.param == "twice":
        equal_from_both_sides()


@pytest.mark.parametrize("extent", [EXTENT, OTHER_EXTENT])
@pytest.mark.parametrize("rank", [1, 2])
def test_points_and_extents_of_both_sides_compare_alike(extent: tuple[list[str], list[int]], rank: int) -> None:
    equal = extent == EXTENT
    ours, theirs = Extent(*EXTENT), monarch.actor.Extent(*extent)
    assert operator.eq(ours, theirs) == operator.eq(theirs, ours) == equal
    our_point, their_point = Point(1, ours), monarch.actor.Point(rank, theirs)
    assert operator.eq(our_point, their_point) == operator.eq(their_point, our_point) == (equal and rank == 1)
    assert operator.ne(their_point, our_point) != operator.eq(their_point, our_point)


def test_monarchs_own_comparison_is_unchanged() -> None:
    theirs: Any = monarch.actor.Extent(*EXTENT)
    assert theirs == monarch.actor.Extent(*EXTENT)
    assert theirs != monarch.actor.Extent(*OTHER_EXTENT)
    assert monarch.actor.Point(1, theirs) == monarch.actor.Point(1, theirs)
    assert theirs != "text"
    with pytest.raises(TypeError, match="unhashable"):
        hash(theirs)
