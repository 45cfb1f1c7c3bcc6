"""The shapes of meshes: ``Extent``, ``Point``, ``Region`` and ``Shape``, computed on the laptop.

They follow the classes of ``monarch._rust_bindings.monarch_hyperactor.shape`` in behavior, representation and errors; a
property test compares each operation with Monarch's. All are immutable and, unlike Monarch's, hashable.

``Extent`` and ``Point`` are complete mappings, while Monarch's lack ``values`` and ``get``. An unknown label raises an
error that is both Monarch's ``ValueError`` and the ``KeyError`` of a mapping.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from meshgate.monarch_classes import monarch_api
from meshgate.shapes.ndslice import Slice, labels_of, unsigned, unsigned_list

if TYPE_CHECKING:
    from typing_extensions import Self

    from meshgate_wire import messages


_ESCAPES = {"\t": "\\t", "\n": "\\n", "\r": "\\r", "\0": "\\0", '"': '\\"', "\\": "\\\\"}
_INTEGER = struct.Struct("<Q")


def _quoted(text: str) -> str:
    """``text`` in double quotes, escaped as Monarch prints labels."""
    characters = (_ESCAPES.get(c) or (c if c.isprintable() else f"\\u{{{ord(c):x}}}") for c in text)
    return f'"{"".join(characters)}"'


class UnknownDimension(ValueError, KeyError):
    __str__ = Exception.__str__  # KeyError would quote the message


def _is_monarchs(value: Any, name: str) -> TypeGuard[Any]:
    """Whether ``value`` is an object of the class of ``monarch.actor`` called ``name``."""
    return type(value) is monarch_api().get(name)


def _require_label(label: object) -> None:
    if not isinstance(label, str):
        raise TypeError(f"argument 'label': '{type(label).__name__}' object cannot be cast as 'str'")


class Extent(Mapping[str, int]):
    """The size of each labelled dimension, in order."""

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
        """The dense region with this extent, starting at rank 0."""
        return Region(self._labels, Slice.new_row_major(self._sizes))

    def __getitem__(self, label: str) -> int:
        _require_label(label)
        for known, size in zip(self._labels, self._sizes, strict=True):
            if known == label:
                return size
        raise UnknownDimension(f"Dimension '{label}' not found")

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __contains__(self, label: object) -> bool:
        return label in self._labels

    def __len__(self) -> int:
        return len(self._labels)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Extent):
            return (self._labels, self._sizes) == (other._labels, other._sizes)
        if _is_monarchs(other, "Extent"):
            return (self.labels, self.sizes) == (other.labels, other.sizes)
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self._labels, self._sizes))

    def __repr__(self) -> str:
        entries = (f"{_plain_or_quoted(label)}: {size}" for label, size in zip(self._labels, self._sizes, strict=True))
        return f"{{{', '.join(entries)}}}"

    @staticmethod
    def from_bytes(data: bytes) -> Extent:
        """Decodes the bytes in which Monarch pickles an extent."""
        reader = Decoder(data)
        extent = Extent(reader.strings(), reader.integers())
        reader.end()
        return extent

    def __reduce__(self) -> tuple[Any, ...]:
        return Extent, (self._labels, self._sizes)


def _plain_or_quoted(label: str) -> str:
    plain = all((c.isascii() and c.isalnum()) or c == "_" for c in label)
    return label if plain else _quoted(label)


class Point(Mapping[str, int]):
    """The coordinates of the ``rank``-th element of an extent, by label."""

    __slots__ = ("_coordinates", "_extent", "_rank")

    def __init__(self, rank: int, extent: Extent) -> None:
        self._rank = unsigned(rank, "rank")
        if not isinstance(extent, Extent):
            raise TypeError(f"argument 'extent': '{type(extent).__name__}' object cannot be cast as 'Extent'")
        self._extent = extent
        if self._rank >= extent.nelements:
            raise ValueError(f"out of range: total ranks {extent.nelements}; does not contain rank {self._rank}")
        remainder, coordinates = self._rank, []
        for size in reversed(extent.sizes):
            remainder, coordinate = divmod(remainder, size)
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
        raise UnknownDimension(f"Dimension '{label}' not found")

    def __iter__(self) -> Iterator[str]:
        return iter(self._extent)

    def __contains__(self, label: object) -> bool:
        return label in self._extent

    def __len__(self) -> int:
        return len(self._extent)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Point):
            return (self._rank, self._extent) == (other._rank, other._extent)
        if _is_monarchs(other, "Point"):
            return (self._rank, self._extent) == (other.rank, other.extent)
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self._rank, self._extent))

    def __repr__(self) -> str:
        entries = (
            f"'{label}': {coordinate}/{size}"
            for label, coordinate, size in zip(self._extent, self._coordinates, self._extent.sizes, strict=True)
        )
        return f"{{{', '.join(entries)}}}"

    @staticmethod
    def from_bytes(data: bytes) -> Point:
        """Decodes the bytes in which Monarch pickles a point."""
        return Point(Decoder(data).integer(), Extent.from_bytes(data[8:]))

    def __reduce__(self) -> tuple[Any, ...]:
        return Point, (self._rank, self._extent)


class _Labelled:
    """A slice with labelled dimensions."""

    __slots__ = ("_labels", "_slice")

    def __init__(self, labels: Sequence[str], slice: Slice) -> None:
        self._labels = labels_of(labels)
        if not isinstance(slice, Slice):
            raise TypeError(f"argument 'slice': '{type(slice).__name__}' object cannot be cast as 'Slice'")
        self._slice = slice
        if len(self._labels) != slice.ndim:
            raise ValueError(f"label slice dimension mismatch: {len(self._labels)} != {slice.ndim}")

    @property
    def labels(self) -> list[str]:
        return list(self._labels)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decodes the bytes in which Monarch pickles a region or a shape."""
        reader = Decoder(data)
        labels, offset = reader.strings(), reader.integer()
        ranks = Slice.unchecked(offset, tuple(reader.integers()), tuple(reader.integers()))
        reader.end()
        return cls(labels, ranks)

    def to_wire(self) -> messages.Region:
        from meshgate_wire import messages  # noqa: PLC0415 - an actor process imports this module, and sends no messages

        return messages.Region(
            labels=self._labels,
            offset=self._slice.offset,
            sizes=tuple(self._slice.sizes),
            strides=tuple(self._slice.strides),
        )

    @classmethod
    def from_wire(cls, region: messages.Region) -> Self:
        """Raises ``ValueError`` if the region is invalid."""
        ranks = Slice(offset=region.offset, sizes=region.sizes, strides=region.strides)
        return cls(region.labels, ranks)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return (self._labels, self._slice) == (other._labels, other._slice)

    def __hash__(self) -> int:
        return hash((self._labels, self._slice))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._labels, self._slice)

    def __repr__(self) -> str:
        labels = ", ".join(map(_quoted, self._labels))
        return f"{type(self).__name__} {{ labels: [{labels}], slice: {self._slice!r} }}"


class Region(_Labelled):
    """Labelled ranks within a larger space of ranks."""

    __slots__ = ()

    def slice(self) -> Slice:
        return self._slice

    def as_shape(self) -> Shape:
        return Shape(self._labels, self._slice)

    def point_of_base_rank(self, rank: int) -> Point:
        """The point of a rank of the larger space. Raises ``ValueError`` if the rank is not in this region."""
        try:
            position = self._slice.index(rank)
        except ValueError:
            raise ValueError(
                f"out of range base rank: this base rank {rank} does not belong to this region: {rank}"
            ) from None
        return Point(position, Extent(self._labels, self._slice.sizes))


class Shape(_Labelled):
    """Labelled ranks, from which parts can be selected by label."""

    __slots__ = ()

    @staticmethod
    def unity() -> Shape:
        """The shape of a single element, without dimensions."""
        return Shape([], Slice(offset=0, sizes=[], strides=[]))

    @property
    def ndslice(self) -> Slice:
        return self._slice

    @property
    def extent(self) -> Extent:
        return Extent(self._labels, self._slice.sizes)

    @property
    def region(self) -> Region:
        return Region(self._labels, self._slice)

    def ranks(self) -> list[int]:
        return list(self._slice)

    def coordinates(self, rank: int) -> dict[str, int]:
        return dict(zip(self._labels, self._slice.coordinates(rank), strict=True))

    def at(self, label: str, index: int) -> Shape:
        """The part at one index of a dimension, which is removed."""
        start = unsigned(index, "index")
        dim = self._dimension(label)
        self._check_range(dim, range(start, start + 1))
        ranks = self._slice
        offset = ranks.offset + start * ranks.strides[dim]
        kept = Slice(offset=offset, sizes=_without(ranks.sizes, dim), strides=_without(ranks.strides, dim))
        return Shape(_without(self.labels, dim), kept)

    def select(self, label: str, slice: slice) -> Shape:
        """The part in a range of a dimension, which is kept."""
        dim = self._dimension(label)
        if not isinstance(slice, _builtin_slice):
            raise TypeError(f"argument 'slice': '{type(slice).__name__}' object cannot be cast as 'slice'")
        return Shape(self._labels, self._restrict(dim, range(*slice.indices(self._slice.sizes[dim]))))

    def index(self, **kwargs: int) -> Shape:
        """``at`` for several dimensions."""
        shape = self
        for label, index in kwargs.items():
            shape = shape.at(label, index)
        return shape

    def _dimension(self, label: str) -> int:
        if not isinstance(label, str):
            raise TypeError(f"argument 'label': '{type(label).__name__}' object cannot be cast as 'str'")
        if label not in self._labels:
            raise ValueError(f"invalid labels `[{_quoted(label)}]`")
        return self._labels.index(label)

    def _restrict(self, dim: int, indices: range) -> Slice:
        self._check_range(dim, indices)
        sizes, strides = self._slice.sizes, self._slice.strides
        offset = self._slice.offset + indices.start * strides[dim]
        sizes[dim] = len(indices)
        strides[dim] *= indices.step
        return Slice(offset=offset, sizes=sizes, strides=strides)

    def _check_range(self, dim: int, indices: range) -> None:
        sizes = self._slice.sizes
        text = f"{indices.start}:{indices.stop}:{indices.step}"
        if indices.step < 0:
            raise ValueError(f"range {text} has a negative step; use a positive one")
        if indices.start >= sizes[dim]:
            raise ValueError(f"out of range {text} for dimension {self._labels[dim]} of size {sizes[dim]}")
        if not indices:
            raise ValueError(f"empty range {text}")

    def __len__(self) -> int:
        return len(self._slice)

    def __str__(self) -> str:
        sizes = zip(self._labels, self._slice.sizes, strict=True)
        return f"{{{','.join(f'{label}={size}' for label, size in sizes)}}}"


_builtin_slice = slice


def _without(values: list[Any], position: int) -> list[Any]:
    return values[:position] + values[position + 1 :]


# Results of endpoints contain these bytes: a ``Point``, a ``ValueMesh``, or the region of a mesh. The format is
# little-endian: an unsigned integer has eight bytes, a list its length and its items, a string its length and its
# UTF-8.


class Decoder:
    """Decodes values one after the other. Raises ``ValueError`` if the data is truncated or has trailing bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def _take(self, size: int) -> bytes:
        piece = self._data[self._position : self._position + size]
        if len(piece) != size:
            raise ValueError(f"truncated data: {size - len(piece)} bytes are missing")
        self._position += size
        return piece

    def integer(self) -> int:
        return int(_INTEGER.unpack(self._take(_INTEGER.size))[0])

    def integers(self) -> list[int]:
        count = self.integer()
        return list(struct.unpack(f"<{count}Q", self._take(count * _INTEGER.size)))

    def strings(self) -> list[str]:
        return [self._take(self.integer()).decode() for _ in range(self.integer())]

    def end(self) -> None:
        """Checks that nothing is left."""
        if self._position != len(self._data):
            raise ValueError(f"{len(self._data) - self._position} trailing bytes")
