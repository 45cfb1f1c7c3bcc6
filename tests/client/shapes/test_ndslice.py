"""Slices behave as Monarch's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from monarch._rust_bindings.monarch_hyperactor import shape as theirs

from meshgate.shapes import ndslice as ours
from meshgate.shapes.ndslice import Slice
from meshgate.shapes.shape import Shape
from tests.client.beside_monarch import agree, their_shape
from tests.client.shapes.strategies import layouts, numbers, python_slices, shapes, sizes


@given(layouts())
def test_a_slice_is_valid_if_and_only_if_monarchs_is(layout: dict[str, Any]) -> None:
    agree(lambda: Slice(**layout), lambda: theirs.Slice(**layout))


@given(shapes(), st.lists(numbers, max_size=5), numbers, python_slices)
def test_slices_agree(shape: Shape, coordinates: list[int], number: int, part: slice) -> None:
    actual, expected = shape.ndslice, their_shape(shape).ndslice
    agree(lambda: list(actual), lambda: list(expected))
    agree(lambda: (len(actual), actual.ndim), lambda: (len(expected), expected.ndim))
    agree(lambda: actual.index(number), lambda: expected.index(number))
    agree(lambda: actual.coordinates(number), lambda: expected.coordinates(number))
    agree(lambda: actual.nditem(coordinates), lambda: expected.nditem(coordinates))
    if len(actual):  # Monarch panics on an empty one
        agree(lambda: actual.get(number), lambda: expected.get(number))
        agree(lambda: actual[part], lambda: expected[part])
        if number >= 0:
            agree(lambda: actual[number], lambda: expected[number])


@given(st.lists(st.integers(0, 40), max_size=12))
def test_ranks_are_covered_by_the_same_slices(ranks: list[int]) -> None:
    agree(lambda: Slice.from_list(ranks), lambda: theirs.Slice.from_list(ranks))


@given(sizes)
def test_dense_slices_agree(dims: list[int]) -> None:
    agree(lambda: Slice.new_row_major(dims), lambda: theirs.Slice.new_row_major(dims))


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.Slice(offset="x", sizes=[], strides=[]),
        lambda m: m.Slice(offset=1.5, sizes=[], strides=[]),
        lambda m: m.Slice(offset=0, sizes="ab", strides=[]),
        lambda m: m.Slice(offset=0, sizes=3, strides=[]),
        lambda m: m.Slice(offset=0, sizes=(2,), strides=range(1, 2)),
        lambda m: m.Slice.new_row_major([2, 3])[::-1],
        lambda m: m.Slice.new_row_major([2, 3])[::0],
    ],
)
def test_unusual_arguments_have_the_same_outcome(call: Any) -> None:
    agree(lambda: call(ours), lambda: call(theirs))


def test_indexing_an_empty_slice_raises_instead_of_panicking() -> None:
    with pytest.raises(IndexError, match="index 0 out of range 0"):
        Slice.new_row_major([0])[0]
    with pytest.raises(ValueError, match="index 0 out of range 0"):
        Slice.new_row_major([0]).get(0)
