"""The same operation on meshgate's classes and on Monarch's, and whether the outcomes are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._rust_bindings.monarch_hyperactor import shape as theirs
from monarch.actor import ValueMesh as TheirValueMesh

from meshgate import shape as ours
from meshgate.value_mesh import ValueMesh

KINDS = ("Extent", "Point", "Region", "Shape", "Slice")


_FACTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "Region": lambda region: (region.labels, region.slice()),
    "Point": lambda point: (point.rank, point.extent, repr(point), str(point), dict(point), len(point)),
    "Extent": lambda extent: (extent.labels, extent.sizes, extent.nelements, repr(extent), dict(extent)),
    "Shape": lambda shape: (shape.labels, shape.ndslice, repr(shape), str(shape), len(shape)),
    "Slice": lambda ranks: (ranks.offset, ranks.sizes, ranks.strides, repr(ranks), str(ranks)),
    "ValueMesh": lambda mesh: (mesh._shape, list(mesh.values()), repr(mesh), mesh.sizes, len(mesh)),
}


def plain(value: Any) -> Any:
    """What can be compared of a value of either side."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    kind = type(value).__name__
    return (kind, *map(plain, _FACTS[kind](value))) if kind in _FACTS else value


def outcome(operation: Callable[[], Any]) -> Any:
    """The plain result, or the type and text of the exception."""
    try:
        return plain(operation())
    except Exception as error:  # noqa: BLE001
        return error


def agree(mine: Callable[[], Any], monarchs: Callable[[], Any]) -> bool:
    """Asserts that both give the same value, or raise the same type with the same words. True for a value."""
    got, expected = outcome(mine), outcome(monarchs)
    if isinstance(expected, Exception):
        assert isinstance(got, type(expected)), f"{got!r} where Monarch raises {expected!r}"
        assert str(got) == str(expected)
        return False
    assert not isinstance(got, Exception), f"{got!r} where Monarch gives {expected!r}"
    assert got == expected
    return True


def their_shape(shape: ours.Shape) -> theirs.Shape:
    return theirs.Shape.from_bytes(shape.to_bytes())


def their_extent(extent: ours.Extent) -> theirs.Extent:
    return theirs.Extent(extent.labels, extent.sizes)


def value_meshes(shape: ours.Shape) -> tuple[ValueMesh[int], Any]:
    """A mesh of each side whose values are its ranks."""
    return ValueMesh(shape, shape.ranks()), TheirValueMesh(their_shape(shape), shape.ranks())
