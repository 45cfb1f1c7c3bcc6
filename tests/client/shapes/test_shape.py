"""Shapes behave as Monarch's: every operation is compared with the real classes, over random shapes."""

from __future__ import annotations

import collections.abc
import pickle
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monarch._rust_bindings.monarch_hyperactor import shape as theirs

from meshgate.shapes import shape as ours
from meshgate.shapes.ndslice import Slice
from meshgate.shapes.shape import Decoder, Extent, Point, Region, Shape
from meshgate_wire import messages
from tests.client.beside_monarch import KINDS, agree, plain, their_extent, their_shape
from tests.client.shapes.strategies import labels, numbers, python_slices, shapes, sizes, texts

integers = st.integers(0, 2**64 - 1)


@given(st.lists(labels, max_size=3), sizes, labels, numbers)
def test_extents_and_points_agree(names: list[str], dims: list[int], label: str, rank: int) -> None:
    if not agree(lambda: Extent(names, dims), lambda: theirs.Extent(names, dims)):
        return
    actual, expected = Extent(names, dims), theirs.Extent(names, dims)
    agree(lambda: actual[label], lambda: expected[label])
    agree(lambda: label in actual, lambda: label in expected)
    agree(lambda: (list(actual), list(actual.keys())), lambda: (list(expected), list(expected.keys())))
    agree(lambda: actual.region, lambda: expected.region)
    if not agree(lambda: Point(rank, actual), lambda: theirs.Point(rank, expected)):
        return
    actual_point, expected_point = Point(rank, actual), theirs.Point(rank, expected)
    agree(lambda: actual_point[label], lambda: expected_point[label])
    agree(lambda: actual_point.size(label), lambda: expected_point.size(label))
    agree(lambda: list(actual_point), lambda: list(expected_point))


@given(shapes(), texts, labels, numbers, python_slices)
def test_shapes_agree(shape: Shape, text: str, label: str, number: int, part: slice) -> None:
    expected = their_shape(shape)
    agree(lambda: shape, lambda: expected)
    agree(shape.ranks, expected.ranks)
    agree(lambda: shape.extent, lambda: expected.extent)
    agree(lambda: shape.region, lambda: expected.region)
    agree(shape.region.as_shape, expected.region.as_shape)
    agree(lambda: shape.coordinates(number), lambda: expected.coordinates(number))
    agree(lambda: shape.at(label, number), lambda: expected.at(label, number))
    agree(lambda: shape.select(label, part), lambda: expected.select(label, part))
    agree(lambda: shape.index(**{label: number}), lambda: expected.index(**{label: number}))
    agree(lambda: shape.region.point_of_base_rank(number), lambda: expected.region.point_of_base_rank(number))
    agree(lambda: Shape([text], shape.ndslice), lambda: theirs.Shape([text], expected.ndslice))


@given(shapes(), st.lists(st.tuples(labels, st.integers(0, 3) | python_slices), max_size=6))
def test_a_sequence_of_selections_results_in_the_same_shape(shape: Shape, steps: list[tuple[str, int | slice]]) -> None:
    actual, expected = shape, their_shape(shape)
    for label, step in steps:
        operation = "select" if isinstance(step, slice) else "at"
        if agree(
            lambda: getattr(actual, operation)(label, step),  # noqa: B023
            lambda: getattr(expected, operation)(label, step),  # noqa: B023
        ):
            actual, expected = getattr(actual, operation)(label, step), getattr(expected, operation)(label, step)


@given(shapes(), shapes())
def test_equality_agrees(one: Shape, other: Shape) -> None:
    twin = Shape(one.labels, one.ndslice)
    for a, b in ((one, other), (one, twin)):
        agree(lambda: a == b, lambda: their_shape(a) == their_shape(b))  # noqa: B023
        agree(lambda: a.ndslice == b.ndslice, lambda: their_shape(a).ndslice == their_shape(b).ndslice)  # noqa: B023
        agree(lambda: a.extent == b.extent, lambda: their_shape(a).extent == their_shape(b).extent)  # noqa: B023
        agree(lambda: a.region == b.region, lambda: their_shape(a).region == their_shape(b).region)  # noqa: B023
    assert hash(one) == hash(twin)
    assert hash(one.extent) == hash(twin.extent)


def _one_of_each(shape: Shape) -> list[Any]:
    points = [Point(0, shape.extent)] if len(shape) else []
    return [shape, shape.ndslice, shape.extent, shape.region, *points]


@given(shapes())
def test_all_survive_pickling(shape: Shape) -> None:
    for value in _one_of_each(shape):
        assert pickle.loads(pickle.dumps(value)) == value


@given(shapes())
def test_the_bytes_in_which_monarch_pickles_are_decoded(shape: Shape) -> None:
    expected = their_shape(shape)
    points = [theirs.Point(0, expected.extent)] if len(shape) else []
    for value in (expected, expected.extent, expected.region, *points):
        data = value.__reduce__()[1][0]
        assert plain(getattr(ours, type(value).__name__).from_bytes(data)) == plain(value)


@given(shapes())
def test_regions_survive_the_conversion_to_messages(shape: Shape) -> None:
    region = messages.Region.model_validate_json(shape.to_wire().model_dump_json())
    assert Shape.from_wire(region) == shape
    assert Region.from_wire(region) == shape.region


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.Extent("ab", [1, 2]),
        lambda m: m.Extent(["a"], ["x"]),
        lambda m: m.Extent(["a"], [-1]),
        lambda m: m.Extent(["a"], {1}),
        lambda m: m.Extent(["a"], [2**64]),
        lambda m: m.Extent([1], [1]),
        lambda m: m.Extent(["a"], [1])[0],
        lambda m: m.Extent(["a"], [1]) == 5,
        lambda m: m.Point(0, {"a": 1}),
        lambda m: m.Point("x", m.Extent(["a"], [1])),
        lambda m: m.Point(-1, m.Extent(["a"], [1])),
        lambda m: m.Point(0, m.Extent(["a"], [1]))[0],
        lambda m: m.Shape(["a"], 5),
        lambda m: m.Shape("a", m.Slice.new_row_major([2])),
        lambda m: m.Shape(["a"], m.Slice.new_row_major([2])).select("a", 1),
        lambda m: m.Shape(["a"], m.Slice.new_row_major([2])).select("a", slice("x")),
        lambda m: m.Shape(["a"], m.Slice.new_row_major([2])).select("a", slice(None, None, 0)),
        lambda m: m.Shape(["a"], m.Slice.new_row_major([2])).at("a", "x"),
        lambda m: m.Shape(["a"], m.Slice.new_row_major([2])).at("a", True),
        lambda m: m.Shape(["a"], m.Slice.new_row_major([2])).at(3, 0),
        lambda m: m.Shape.unity(),
        lambda m: m.Shape.unity().ranks(),
        lambda m: m.Shape.unity().coordinates(1),
    ],
)
def test_unusual_arguments_have_the_same_outcome(call: Any) -> None:
    agree(lambda: call(ours), lambda: call(theirs))


def test_a_negative_step_is_rejected() -> None:
    """Monarch returns a stride of 2**64 - 1."""
    with pytest.raises(ValueError, match="has a negative step"):
        Shape(["a"], Slice.new_row_major([4])).select("a", slice(None, None, -1))


def test_extents_and_points_are_complete_mappings() -> None:
    extent = Extent(["a", "b"], [2, 3])
    point = Point(4, extent)
    assert isinstance(extent, collections.abc.Mapping)
    assert isinstance(point, collections.abc.Mapping)
    assert dict(extent.items()) == {"a": 2, "b": 3}
    assert list(point.values()) == [1, 1]
    assert extent.get("z") is None
    assert point.get("z", 7) == 7
    with pytest.raises(KeyError, match="Dimension 'z' not found"):
        point["z"]


def test_every_class_of_monarch_has_an_equivalent() -> None:
    assert {name for name in dir(theirs) if name[0].isupper()} == set(KINDS)
    for name in KINDS:
        public = {each for each in dir(getattr(theirs, name)) if not each.startswith("_")}
        assert public <= set(dir(getattr(ours, name)))


@settings(max_examples=20)
@given(shapes())
def test_extents_of_both_sides_print_alike(shape: Shape) -> None:
    assert repr(shape.extent) == repr(their_extent(shape.extent))


def encoded(value: int | list[int] | list[str]) -> bytes:
    if isinstance(value, int):
        return struct.pack("<Q", value)
    items = [encoded(item) if isinstance(item, int) else encoded(len(item.encode())) + item.encode() for item in value]
    return encoded(len(value)) + b"".join(items)


@given(integers, st.lists(integers, max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_values_are_decoded_in_order(integer: int, numbers: list[int], strings: list[str]) -> None:
    reader = Decoder(encoded(integer) + encoded(numbers) + encoded(strings))
    assert (reader.integer(), reader.integers(), reader.strings()) == (integer, numbers, strings)
    reader.end()


def test_truncated_data_is_rejected() -> None:
    with pytest.raises(ValueError, match="truncated data: 1 bytes are missing"):
        Decoder(encoded(5)[:-1]).integer()
    with pytest.raises(ValueError, match="truncated data: 8 bytes are missing"):
        Decoder(encoded([1, 2])[:-8]).integers()
    with pytest.raises(ValueError, match="truncated data: 2 bytes are missing"):
        Decoder(encoded(["abc"])[:-2]).strings()


def test_a_length_beyond_the_data_takes_no_memory() -> None:
    with pytest.raises(ValueError, match="truncated data"):
        Decoder(encoded(2**60)).integers()


def test_trailing_bytes_are_rejected() -> None:
    reader = Decoder(encoded(5) + b"x")
    reader.integer()
    with pytest.raises(ValueError, match="1 trailing bytes"):
        reader.end()
