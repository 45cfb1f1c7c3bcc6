"""Labelled ranks, and what every mesh can do with them, computed on the laptop.

``Shape``, ``Region``, ``Extent``, ``Point`` and ``Slice`` follow the classes of
``monarch._rust_bindings.monarch_hyperactor.shape`` in behaviour, representation and errors; ``MeshTrait`` gives a
mesh ``slice``, ``split``, ``flatten``, ``rename`` and its sizes, as Monarch's does. A property test holds each
operation against Monarch. All are immutable; unlike Monarch's, they can be hashed.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from meshgate.bincode import Reader, dump_number, dump_numbers, dump_texts
from meshgate.extent import Extent, Point, debug_text
from meshgate.ndslice import Slice, labels_of, unsigned
from meshgate_wire import messages

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Extent", "MeshTrait", "NDSlice", "Point", "Region", "Shape", "Slice"]

NDSlice = Slice


class _Labelled:
    """Labels for the dimensions of a slice."""

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

    def to_bytes(self) -> bytes:
        return b"".join(
            (
                dump_texts(self._labels),
                dump_number(self._slice.offset),
                dump_numbers(self._slice.sizes),
                dump_numbers(self._slice.strides),
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        reader = Reader(data)
        labels, offset = reader.texts(), reader.number()
        ranks = Slice.trusted(offset, tuple(reader.numbers()), tuple(reader.numbers()))
        reader.end()
        return cls(labels, ranks)

    def to_wire(self) -> messages.Region:
        return messages.Region(
            labels=self._labels,
            offset=self._slice.offset,
            sizes=tuple(self._slice.sizes),
            strides=tuple(self._slice.strides),
        )

    @classmethod
    def from_wire(cls, region: messages.Region) -> Self:
        """Raises ``ValueError`` where the message holds no valid region."""
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
        labels = ", ".join(map(debug_text, self._labels))
        return f"{type(self).__name__} {{ labels: [{labels}], slice: {self._slice!r} }}"


class Region(_Labelled):
    """Labelled ranks inside a larger space of ranks."""

    __slots__ = ()

    def slice(self) -> Slice:
        return self._slice

    def as_shape(self) -> Shape:
        return Shape(self._labels, self._slice)

    def point_of_base_rank(self, rank: int) -> Point:
        """Where a rank of the larger space stands in this region; ``ValueError`` if it does not."""
        try:
            position = self._slice.index(rank)
        except ValueError:
            raise ValueError(
                f"out of range base rank: this base rank {rank} does not belong to this region: {rank}"
            ) from None
        return Point(position, Extent(self._labels, self._slice.sizes))


class Shape(_Labelled):
    """Labelled ranks, and the selections along a label."""

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
        """The part at one index of a dimension, without that dimension."""
        start = unsigned(index, "index")
        dim = self._dimension(label)
        kept = self._restrict(dim, range(start, start + 1))
        return Shape(_without(self.labels, dim), _drop(kept, dim))

    def select(self, label: str, slice: slice) -> Shape:
        """The part in a range of a dimension, which stays a dimension."""
        dim = self._dimension(label)
        if not isinstance(slice, _builtin_slice):
            raise TypeError(f"argument 'slice': '{type(slice).__name__}' object cannot be cast as 'slice'")
        return Shape(self._labels, self._restrict(dim, range(*slice.indices(self._slice.sizes[dim]))))

    def index(self, **kwargs: int) -> Shape:
        """``at`` for each of these dimensions."""
        shape = self
        for label, index in kwargs.items():
            shape = shape.at(label, index)
        return shape

    def _dimension(self, label: str) -> int:
        if not isinstance(label, str):
            raise TypeError(f"argument 'label': '{type(label).__name__}' object cannot be cast as 'str'")
        if label not in self._labels:
            raise ValueError(f"invalid labels `[{debug_text(label)}]`")
        return self._labels.index(label)

    def _restrict(self, dim: int, wanted: range) -> Slice:
        sizes, strides = self._slice.sizes, self._slice.strides
        told = f"{wanted.start}:{wanted.stop}:{wanted.step}"
        if wanted.step < 0:
            raise ValueError(f"range {told} runs backwards; the step must be positive")
        if wanted.start >= sizes[dim]:
            raise ValueError(f"out of range {told} for dimension {self._labels[dim]} of size {sizes[dim]}")
        if not wanted:
            raise ValueError(f"empty range {told}")
        offset = self._slice.offset + wanted.start * strides[dim]
        sizes[dim] = len(wanted)
        strides[dim] *= wanted.step
        return Slice(offset=offset, sizes=sizes, strides=strides)

    def __len__(self) -> int:
        return len(self._slice)

    def __str__(self) -> str:
        sizes = zip(self._labels, self._slice.sizes, strict=True)
        return f"{{{','.join(f'{label}={size}' for label, size in sizes)}}}"


_builtin_slice = slice


def _without(values: list[Any], position: int) -> list[Any]:
    return values[:position] + values[position + 1 :]


def _drop(ranks: Slice, dim: int) -> Slice:
    """``ranks`` without a dimension of size 1."""
    return Slice(offset=ranks.offset, sizes=_without(ranks.sizes, dim), strides=_without(ranks.strides, dim))


class MeshTrait(ABC):
    """What every mesh does with its shape. A mesh says what its ranks are and makes itself anew with others."""

    @property
    @abstractmethod
    def _ndslice(self) -> Slice: ...

    @property
    @abstractmethod
    def _labels(self) -> Iterable[str]: ...

    @abstractmethod
    def _new_with_shape(self, shape: Shape) -> Self:
        """The same mesh in another shape, all of whose ranks are among the present ones."""

    def slice(self, **kwargs: Any) -> Self:
        """A part of the mesh: ``mesh.slice(hosts=0, gpus=slice(2, 6))``.

        A number selects one index and removes the dimension, a ``slice`` keeps the dimension. Raises ``TypeError``
        for a dimension that does not exist, ``IndexError`` and ``ValueError`` for what is out of range or empty.
        """
        shape = Shape(list(self._labels), self._ndslice)
        for label, wanted in kwargs.items():
            if label not in shape.labels:
                raise TypeError(f"Shape does not have dimension labeled {label!r}")
            if isinstance(wanted, _builtin_slice):
                shape = shape.select(label, wanted)
                continue
            if wanted < 0 or wanted >= shape.extent[label]:
                raise IndexError("index out of range")
            shape = shape.at(label, wanted)
        return self._new_with_shape(shape)

    def split(self, **kwargs: Any) -> Self:
        """The same ranks with dimensions split into several.

        ``mesh.split(hosts=("dp", "pp"), pp=16)`` splits ``hosts``; of the sizes of the new dimensions all but one
        must be given. Dimensions that are not named stay. Raises ``ValueError`` where the sizes do not work out.
        """
        groups, given = _split_request(tuple(self._labels), kwargs)
        names: list[str] = []
        sizes: list[int] = []
        strides: list[int] = []
        ranks = self._ndslice
        for name, size, stride in zip(self._labels, ranks.sizes, ranks.strides, strict=True):
            parts = groups.get(name, (name,))
            part_sizes = _part_sizes(name, size, parts, given)
            steps = itertools.accumulate(reversed(part_sizes), operator.mul, initial=stride)
            sizes += part_sizes
            strides += list(steps)[-2::-1]
            for part in parts:
                if part in names:
                    raise ValueError(f"Duplicate dimension name '{part}'")
                names.append(part)
        if given:
            raise ValueError(f"unused size constraints: {tuple(given)}")
        return self._new_with_shape(Shape(names, Slice(offset=ranks.offset, sizes=sizes, strides=strides)))

    def flatten(self, name: str) -> Self:
        """The same ranks along one dimension; ``ValueError`` unless they are contiguous."""
        ranks = self._ndslice
        dense = Slice.new_row_major(ranks.sizes).strides
        if dense != ranks.strides:
            raise ValueError(f"cannot flatten sparse mesh: ndslice.strides={ranks.strides} != dense_strides={dense}")
        flat = Slice(offset=ranks.offset, sizes=[len(ranks)], strides=[1])
        return self._new_with_shape(Shape([name], flat))

    def rename(self, **kwargs: str) -> Self:
        """The same ranks with dimensions renamed: ``mesh.rename(hosts="dp")``."""
        return self.split(**{old: (new,) for old, new in kwargs.items()})

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """How many elements the mesh has, or one or several of its dimensions; ``KeyError`` for an unknown one."""
        labels = tuple(self._labels)
        if dim is None:
            dim = labels
        if not isinstance(dim, str):
            return math.prod(self.size(each) for each in dim)
        if dim not in labels:
            raise KeyError(f"{self} does not have dimension {dim!r}")
        return self._ndslice.sizes[labels.index(dim)]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self._labels, self._ndslice.sizes, strict=True))

    @property
    def extent(self) -> Extent:
        return Extent(tuple(self._labels), self._ndslice.sizes)

    def __len__(self) -> int:
        return len(self._ndslice)


def _split_request(labels: tuple[str, ...], request: dict[str, Any]) -> tuple[dict[str, Sequence[str]], dict[str, int]]:
    """Takes the keywords of ``split`` apart: which dimensions become which, and the sizes given."""
    groups: dict[str, Sequence[str]] = {}
    given: dict[str, int] = {}
    for key, value in request.items():
        if key in labels:
            if isinstance(value, str):
                raise ValueError(f"expected a sequence of dimensions, but got '{value}'")
            groups[key] = value
        elif isinstance(value, int):
            given[key] = value
        else:
            raise ValueError(f"'{key}' is not an existing dim. Expected an integer size constraint on a new dim.")
    return groups, given


def _part_sizes(name: str, size: int, parts: Sequence[str], given: dict[str, int]) -> list[int]:
    """The sizes of the parts of dimension ``name``; takes those it uses out of ``given``."""
    unknown = [part for part in parts if part not in given]
    if len(unknown) > 1:
        first, second = unknown[:2]
        raise ValueError(
            f"Cannot infer size of {parts} because both {second} and {first} have unknown size. "
            f"Specify at least one as argument, e.g. {second}=4"
        )
    known = math.prod(given[part] for part in parts if part in given)
    inferred, rest = divmod(size, known) if unknown else (0, size - known)
    if rest:
        told = tuple(given.get(part, "?") for part in parts)
        raise ValueError(f"Dimension '{name}' of size {size} is not evenly divided by {parts!r} with sizes {told!r}")
    sizes = [given.get(part, inferred) for part in parts]
    for part in parts:
        given.pop(part, None)
    return sizes
