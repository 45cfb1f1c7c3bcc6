"""A ValueMesh behaves as Monarch's, and reads each value once, when it is first accessed."""

from __future__ import annotations

import contextlib
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from monarch.actor import ValueMesh as TheirValueMesh

from meshgate.shapes.ndslice import Slice
from meshgate.shapes.shape import Extent, Point, Shape
from meshgate.shapes.value_mesh import ValueMesh
from tests.client.beside_monarch import agree, their_shape, value_meshes
from tests.client.shapes.strategies import coordinates, dense_shapes, names, operations


@given(dense_shapes(), operations, coordinates, st.integers(-1, 9), st.lists(names, max_size=3))
@example(
    Extent(["dp", "hosts", "pp"], [0, 2, 0]).region.as_shape(), ("slice", {}), {"pp": 0, "dp": 0, "hosts": 0}, 0, []
)
def test_accessors_agree(
    shape: Shape, step: tuple[str, dict[str, Any]], at: dict[str, int], rank: int, dims: list[str]
) -> None:
    actual, expected = value_meshes(shape)
    with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError, ZeroDivisionError):
        actual, expected = (getattr(mesh, step[0])(**step[1]) for mesh in (actual, expected))
    agree(lambda: actual.item(**at), lambda: expected.item(**at))
    agree(lambda: actual.get(rank), lambda: expected.get(rank))
    agree(lambda: list(actual.items()), lambda: list(expected.items()))
    agree(lambda: list(actual), lambda: list(expected))
    agree(lambda: actual.extent, lambda: expected.extent)
    agree(actual.size, expected.size)
    agree(lambda: actual.size(dims), lambda: expected.size(dims))
    for dim in dims:
        agree(lambda: actual.size(dim), lambda: expected.size(dim))  # noqa: B023


@given(dense_shapes(), st.lists(st.integers(0, 30), max_size=30))
def test_a_mesh_requires_one_value_for_each_rank(shape: Shape, values: list[int]) -> None:
    expected = their_shape(shape)
    agree(lambda: ValueMesh(shape, values), lambda: TheirValueMesh(expected, values))
    pairs = list(enumerate(values))
    agree(lambda: ValueMesh.from_indexed(shape, pairs), lambda: TheirValueMesh.from_indexed(expected, pairs))


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
def test_unusual_arguments_have_the_same_outcome(call: Any) -> None:
    shape = Extent(["hosts"], [2]).region.as_shape()
    got = _error_or_value(lambda: call(ValueMesh, shape))
    expected = _error_or_value(lambda: call(TheirValueMesh, their_shape(shape)))
    assert type(got) is type(expected) or type(got).__name__ == type(expected).__name__


def _error_or_value(operation: Any) -> Any:
    try:
        return operation()
    except Exception as error:  # noqa: BLE001
        return error


@pytest.mark.parametrize(
    ("access", "error", "text"),
    [
        (
            lambda mesh: mesh.item(hosts=0, gpus=0, rows=1),
            KeyError,
            "item has extra dimensions: ['rows']. The sizes of the dimensions: hosts=2, gpus=4. Write item(hosts=0, "
            "gpus=0)",
        ),
        (
            lambda mesh: mesh.slice(gpus=0, hosts=0).item(gpus=0),
            KeyError,
            "item has extra dimensions: ['gpus']. The mesh has no dimensions. Write item()",
        ),
        (
            lambda mesh: mesh.item(hosts=1, gpus=4),
            IndexError,
            "rank 8 not in current shape. The sizes of the dimensions: hosts=2, gpus=4",
        ),
        (
            np.asarray,
            TypeError,
            "a ValueMesh is not an array. Write numpy.asarray(result.values()) for one of its values, in the order of "
            "their ranks",
        ),
    ],
)
def test_a_wrong_access_is_answered_with_what_to_write(access: Any, error: type[Exception], text: str) -> None:
    mesh = ValueMesh(Extent(["hosts", "gpus"], [2, 4]).region.as_shape(), list(range(8)))
    with pytest.raises(error) as caught:
        access(mesh)
    assert str(caught.value) == text


def test_a_large_mesh_prints_like_monarchs() -> None:
    shape = Extent(["hosts", "gpus"], [3, 8]).region.as_shape()
    values = [{"loss": 1.5, "name": "x" * 50}] * 24
    assert repr(ValueMesh(shape, values)) == repr(TheirValueMesh(their_shape(shape), values))


def test_a_value_is_read_once_when_it_is_accessed() -> None:
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


def test_an_unreadable_value_leaves_the_others_readable() -> None:
    def unreadable() -> str:
        raise ModuleNotFoundError("no numpy here")

    mesh = ValueMesh.lazy(Extent(["gpus"], [2]).region.as_shape(), [lambda: "fine", unreadable])
    assert mesh.item(gpus=0) == "fine"
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no numpy here"):
            mesh.item(gpus=1)


def test_concurrent_threads_see_one_value() -> None:
    entered, resume = threading.Event(), threading.Event()
    reads: list[object] = []

    def slow() -> object:
        entered.set()
        assert resume.wait(10)
        reads.append(object())
        return reads[-1]

    mesh = ValueMesh.lazy(Shape.unity(), [slow])
    seen: list[object] = []
    threads = [threading.Thread(target=lambda: seen.append(mesh.item())) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(10)
    resume.set()
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


def test_a_notebook_shows_a_table_of_the_values() -> None:
    mesh = ValueMesh(Extent(["hosts", "gpus"], [1, 2]).region.as_shape(), ["<a>", 2])
    assert "&lt;a&gt;" in mesh._repr_html_()
    assert "hosts \\ gpus" in mesh._repr_html_()


class Printer:
    """What IPython gives to ``_repr_pretty_``."""

    def __init__(self) -> None:
        self.printed = ""

    def text(self, text: str) -> None:
        self.printed += text


def pretty(mesh: ValueMesh[Any], *, cycle: bool = False) -> str:
    printer = Printer()
    mesh._repr_pretty_(printer, cycle)
    return printer.printed


def test_a_table_shows_the_values_of_a_slice_side_by_side() -> None:
    mesh = ValueMesh(Extent(["hosts", "gpus"], [2, 2]).region.as_shape(), [{"loss": n / 2} for n in range(4)])
    assert mesh.slice(hosts=1).table().splitlines() == ["rank  loss", "   0   1.0", "   1   1.5"]
    assert mesh.table(most=2).splitlines()[2] == "… 2 more"
    with pytest.raises(ValueError, match="show at least one rank"):
        mesh.table(0)


def test_ipython_shows_plain_values_as_a_table_and_repr_stays_monarchs() -> None:
    shape = Extent(["gpus"], [2]).region.as_shape()
    plain, other = ValueMesh(shape, [{"loss": 1.0}, {"loss": 2.0}]), ValueMesh(shape, [[1], [2]])
    assert pretty(plain) == "ValueMesh({gpus: 2}):\nrank  loss\n   0   1.0\n   1   2.0"
    assert pretty(other) == repr(other)
    assert pretty(plain, cycle=True) == repr(plain)
    assert str(plain) == repr(plain) == repr(TheirValueMesh(their_shape(shape), plain.values()))


def test_a_subscript_is_the_class_itself_as_monarchs() -> None:
    assert ValueMesh[int] is ValueMesh  # type: ignore[comparison-overlap]
