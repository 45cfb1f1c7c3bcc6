"""The ranks of a mesh: an offset, and a size and a stride for each dimension.

A ``Slice`` must contain exactly the ranks that Monarch's would, since a call to a part of a mesh reaches those ranks
only. It follows ``monarch._rust_bindings.monarch_hyperactor.shape.Slice``: the same operations, exception types and
messages. Two operations raise ``ValueError`` or ``IndexError`` here that return a wrong result in Monarch: a negative
step, and an element of an empty slice.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, overload

_UNSIGNED_END = 2**64


def unsigned(value: object, argument: str) -> int:
    """``value`` as a rank, a size or a stride. Raises Monarch's error if it cannot be one."""
    try:
        number: int = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"argument '{argument}': '{type(value).__name__}' object cannot be interpreted as an integer"
        ) from None
    if number < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if number >= _UNSIGNED_END:
        raise OverflowError("int too big to convert")
    return number


def _sequence(values: object, argument: str) -> Sequence[Any]:
    if isinstance(values, str):
        raise TypeError(f"argument '{argument}': Can't extract `str` to `Vec`")
    if not isinstance(values, Sequence):
        raise TypeError(f"argument '{argument}': '{type(values).__name__}' object cannot be cast as 'Sequence'")
    return values


def unsigned_list(values: object, argument: str) -> tuple[int, ...]:
    return tuple(unsigned(value, argument) for value in _sequence(values, argument))


def labels_of(values: object) -> tuple[str, ...]:
    labels = tuple(_sequence(values, "labels"))
    for label in labels:
        if not isinstance(label, str):
            raise TypeError(f"argument 'labels': '{type(label).__name__}' object cannot be cast as 'str'")
    return labels


def _check_layout(sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Raises ``ValueError`` unless the strides nest, so that no two coordinates have the same rank."""
    if len(sizes) != len(strides):
        raise ValueError(f"invalid dims: expected {len(sizes)}, got {len(strides)}")
    space = 1
    inner: tuple[int, int] | None = None
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if inner is not None:
            inner_stride, inner_size = inner
            if stride % inner_stride:
                raise ValueError("nonrectangular shape")
            if stride == inner_stride and size != 1 and inner_size != 1:
                raise ValueError("nonunique strides")
        if stride < space:
            raise ValueError(f"stride {stride} must be larger than size of previous space {space}")
        space = stride * size
        inner = (stride, size)


class Slice:
    """The ranks ``offset + sum(coordinate * stride)``, in row-major order of the coordinates."""

    __slots__ = ("_offset", "_sizes", "_strides")

    _offset: int
    _sizes: tuple[int, ...]
    _strides: tuple[int, ...]

    # Monarch pickles a slice as a call of __new__, so __init__ would not be called.
    def __new__(cls, *, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Slice:
        new = cls.unchecked(
            unsigned(offset, "offset"), unsigned_list(sizes, "sizes"), unsigned_list(strides, "strides")
        )
        _check_layout(new._sizes, new._strides)
        return new

    @staticmethod
    def new_row_major(ranks: Sequence[int]) -> Slice:
        """The dense slice with dimensions of these sizes, starting at rank 0."""
        sizes = unsigned_list(ranks, "sizes")
        return Slice.unchecked(0, sizes, _row_major(sizes))

    @staticmethod
    def unchecked(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Slice:
        """A slice without the check of its layout, which Monarch's slices with empty dimensions can fail."""
        new = object.__new__(Slice)
        new._offset, new._sizes, new._strides = offset, sizes, strides
        return new

    @staticmethod
    def from_list(ranks: list[int]) -> list[Slice]:
        """One-dimensional slices that together cover ``ranks``, in ascending order."""
        remaining = sorted(unsigned_list(ranks, "ranks"))
        slices = []
        while remaining:
            stride = remaining[1] - remaining[0] if len(remaining) > 1 else 0
            count = 1
            while stride and count < len(remaining) and remaining[count] - remaining[count - 1] == stride:
                count += 1
            slices.append(Slice(offset=remaining[0], sizes=[count], strides=[stride or 1]))
            remaining = remaining[count:]
        return slices

    @property
    def ndim(self) -> int:
        return len(self._sizes)

    @property
    def offset(self) -> int:
        return self._offset

    @property
    def sizes(self) -> list[int]:
        return list(self._sizes)

    @property
    def strides(self) -> list[int]:
        return list(self._strides)

    def nditem(self, coordinates: Sequence[int]) -> int:
        """The rank at these coordinates, which as in Monarch are not checked against the sizes."""
        numbers = unsigned_list(coordinates, "coordinates")
        if len(numbers) != self.ndim:
            raise IndexError(f"invalid dims: expected {self.ndim}, got {len(numbers)}")
        return self._offset + int(sum(map(operator.mul, numbers, self._strides)))

    def coordinates(self, value: int) -> list[int]:
        """The coordinates of rank ``value``. Raises ``ValueError`` if it is not in this slice."""
        remainder = unsigned(value, "value") - self._offset
        result = [0] * self.ndim
        by_stride = sorted(range(self.ndim), key=lambda dim: self._strides[dim], reverse=True)
        for dim in by_stride if remainder >= 0 and len(self) else ():
            if self._sizes[dim] > 1:
                result[dim], remainder = divmod(remainder, self._strides[dim])
        if remainder or any(coordinate >= size for coordinate, size in zip(result, self._sizes, strict=True)):
            raise ValueError(f"value {value} not in slice")
        return result

    def index(self, value: int) -> int:
        """The position of rank ``value`` in this slice; the inverse of ``get``."""
        return int(sum(map(operator.mul, self.coordinates(value), _row_major(self._sizes))))

    def get(self, index: int) -> int:
        """The rank at position ``index``. Raises ``ValueError`` if there are fewer ranks."""
        position = unsigned(index, "index")
        if position >= len(self):
            raise ValueError(f"index {position} out of range {len(self)}")
        return self._at(position)

    def _at(self, position: int) -> int:
        rank = self._offset
        for size, stride in zip(reversed(self._sizes), reversed(self._strides), strict=True):
            position, coordinate = divmod(position, size)
            rank += coordinate * stride
        return rank

    @overload
    def __getitem__(self, i: int) -> int: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[int, ...]: ...
    def __getitem__(self, i: int | slice) -> int | tuple[int, ...]:
        if isinstance(i, slice):
            positions = range(*i.indices(len(self)))
            if positions.step < 0:
                raise IndexError("Only positive indices are support")
            return tuple(map(self._at, positions))
        if not hasattr(i, "__index__") or i < 0:
            raise TypeError(f"argument 'range': expected an int, not negative, or a slice, got {i!r}")
        if i >= len(self):
            raise IndexError(f"index {i} out of range {len(self)}")
        return self._at(i)

    def __len__(self) -> int:
        return math.prod(self._sizes)

    def __iter__(self) -> Iterator[int]:
        if self._strides == _row_major(self._sizes):
            return iter(range(self._offset, self._offset + len(self)))
        steps = (range(0, size * stride, stride) for size, stride in zip(self._sizes, self._strides, strict=True))
        return (self._offset + sum(offsets) for offsets in itertools.product(*steps))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Slice):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return self._offset, self._sizes, self._strides

    def __reduce__(self) -> tuple[Any, ...]:
        return Slice.unchecked, (self._offset, self._sizes, self._strides)

    def __repr__(self) -> str:
        return f"Slice {{ offset: {self._offset}, sizes: {self.sizes}, strides: {self.strides} }}"


def _row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense slice."""
    inner = itertools.accumulate(reversed(sizes[1:]), operator.mul, initial=1) if sizes else ()
    return tuple(inner)[::-1]
