"""Which ranks a mesh holds: an offset, and for each dimension a size and a stride.

A ``Slice`` of a client's mesh must name exactly the ranks that Monarch's would, since a call to a part of a mesh
reaches these ranks and no others. It follows ``monarch._rust_bindings.monarch_hyperactor.shape.Slice``: same
operations, same exception types, same words. Two things Monarch answers with nonsense raise ``ValueError`` or
``IndexError`` here: a negative step, and the element of an empty slice.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, overload

__all__ = ["Slice", "labels_of", "unsigned", "unsigned_list"]

_TOO_BIG = 2**64


def unsigned(value: object, argument: str) -> int:
    """``value`` as a number that a rank, a size or a stride can be, or Monarch's error for it."""
    try:
        number: int = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"argument '{argument}': '{type(value).__name__}' object cannot be interpreted as an integer"
        ) from None
    if number < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if number >= _TOO_BIG:
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
    """Raises ``ValueError`` unless the strides nest: no two coordinates may name the same rank."""
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

    # Monarch pickles its slices as a call of __new__, so that is where ours are made.
    def __new__(cls, *, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Slice:
        made = cls.trusted(unsigned(offset, "offset"), unsigned_list(sizes, "sizes"), unsigned_list(strides, "strides"))
        _check_layout(made._sizes, made._strides)
        return made

    @staticmethod
    def new_row_major(ranks: Sequence[int]) -> Slice:
        """The dense slice from rank 0 whose dimensions have these sizes."""
        sizes = unsigned_list(ranks, "sizes")
        return Slice.trusted(0, sizes, _row_major(sizes))

    @staticmethod
    def trusted(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Slice:
        """Without the check of the layout: as Monarch, whose slices with empty dimensions may fail it."""
        made = object.__new__(Slice)
        made._offset, made._sizes, made._strides = offset, sizes, strides
        return made

    @staticmethod
    def from_list(ranks: list[int]) -> list[Slice]:
        """One-dimensional slices that together cover ``ranks``, in ascending order."""
        rest = sorted(unsigned_list(ranks, "ranks"))
        slices = []
        while rest:
            stride = rest[1] - rest[0] if len(rest) > 1 else 0
            count = 1
            while stride and count < len(rest) and rest[count] - rest[count - 1] == stride:
                count += 1
            slices.append(Slice(offset=rest[0], sizes=[count], strides=[stride or 1]))
            rest = rest[count:]
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
        """The rank at these coordinates, which are not checked against the sizes (as in Monarch)."""
        numbers = unsigned_list(coordinates, "coordinates")
        if len(numbers) != self.ndim:
            raise IndexError(f"invalid dims: expected {self.ndim}, got {len(numbers)}")
        return self._offset + int(sum(map(operator.mul, numbers, self._strides)))

    def coordinates(self, value: int) -> list[int]:
        """Where rank ``value`` stands; ``ValueError`` if it is not in this slice."""
        rest = unsigned(value, "value") - self._offset
        result = [0] * self.ndim
        by_stride = sorted(range(self.ndim), key=lambda dim: self._strides[dim], reverse=True)
        for dim in by_stride if rest >= 0 and len(self) else ():
            if self._sizes[dim] > 1:
                result[dim], rest = divmod(rest, self._strides[dim])
        if rest or any(at >= size for at, size in zip(result, self._sizes, strict=True)):
            raise ValueError(f"value {value} not in slice")
        return result

    def index(self, value: int) -> int:
        """The position of rank ``value`` in this slice; the inverse of ``get``."""
        return int(sum(map(operator.mul, self.coordinates(value), _row_major(self._sizes))))

    def get(self, index: int) -> int:
        """The rank at position ``index``; ``ValueError`` if there are fewer."""
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
            wanted = range(*i.indices(len(self)))
            if wanted.step < 0:
                raise IndexError("Only positive indices are support")
            return tuple(map(self._at, wanted))
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
        return Slice.trusted, (self._offset, self._sizes, self._strides)

    def __repr__(self) -> str:
        return f"Slice {{ offset: {self._offset}, sizes: {self.sizes}, strides: {self.strides} }}"


def _row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense slice."""
    inner = itertools.accumulate(reversed(sizes[1:]), operator.mul, initial=1) if sizes else ()
    return tuple(inner)[::-1]
