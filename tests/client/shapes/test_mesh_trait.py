"""A mesh is sliced, split, flattened and renamed as Monarch's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate.shapes.shape import Extent, Shape
from tests.client.beside_monarch import agree, value_meshes
from tests.client.shapes.strategies import dense_shapes, operations


@given(dense_shapes(), st.lists(operations, max_size=5))
def test_any_sequence_of_operations_has_the_same_result(shape: Shape, steps: list[tuple[str, dict[str, Any]]]) -> None:
    actual, expected = value_meshes(shape)
    agree(lambda: actual, lambda: expected)
    for name, arguments in steps:
        after = []

        def actual_step(name: str = name, arguments: dict[str, Any] = arguments, actual: Any = actual) -> Any:
            after.append(getattr(actual, name)(**arguments))  # noqa: B023
            return after[-1]  # noqa: B023

        def expected_step(name: str = name, arguments: dict[str, Any] = arguments, mesh: Any = expected) -> Any:
            after.append(getattr(mesh, name)(**arguments))  # noqa: B023
            return after[-1]  # noqa: B023

        if agree(actual_step, expected_step):
            actual, expected = after


@pytest.mark.parametrize("sizes", [[1, 0], [3, 0], [2, 0, 3]])
def test_an_index_of_a_mesh_with_an_empty_dimension_agrees(sizes: list[int]) -> None:
    labels = ["a", "b", "c"][: len(sizes)]
    actual, expected = value_meshes(Extent(labels, sizes).region.as_shape())
    agree(lambda: actual.slice(a=0), lambda: expected.slice(a=0))


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
    actual, expected = value_meshes(Extent(["a", "b"], [2, 6]).region.as_shape())
    agree(lambda: actual.split(**request_), lambda: expected.split(**request_))


@pytest.mark.parametrize("selection", ["x", 0.5, None, [0]])
def test_what_selects_no_index_is_explained(selection: object) -> None:
    actual, _ = value_meshes(Extent(["a"], [2]).region.as_shape())
    with pytest.raises(TypeError, match=r"^slice\(a=.*\): expected an index, such as 0, or a slice, .*dimensions: a=2"):
        actual.slice(a=selection)
