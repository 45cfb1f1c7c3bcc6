"""``MeshTrait``: ``slice``, ``split``, ``flatten``, ``rename`` and the sizes of every mesh, as Monarch's."""

from __future__ import annotations

import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from meshgate.shapes.ndslice import Slice
from meshgate.shapes.shape import Extent, Shape
from meshgate.suggestions import did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Self

_builtin_slice = slice


class MeshTrait(ABC):
    """The operations of a mesh on its shape.

    A subclass provides its ranks and labels, and constructs the same mesh with another shape.
    """

    @property
    @abstractmethod
    def _ndslice(self) -> Slice: ...

    @property
    @abstractmethod
    def _labels(self) -> Iterable[str]: ...

    @abstractmethod
    def _new_with_shape(self, shape: Shape) -> Self:
        """The same mesh with another shape, which contains only ranks of the present one."""

    def slice(self, **kwargs: Any) -> Self:
        """A part of the mesh: ``mesh.slice(hosts=0, gpus=slice(2, 6))``.

        A number selects one index and removes the dimension; a ``slice`` keeps the dimension. Raises ``TypeError``
        for an unknown dimension, ``IndexError`` or ``ValueError`` if the selection is out of range or empty.
        """
        shape = Shape(list(self._labels), self._ndslice)
        for label, selection in kwargs.items():
            if label not in shape.labels:
                meant = did_you_mean(label, shape.labels) or "."
                raise TypeError(f"Shape does not have dimension labeled {label!r}{meant} {self._known_dimensions}")
            if isinstance(selection, _builtin_slice):
                shape = shape.select(label, selection)
                continue
            try:
                index = operator.index(selection)
            except TypeError:
                wanted = f"slice({label}={selection!r}): expected an index, such as 0, or a slice, such as slice(0, 2)"
                raise TypeError(f"{wanted}. {self._known_dimensions}") from None
            if index < 0 or index >= shape.extent[label]:
                raise IndexError(f"index out of range: {label}={index}. {self._known_dimensions}")
            shape = shape.at(label, index)
        return self._new_with_shape(shape)

    def split(self, **kwargs: Any) -> Self:
        """The same ranks with dimensions split into several.

        ``mesh.split(hosts=("dp", "pp"), pp=16)`` splits ``hosts``. Of the sizes of the new dimensions, at most one
        may be omitted. Other dimensions are kept. Raises ``ValueError`` if the sizes do not match.
        """
        groups, new_sizes = _split_request(tuple(self._labels), kwargs)
        names: list[str] = []
        sizes: list[int] = []
        strides: list[int] = []
        ranks = self._ndslice
        for name, size, stride in zip(self._labels, ranks.sizes, ranks.strides, strict=True):
            parts = groups.get(name, (name,))
            part_sizes = _part_sizes(name, size, parts, new_sizes)
            steps = itertools.accumulate(reversed(part_sizes), operator.mul, initial=stride)
            sizes += part_sizes
            strides += list(steps)[-2::-1]
            for part in parts:
                if part in names:
                    raise ValueError(f"Duplicate dimension name '{part}'")
                names.append(part)
        if new_sizes:
            raise ValueError(f"unused size constraints: {tuple(new_sizes)}")
        return self._new_with_shape(Shape(names, Slice(offset=ranks.offset, sizes=sizes, strides=strides)))

    def flatten(self, name: str) -> Self:
        """The same ranks in one dimension. Raises ``ValueError`` unless they are contiguous."""
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
        """The number of elements, of the mesh or of given dimensions. Raises ``KeyError`` for an unknown dimension."""
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

    @property
    def _known_dimensions(self) -> str:
        """The last sentence of an error about dimensions."""
        sizes = ", ".join(f"{label}={size}" for label, size in self.sizes.items())
        return f"The sizes of the dimensions: {sizes}" if sizes else "The mesh has no dimensions"

    def _example(self, method: str) -> str:
        """How to call ``method`` with a coordinate for each dimension."""
        return f"{method}({', '.join(f'{label}=0' for label in self._labels)})"

    def __len__(self) -> int:
        return len(self._ndslice)


class ShapedMesh(MeshTrait):
    """A mesh that keeps its shape in ``_shape``."""

    _shape: Shape

    @property
    def _ndslice(self) -> Slice:
        return self._shape.ndslice

    @property
    def _labels(self) -> Iterable[str]:
        return self._shape.labels


def _split_request(labels: tuple[str, ...], request: dict[str, Any]) -> tuple[dict[str, Sequence[str]], dict[str, int]]:
    """Separates the keywords of ``split``: the dimensions to split, and the sizes of new dimensions."""
    groups: dict[str, Sequence[str]] = {}
    new_sizes: dict[str, int] = {}
    for key, value in request.items():
        if key in labels:
            if isinstance(value, str):
                raise ValueError(f"expected a sequence of dimensions, but got '{value}'")
            groups[key] = value
        elif isinstance(value, int):
            new_sizes[key] = value
        else:
            raise ValueError(
                f"'{key}' is not an existing dim. Expected an integer size constraint on a new dim. The dimensions: "
                f"{', '.join(labels) or 'none'}"
            )
    return groups, new_sizes


def _part_sizes(name: str, size: int, parts: Sequence[str], new_sizes: dict[str, int]) -> list[int]:
    """The sizes of the parts of dimension ``name``. Removes those that it uses from ``new_sizes``."""
    unknown = [part for part in parts if part not in new_sizes]
    if len(unknown) > 1:
        first, second = unknown[:2]
        raise ValueError(
            f"Cannot infer size of {parts} because both {second} and {first} have unknown size. "
            f"Specify at least one as argument, e.g. {second}=4"
        )
    known = math.prod(new_sizes[part] for part in parts if part in new_sizes)
    inferred, remainder = divmod(size, known) if unknown else (0, size - known)
    if remainder:
        given = tuple(new_sizes.get(part, "?") for part in parts)
        raise ValueError(f"Dimension '{name}' of size {size} is not evenly divided by {parts!r} with sizes {given!r}")
    sizes = [new_sizes.get(part, inferred) for part in parts]
    for part in parts:
        new_sizes.pop(part, None)
    return sizes
