"""A ValueMesh is Monarch's, operation by operation; and its values are read when they are looked at, once."""

from __future__ import annotations

import contextlib
import pickle
import threading
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from monarch.actor import ValueMesh as TheirValueMesh

from meshgate.shape import Extent, Point, Shape, Slice
from meshgate.value_mesh import ValueMesh
from tests.client.beside_monarch import agree, their_shape, value_meshes

NAMES = ("hosts", "gpus", "dp", "tp", "pp")
names = st.sampled_from(NAMES)
parts = st.builds(slice, *[st.none() | st.integers(-4, 4)] * 2, st.none() | st.integers(1, 3))
coordinates = st.dictionaries(names, st.integers(-1, 4), max_size=4)


@st.composite
def dense_shapes(draw: st.DrawFn) -> Shape:
    """What a mesh begins as."""
    labels = draw(st.lists(names, max_size=3, unique=True))
    sizes = [draw(st.sampled_from([0, 1, 2, 3, 4, 6])) for _ in labels]
    return Extent(labels, sizes).region.as_shape()


slicings = st.tuples(st.just("slice"), st.dictionaries(names, st.integers(-1, 4) | parts, max_size=2))
splits = st.tuples(
    st.just("split"),
    st.dictionaries(names, st.lists(names, max_size=2, unique=True).map(tuple) | st.integers(-1, 4), max_size=3),
)
renames = st.tuples(st.just("rename"), st.dictionaries(names, names, max_size=2))
flattenings = st.tuples(st.just("flatten"), st.fixed_dictionaries({"name": names}))
operations = slicings | splits | renames | flattenings


@given(dense_shapes(), st.lists(operations, max_size=5))
def test_any_sequence_of_operations_gives_the_same_mesh(shape: Shape, steps: list[tuple[str, dict[str, Any]]]) -> None:
    mine, monarchs = value_meshes(shape)
    agree(lambda: mine, lambda: monarchs)
    for name, arguments in steps:
        after = []

        def my_step(name: str = name, arguments: dict[str, Any] = arguments, mine: Any = mine) -> Any:
            after.append(getattr(mine, name)(**arguments))  # noqa: B023
            return after[-1]  # noqa: B023

        def their_step(name: str = name, arguments: dict[str, Any] = arguments, mesh: Any = monarchs) -> Any:
            after.append(getattr(mesh, name)(**arguments))  # noqa: B023
            return after[-1]  # noqa: B023

        if agree(my_step, their_step):
            mine, monarchs = after


@given(dense_shapes(), operations, coordinates, st.integers(-1, 9), st.lists(names, max_size=3))
@example(
    Extent(["dp", "hosts", "pp"], [0, 2, 0]).region.as_shape(), ("slice", {}), {"pp": 0, "dp": 0, "hosts": 0}, 0, []
)
def test_looking_at_a_mesh_agrees(
    shape: Shape, step: tuple[str, dict[str, Any]], at: dict[str, int], rank: int, dims: list[str]
) -> None:
    mine, monarchs = value_meshes(shape)
    with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError, ZeroDivisionError):
        mine, monarchs = (getattr(mesh, step[0])(**step[1]) for mesh in (mine, monarchs))
    agree(lambda: mine.item(**at), lambda: monarchs.item(**at))
    agree(lambda: mine.get(rank), lambda: monarchs.get(rank))
    agree(lambda: list(mine.items()), lambda: list(monarchs.items()))
    agree(lambda: list(mine), lambda: list(monarchs))
    agree(lambda: mine.extent, lambda: monarchs.extent)
    agree(mine.size, monarchs.size)
    agree(lambda: mine.size(dims), lambda: monarchs.size(dims))
    for dim in dims:
        agree(lambda: mine.size(dim), lambda: monarchs.size(dim))  # noqa: B023


@given(dense_shapes(), st.lists(st.integers(0, 30), max_size=30))
def test_a_mesh_wants_a_value_a_rank(shape: Shape, values: list[int]) -> None:
    monarchs = their_shape(shape)
    agree(lambda: ValueMesh(shape, values), lambda: TheirValueMesh(monarchs, values))
    pairs = list(enumerate(values))
    agree(lambda: ValueMesh.from_indexed(shape, pairs), lambda: TheirValueMesh.from_indexed(monarchs, pairs))


@pytest.mark.parametrize(
    "call",
    [
        lambda mesh, shape: mesh(shape, (1, 2)),
        lambda mesh, shape: mesh(shape, 5),
        lambda mesh, shape: mesh(5, []),
        lambda mesh, shape: mesh(shape=shape, values=[1, 2]),
        lambda mesh, shape: mesh(shape, [1, 2]).slice(hosts="x"),
        lambda mesh, shape: mesh(shape, [1, 2]).slice(hosts=None),
        lambda mesh, shape: mesh(shape, [1, 2]).slice(hosts=1.0),
        lambda mesh, shape: mesh(shape, [1, 2]).slice(hosts=True),
        lambda mesh, shape: mesh(shape, [1, 2]).split(hosts="dp"),
        lambda mesh, shape: mesh(shape, [1, 2]).split(hosts=3),
        lambda mesh, shape: mesh(shape, [1, 2]).split(hosts=(1,)),
        lambda mesh, shape: mesh(shape, [1, 2]).split(hosts=("a", "b"), a=2.5),
        lambda mesh, shape: mesh(shape, [1, 2]).flatten(3),
        lambda mesh, shape: mesh(shape, [1, 2]).item(hosts="x"),
        lambda mesh, shape: mesh(shape, [1, 2])[0],
    ],
)
def test_odd_arguments_meet_the_same_answer(call: Any) -> None:
    shape = Extent(["hosts"], [2]).region.as_shape()
    got = _error_or_value(lambda: call(ValueMesh, shape))
    expected = _error_or_value(lambda: call(TheirValueMesh, their_shape(shape)))
    assert type(got) is type(expected) or type(got).__name__ == type(expected).__name__


@pytest.mark.parametrize(
    "request_",
    [
        {"b": ("c", "d"), "c": 3},
        {"b": ("c", "d"), "c": 2, "d": 3},
        {"b": ("c", "d"), "c": 4},
        {"b": ("c", "d"), "c": 2, "d": 2},
        {"b": ("c", "d")},
        {"b": ("c", "d", "e"), "d": 2},
        {"a": ("p", "q"), "b": ("q", "r"), "q": 2},
        {"a": ("b",), "b": ("a",)},
        {"a": ("b",)},
        {"b": ("b", "c"), "c": 3},
        {"b": ("c", "d"), "c": 0},
        {"b": ("c", "d"), "c": -2},
        {"a": ()},
        {"x": 3},
        {"b": ["c", "d"], "c": True},
    ],
)
def test_splits_agree(request_: dict[str, Any]) -> None:
    mine, monarchs = value_meshes(Extent(["a", "b"], [2, 6]).region.as_shape())
    agree(lambda: mine.split(**request_), lambda: monarchs.split(**request_))


def _error_or_value(operation: Any) -> Any:
    try:
        return operation()
    except Exception as error:  # noqa: BLE001
        return error


def test_a_large_mesh_prints_as_monarchs() -> None:
    shape = Extent(["hosts", "gpus"], [3, 8]).region.as_shape()
    values = [{"loss": 1.5, "name": "x" * 50}] * 24
    assert repr(ValueMesh(shape, values)) == repr(TheirValueMesh(their_shape(shape), values))


def test_a_value_is_read_when_it_is_looked_at_and_only_once() -> None:
    reads: list[int] = []

    def reading(rank: int) -> Any:
        return lambda: reads.append(rank) or f"value {rank}"

    mesh = ValueMesh.lazy(Extent(["gpus"], [4]).region.as_shape(), [reading(rank) for rank in range(4)])
    part = mesh.slice(gpus=slice(1, 3)).rename(gpus="dp")
    assert (len(mesh), part.sizes, reads) == (4, {"dp": 2}, [])
    assert part.item(dp=1) == "value 2"
    assert mesh.get(2) == "value 2"
    assert reads == [2]
    assert list(mesh.values()) == [f"value {rank}" for rank in range(4)]
    assert sorted(reads) == [0, 1, 2, 3]


def test_a_value_that_cannot_be_read_leaves_the_others() -> None:
    def unreadable() -> str:
        raise ModuleNotFoundError("no numpy here")

    mesh = ValueMesh.lazy(Extent(["gpus"], [2]).region.as_shape(), [lambda: "fine", unreadable])
    assert mesh.item(gpus=0) == "fine"
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no numpy here"):
            mesh.item(gpus=1)


def test_threads_that_look_at_once_see_one_value() -> None:
    entered, go_on = threading.Event(), threading.Event()
    reads: list[object] = []

    def slow() -> object:
        entered.set()
        assert go_on.wait(10)
        reads.append(object())
        return reads[-1]

    mesh = ValueMesh.lazy(Shape.unity(), [slow])
    seen: list[object] = []
    threads = [threading.Thread(target=lambda: seen.append(mesh.item())) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert seen == [reads[0], reads[0]]


@given(dense_shapes())
def test_a_mesh_survives_pickling(shape: Shape) -> None:
    mesh = ValueMesh.lazy(shape, [lambda rank=rank: rank for rank in shape.ranks()])
    copy = pickle.loads(pickle.dumps(mesh))
    assert isinstance(copy, ValueMesh)
    assert copy._shape == mesh._shape
    assert copy.values() == mesh.values() == shape.ranks()


def test_points_of_a_slice_count_from_zero() -> None:
    mesh, _ = value_meshes(Shape(["a", "b"], Slice(offset=4, sizes=[2, 2], strides=[4, 1])))
    assert [(point.rank, dict(point)) for point, _ in mesh] == [
        (0, {"a": 0, "b": 0}),
        (1, {"a": 0, "b": 1}),
        (2, {"a": 1, "b": 0}),
        (3, {"a": 1, "b": 1}),
    ]
    assert all(isinstance(point, Point) for point, _ in mesh)
