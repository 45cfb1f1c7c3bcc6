"""Compares the outcomes of an operation on meshgate's classes and on Monarch's."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from monarch._rust_bindings.monarch_hyperactor import shape as theirs
from monarch.actor import ValueMesh as TheirValueMesh

from meshgate.shapes import shape as ours
from meshgate.shapes.value_mesh import ValueMesh

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
    """A comparable form of a value of either side."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    kind = type(value).__name__
    return (kind, *map(plain, _FACTS[kind](value))) if kind in _FACTS else value


def outcome(operation: Callable[[], Any]) -> Any:
    """The plain result, or the exception."""
    try:
        return plain(operation())
    except Exception as error:  # noqa: BLE001
        return error


def agree(operation: Callable[[], Any], monarchs_operation: Callable[[], Any]) -> bool:
    """Asserts that both return the same value, or raise the same type with a message that contains Monarch's. True for
    a value."""
    actual, expected = outcome(operation), outcome(monarchs_operation)
    if isinstance(expected, Exception):
        assert isinstance(actual, type(expected)), f"{actual!r}, but Monarch raises {expected!r}"
        assert _text(expected) in _text(actual)
        return False
    assert not isinstance(actual, Exception), f"{actual!r}, but Monarch returns {expected!r}"
    assert actual == expected
    return True


def _text(error: Exception) -> str:
    return str(error.args[0] if isinstance(error, KeyError) else error)


def their_shape(shape: ours.Shape) -> theirs.Shape:
    """Built from bytes, since Monarch's constructor rejects some slices that Monarch itself creates."""
    ranks = shape.ndslice
    labels = [label.encode() for label in shape.labels]
    parts = [_integers(len(labels)), *(_integers(len(label)) + label for label in labels)]
    parts += [_integers(ranks.offset), *(_integers(len(each), *each) for each in (ranks.sizes, ranks.strides))]
    return theirs.Shape.from_bytes(b"".join(parts))


def _integers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def their_extent(extent: ours.Extent) -> theirs.Extent:
    return theirs.Extent(extent.labels, extent.sizes)


def value_meshes(shape: ours.Shape) -> tuple[ValueMesh[int], Any]:
    """A mesh of each side whose values are its ranks."""
    return ValueMesh(shape, shape.ranks()), TheirValueMesh(their_shape(shape), shape.ranks())
