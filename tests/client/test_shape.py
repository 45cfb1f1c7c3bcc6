"""Shapes on the laptop are Monarch's shapes: every operation beside the real classes, over random shapes."""

from __future__ import annotations

import collections.abc
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monarch._rust_bindings.monarch_hyperactor import shape as theirs

from meshgate import shape as ours
from meshgate.shape import Extent, Point, Region, Shape, Slice
from meshgate_wire import messages
from tests.client.beside_monarch import KINDS, agree, outcome, plain, their_extent, their_shape

LABELS = ("hosts", "gpus", "dp", "tp", "a b", "it's", 'q"\\')
sizes = st.lists(st.integers(0, 4), max_size=4)
labels = st.sampled_from(LABELS)
texts = st.text(st.characters(max_codepoint=0x2FF), max_size=4)  # beyond, it depends on the version of Unicode
numbers = st.integers(-2, 70)
python_slices = st.builds(slice, *[st.none() | st.integers(-6, 6)] * 2, st.none() | st.integers(1, 4))


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Offsets, sizes and strides, most of which nest."""
    dims = draw(sizes)
    if draw(st.booleans()):
        strides = draw(st.lists(st.integers(0, 12), max_size=4))
        return {"offset": draw(st.integers(0, 5)), "sizes": dims, "strides": strides}
    order = draw(st.permutations(range(len(dims))))
    strides, step = [1] * len(dims), 1
    for dim in order:
        step *= draw(st.integers(1, 3))
        strides[dim] = step
        step *= max(dims[dim], 1)
    return {"offset": draw(st.integers(0, 5)), "sizes": dims, "strides": strides}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Valid shapes with distinct labels."""
    layout = draw(layouts().filter(lambda layout: not isinstance(outcome(lambda: Slice(**layout)), Exception)))
    dims = len(layout["sizes"])
    names = draw(st.lists(labels, min_size=dims, max_size=dims, unique=True))
    return Shape(names, Slice(**layout))


@given(layouts())
def test_a_slice_is_valid_where_monarchs_is(layout: dict[str, Any]) -> None:
    agree(lambda: Slice(**layout), lambda: theirs.Slice(**layout))


@given(shapes(), st.lists(numbers, max_size=5), numbers, python_slices)
def test_slices_agree(shape: Shape, coordinates: list[int], number: int, part: slice) -> None:
    mine, monarchs = shape.ndslice, their_shape(shape).ndslice
    agree(lambda: list(mine), lambda: list(monarchs))
    agree(lambda: (len(mine), mine.ndim), lambda: (len(monarchs), monarchs.ndim))
    agree(lambda: mine.index(number), lambda: monarchs.index(number))
    agree(lambda: mine.coordinates(number), lambda: monarchs.coordinates(number))
    agree(lambda: mine.nditem(coordinates), lambda: monarchs.nditem(coordinates))
    if len(mine):  # Monarch panics on an empty one
        agree(lambda: mine.get(number), lambda: monarchs.get(number))
        agree(lambda: mine[part], lambda: monarchs[part])
        if number >= 0:
            agree(lambda: mine[number], lambda: monarchs[number])


@given(st.lists(st.integers(0, 40), max_size=12))
def test_ranks_are_covered_by_the_same_slices(ranks: list[int]) -> None:
    agree(lambda: Slice.from_list(ranks), lambda: theirs.Slice.from_list(ranks))


@given(sizes)
def test_dense_slices_agree(dims: list[int]) -> None:
    agree(lambda: Slice.new_row_major(dims), lambda: theirs.Slice.new_row_major(dims))


@given(st.lists(labels, max_size=3), sizes, labels, numbers)
def test_extents_and_points_agree(names: list[str], dims: list[int], label: str, rank: int) -> None:
    if not agree(lambda: Extent(names, dims), lambda: theirs.Extent(names, dims)):
        return
    mine, monarchs = Extent(names, dims), theirs.Extent(names, dims)
    agree(lambda: mine[label], lambda: monarchs[label])
    agree(lambda: label in mine, lambda: label in monarchs)
    agree(lambda: (list(mine), list(mine.keys())), lambda: (list(monarchs), list(monarchs.keys())))
    agree(lambda: mine.region, lambda: monarchs.region)
    if not agree(lambda: Point(rank, mine), lambda: theirs.Point(rank, monarchs)):
        return
    my_point, their_point = Point(rank, mine), theirs.Point(rank, monarchs)
    agree(lambda: my_point[label], lambda: their_point[label])
    agree(lambda: my_point.size(label), lambda: their_point.size(label))
    agree(lambda: list(my_point), lambda: list(their_point))


@given(shapes(), texts, labels, numbers, python_slices)
def test_shapes_agree(shape: Shape, text: str, label: str, number: int, part: slice) -> None:
    monarchs = their_shape(shape)
    agree(lambda: shape, lambda: monarchs)
    agree(shape.ranks, monarchs.ranks)
    agree(lambda: shape.extent, lambda: monarchs.extent)
    agree(lambda: shape.region, lambda: monarchs.region)
    agree(shape.region.as_shape, monarchs.region.as_shape)
    agree(lambda: shape.coordinates(number), lambda: monarchs.coordinates(number))
    agree(lambda: shape.at(label, number), lambda: monarchs.at(label, number))
    agree(lambda: shape.select(label, part), lambda: monarchs.select(label, part))
    agree(lambda: shape.index(**{label: number}), lambda: monarchs.index(**{label: number}))
    agree(lambda: shape.region.point_of_base_rank(number), lambda: monarchs.region.point_of_base_rank(number))
    agree(lambda: Shape([text], shape.ndslice), lambda: theirs.Shape([text], monarchs.ndslice))


@given(shapes(), st.lists(st.tuples(labels, st.integers(0, 3) | python_slices), max_size=6))
def test_a_sequence_of_selections_ends_in_the_same_shape(shape: Shape, steps: list[tuple[str, int | slice]]) -> None:
    mine, monarchs = shape, their_shape(shape)
    for label, step in steps:
        operation = "select" if isinstance(step, slice) else "at"
        if agree(
            lambda: getattr(mine, operation)(label, step),  # noqa: B023
            lambda: getattr(monarchs, operation)(label, step),  # noqa: B023
        ):
            mine, monarchs = getattr(mine, operation)(label, step), getattr(monarchs, operation)(label, step)


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
def test_the_bytes_in_which_monarch_pickles_are_read_and_written(shape: Shape) -> None:
    for value in _one_of_each(shape):
        if isinstance(value, Slice):
            continue
        kind = type(value).__name__
        their_kind = getattr(theirs, kind)
        arrived = their_kind.from_bytes(value.to_bytes())
        assert plain(arrived) == plain(value)
        assert getattr(ours, kind).from_bytes(arrived.__reduce__()[1][0]) == value


@given(shapes())
def test_regions_travel_in_messages(shape: Shape) -> None:
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
        lambda m: m.Slice(offset="x", sizes=[], strides=[]),
        lambda m: m.Slice(offset=1.5, sizes=[], strides=[]),
        lambda m: m.Slice(offset=0, sizes="ab", strides=[]),
        lambda m: m.Slice(offset=0, sizes=3, strides=[]),
        lambda m: m.Slice(offset=0, sizes=(2,), strides=range(1, 2)),
        lambda m: m.Slice.new_row_major([2, 3])[::-1],
        lambda m: m.Slice.new_row_major([2, 3])[::0],
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
def test_odd_arguments_meet_the_same_answer(call: Any) -> None:
    agree(lambda: call(ours), lambda: call(theirs))


def test_a_range_that_runs_backwards_is_refused() -> None:
    """Monarch answers with a stride of 2**64 - 1."""
    with pytest.raises(ValueError, match="runs backwards"):
        Shape(["a"], Slice.new_row_major([4])).select("a", slice(None, None, -1))


def test_an_element_of_an_empty_slice_is_an_error_and_no_panic() -> None:
    with pytest.raises(IndexError, match="index 0 out of range 0"):
        Slice.new_row_major([0])[0]
    with pytest.raises(ValueError, match="index 0 out of range 0"):
        Slice.new_row_major([0]).get(0)


def test_extents_and_points_are_whole_mappings() -> None:
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


def test_cut_bytes_are_refused() -> None:
    data = Extent(["a"], [2]).to_bytes()
    with pytest.raises(ValueError, match="UnexpectedEnd"):
        Extent.from_bytes(data[:-1])
    with pytest.raises(ValueError, match="1 bytes too many"):
        Extent.from_bytes(data + b"x")


def test_every_class_of_monarchs_is_here() -> None:
    assert {name for name in dir(theirs) if name[0].isupper()} == set(KINDS)
    for name in KINDS:
        public = {each for each in dir(getattr(theirs, name)) if not each.startswith("_")}
        assert public <= set(dir(getattr(ours, name)))


@settings(max_examples=20)
@given(shapes())
def test_extents_of_both_sides_print_alike(shape: Shape) -> None:
    assert repr(shape.extent) == repr(their_extent(shape.extent))
