"""``ValueMesh``: the result of a call to a mesh, one value for each rank.

It behaves and prints like Monarch's. A value is unpickled when it is first accessed: a value that cannot be unpickled
leaves the others readable, and of a large result only the values in use take time and memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pprint import pformat
from textwrap import indent
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from meshgate.html import card
from meshgate.monarch_classes import SeenAsMonarchs
from meshgate.shapes.mesh_trait import ShapedMesh
from meshgate.shapes.ndslice import unsigned
from meshgate.shapes.shape import Point, Shape
from meshgate.shapes.value_table import MOST_ROWS, are_plain, text_table, value_table
from meshgate.suggestions import OPERATORS, did_you_mean

R = TypeVar("R")


class WrongDimensions(KeyError):
    __str__ = Exception.__str__  # KeyError would quote the message


class _Cell(Generic[R]):
    """A value, or the function that reads it, which is called once, by the first thread. Its error is not kept."""

    __slots__ = ("_lock", "_read", "_value")

    def __init__(self, value: R | None = None, read: Callable[[], R] | None = None) -> None:
        self._value = value
        self._read = read
        self._lock = threading.RLock() if read is not None else None  # a signal handler may read it, too

    def get(self) -> R:
        if self._lock is not None:
            with self._lock:
                if (read := self._read) is not None:
                    self._value = read()
                    self._read = None
        return cast(R, self._value)


def _check_count(shape: Shape, count: int) -> None:
    if count != len(shape):
        raise ValueError(f"invalid value mesh: expected {len(shape)} ranks, but contains {count} ranks")


class ValueMesh(SeenAsMonarchs, ShapedMesh, Generic[R]):
    """Values by rank. ``slice``, ``split``, ``flatten`` and ``rename`` return meshes of the same values."""

    __slots__ = ("_cells", "_shape")

    _monarch_name = "ValueMesh"

    if not TYPE_CHECKING:

        def __class_getitem__(cls, item: object) -> type:
            return cls  # as Monarch's does

    def __init__(self, shape: Shape, values: list[R]) -> None:
        if not isinstance(shape, Shape):
            raise TypeError(f"argument 'shape': '{type(shape).__name__}' object cannot be cast as 'Shape'")
        if not isinstance(values, list):
            raise TypeError(f"argument 'values': '{type(values).__name__}' object cannot be cast as 'list'")
        self._fill(shape, [_Cell(value) for value in values])

    def _fill(self, shape: Shape, cells: list[_Cell[R]]) -> None:
        _check_count(shape, len(cells))
        self._shape = shape
        self._cells = cells

    @classmethod
    def lazy(cls, shape: Shape, reads: Iterable[Callable[[], R]]) -> ValueMesh[R]:
        """A mesh of the results of ``reads``, each called at most once, when its value is first accessed."""
        return cls._of(shape, [_Cell(read=read) for read in reads])

    @classmethod
    def _of(cls, shape: Shape, cells: list[_Cell[R]]) -> ValueMesh[R]:
        mesh = cls.__new__(cls)
        mesh._fill(shape, cells)
        return mesh

    @staticmethod
    def from_indexed(shape: Shape, pairs: Iterable[tuple[int, R]]) -> ValueMesh[R]:
        """A mesh of ``(position, value)`` pairs. Each position must occur; if one repeats, its last value is used."""
        values = {unsigned(position, "pairs"): value for position, value in pairs}
        too_large = next((position for position in values if position >= len(shape)), None)
        count = len(values) if too_large is None else too_large + 1
        _check_count(shape, count)
        return ValueMesh(shape, [values[position] for position in range(count)])

    def get(self, rank: int) -> R:
        """The value at a position, in row-major order. Raises ``ValueError`` if there are fewer values."""
        position = unsigned(rank, "rank")
        if position >= len(self._cells):
            raise ValueError(f"index {position} out of range (len={len(self._cells)})")
        return self._cells[position].get()

    def item(self, **kwargs: int) -> R:
        """The value at the coordinates, one for each dimension.

        Raises ``KeyError`` for a missing or unknown dimension, ``IndexError`` for coordinates out of range.
        """
        labels = list(self._labels)
        if kwargs.keys() != set(labels):
            raise WrongDimensions(self._wrong_dimensions(kwargs))
        rank = self._ndslice.nditem([kwargs[label] for label in labels])
        try:
            position = self._ndslice.index(rank)
        except ValueError:
            raise IndexError(f"rank {rank} not in current shape. {self._known_dimensions}") from None
        return self.get(position)

    def _wrong_dimensions(self, given: Mapping[str, int]) -> str:
        missing = [label for label in self._labels if label not in given]
        extra = [label for label in given if label not in self.sizes]
        wrong = [f"item needs dimensions: {missing}"] if missing else []
        wrong += [f"item has extra dimensions: {extra}"] if extra else []
        return f"{'; '.join(wrong)}. {self._known_dimensions}. Write {self._example('item')}"

    @property
    def _one_of_them(self) -> str:
        return (
            f"{self._known_dimensions}. Write {self._example('item')} for one value, get(0) for one by its position, "
            "or values() for all"
        )

    if not TYPE_CHECKING:  # which reports these mistakes itself

        def __getattr__(self, attr):
            if attr.startswith("_"):  # libraries ask for such names, and expect a quick answer
                raise AttributeError(attr)
            meant = did_you_mean(attr, dir(ValueMesh)) or f": it has a value for each rank. {self._one_of_them}"
            raise AttributeError(f"'ValueMesh' object has no attribute {attr!r}{meant}", name=attr)

        def __getitem__(self, key):
            raise TypeError(f"a ValueMesh is not subscriptable. {self._one_of_them}")

        def _is_no_value(self, *_operands):
            raise TypeError(f"a ValueMesh has a value for each rank. {self._one_of_them}")

        locals().update(dict.fromkeys(OPERATORS, _is_no_value))

        def __format__(self, spec):
            return self._is_no_value() if spec else str(self)

        def __array__(self, *_args, **_kwargs):
            # Without this, numpy takes what has __getitem__ for a sequence, of pairs of a point and a value.
            raise TypeError(
                "a ValueMesh is not an array. Write numpy.asarray(result.values()) for one of its values, in the order "
                "of their ranks"
            )

    def items(self) -> Iterator[tuple[Point, R]]:
        """Each value with its point."""
        extent = self._shape.extent
        for position, cell in enumerate(self._cells):
            yield Point(position, extent), cell.get()

    def values(self) -> list[R]:
        return [cell.get() for cell in self._cells]

    def __iter__(self) -> Iterator[tuple[Point, R]]:
        return self.items()

    def __repr__(self) -> str:
        return f"ValueMesh({self._shape.extent}):\n{indent(pformat(tuple(self.items())), '  ')}"

    def table(self, most: int = MOST_ROWS) -> str:
        """The values side by side, to be printed: a line for each rank, with a column for each key of dictionaries.

        Of more than ``most`` ranks, the first and the last are shown and read. Long values are cut.
        """
        if most < 1:
            raise ValueError(f"table(most={most}): show at least one rank")
        return text_table(tuple(self._labels), self._ndslice.sizes, self.get, most)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For IPython on a terminal: scalars and dictionaries as a table, anything else as ``repr``."""
        if not cycle and are_plain(len(self._cells), self.get):
            printer.text(f"ValueMesh({self._shape.extent}):\n{self.table()}")
        else:
            printer.text(repr(self))

    def _repr_html_(self) -> str:
        """For notebooks: a table of the values, which reads only those that it shows."""
        return card(
            f"ValueMesh({self._shape.extent})", {}, [value_table(tuple(self._labels), self._ndslice.sizes, self.get)]
        )

    def _new_with_shape(self, shape: Shape) -> ValueMesh[R]:
        cells = [self._cells[self._ndslice.index(rank)] for rank in shape.ranks()]
        return self._of(shape, cells)

    def __reduce__(self) -> tuple[Any, ...]:
        return ValueMesh, (self._shape, self.values())
