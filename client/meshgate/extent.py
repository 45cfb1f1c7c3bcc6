"""How large a mesh is, and where in it something stands: ``Extent`` and ``Point``, as Monarch's.

Both are mappings from the labels of dimensions, to sizes and to coordinates. Where Monarch's look like mappings
without being ones (no ``values``, no ``get``), these are. A label that does not exist raises an error that is both
Monarch's ``ValueError`` and the ``KeyError`` that a mapping owes its callers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshgate.bincode import Reader, dump_number, dump_numbers, dump_texts
from meshgate.ndslice import Slice, labels_of, unsigned, unsigned_list

if TYPE_CHECKING:
    from meshgate.shape import Region

__all__ = ["Extent", "Point", "debug_text"]

_ESCAPES = {"\t": "\\t", "\n": "\\n", "\r": "\\r", "\0": "\\0", '"': '\\"', "\\": "\\\\"}


def debug_text(text: str) -> str:
    """``text`` in double quotes, escaped as Monarch prints labels."""
    characters = (_ESCAPES.get(c) or (c if c.isprintable() else f"\\u{{{ord(c):x}}}") for c in text)
    return f'"{"".join(characters)}"'


class NoSuchDimension(ValueError, KeyError):
    __str__ = Exception.__str__  # KeyError's would quote the message


def _require_label(label: object) -> None:
    if not isinstance(label, str):
        raise TypeError(f"argument 'label': '{type(label).__name__}' object cannot be cast as 'str'")


class Extent(Mapping[str, int]):
    """Label → size of each dimension, in order."""

    __slots__ = ("_labels", "_sizes")

    def __init__(self, labels: Sequence[str], sizes: Sequence[int]) -> None:
        self._labels = labels_of(labels)
        self._sizes = unsigned_list(sizes, "sizes")
        if len(self._labels) != len(self._sizes):
            raise ValueError(f"label/sizes dimension mismatch: {len(self._labels)} != {len(self._sizes)}")

    @property
    def labels(self) -> list[str]:
        return list(self._labels)

    @property
    def sizes(self) -> list[int]:
        return list(self._sizes)

    @property
    def nelements(self) -> int:
        return math.prod(self._sizes)

    @property
    def region(self) -> Region:
        """The dense region of this extent, from rank 0."""
        # A Region has an extent, an extent a region: one of the two imports late.
        from meshgate.shape import Region  # noqa: PLC0415

        return Region(self._labels, Slice.new_row_major(self._sizes))

    def __getitem__(self, label: str) -> int:
        _require_label(label)
        for known, size in zip(self._labels, self._sizes, strict=True):
            if known == label:
                return size
        raise NoSuchDimension(f"Dimension '{label}' not found")

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __contains__(self, label: object) -> bool:
        return label in self._labels

    def __len__(self) -> int:
        return len(self._labels)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Extent):
            return NotImplemented
        return (self._labels, self._sizes) == (other._labels, other._sizes)

    def __hash__(self) -> int:
        return hash((self._labels, self._sizes))

    def __repr__(self) -> str:
        entries = (f"{_plain_or_quoted(label)}: {size}" for label, size in zip(self._labels, self._sizes, strict=True))
        return f"{{{', '.join(entries)}}}"

    def to_bytes(self) -> bytes:
        return dump_texts(self._labels) + dump_numbers(self._sizes)

    @staticmethod
    def from_bytes(data: bytes) -> Extent:
        reader = Reader(data)
        extent = Extent(reader.texts(), reader.numbers())
        reader.end()
        return extent

    def __reduce__(self) -> tuple[Any, ...]:
        return Extent, (self._labels, self._sizes)


def _plain_or_quoted(label: str) -> str:
    plain = all((c.isascii() and c.isalnum()) or c == "_" for c in label)
    return label if plain else debug_text(label)


class Point(Mapping[str, int]):
    """Label → coordinate of the ``rank``-th element of an extent."""

    __slots__ = ("_coordinates", "_extent", "_rank")

    def __init__(self, rank: int, extent: Extent) -> None:
        self._rank = unsigned(rank, "rank")
        if not isinstance(extent, Extent):
            raise TypeError(f"argument 'extent': '{type(extent).__name__}' object cannot be cast as 'Extent'")
        self._extent = extent
        if self._rank >= extent.nelements:
            raise ValueError(f"out of range: total ranks {extent.nelements}; does not contain rank {self._rank}")
        rest, coordinates = self._rank, []
        for size in reversed(extent.sizes):
            rest, coordinate = divmod(rest, size)
            coordinates.append(coordinate)
        self._coordinates = tuple(reversed(coordinates))

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def extent(self) -> Extent:
        return self._extent

    def size(self, label: str) -> int:
        """The size of a dimension of the extent."""
        return self._extent[label]

    def __getitem__(self, label: str) -> int:
        _require_label(label)
        for known, coordinate in zip(self._extent, self._coordinates, strict=True):
            if known == label:
                return coordinate
        raise NoSuchDimension(f"Dimension '{label}' not found")

    def __iter__(self) -> Iterator[str]:
        return iter(self._extent)

    def __contains__(self, label: object) -> bool:
        return label in self._extent

    def __len__(self) -> int:
        return len(self._extent)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Point):
            return NotImplemented
        return (self._rank, self._extent) == (other._rank, other._extent)

    def __hash__(self) -> int:
        return hash((self._rank, self._extent))

    def __repr__(self) -> str:
        entries = (
            f"'{label}': {coordinate}/{size}"
            for label, coordinate, size in zip(self._extent, self._coordinates, self._extent.sizes, strict=True)
        )
        return f"{{{', '.join(entries)}}}"

    def to_bytes(self) -> bytes:
        return dump_number(self._rank) + self._extent.to_bytes()

    @staticmethod
    def from_bytes(data: bytes) -> Point:
        return Point(Reader(data).number(), Extent.from_bytes(data[8:]))

    def __reduce__(self) -> tuple[Any, ...]:
        return Point, (self._rank, self._extent)
