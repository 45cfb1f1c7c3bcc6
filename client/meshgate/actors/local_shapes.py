"""Monarch's points and extents, on a laptop with torchmonarch, equal meshgate's from both sides of ``==``."""

from __future__ import annotations

from typing import Any

from meshgate.monarch_classes import monarch_api
from meshgate.shapes.shape import Extent, Point


def equal_from_both_sides() -> None:
    """Extends the comparison of Monarch's ``Point`` and ``Extent``, which find every other object unequal.

    Does nothing if nothing has imported ``monarch.actor``, or if it was called before.
    """
    for name, ours in (("Point", Point), ("Extent", Extent)):
        theirs: Any = monarch_api().get(name)
        if theirs is not None and not isinstance(theirs.__eq__, _Equal):
            theirs.__eq__ = _Equal(theirs.__eq__, ours)


class _Equal:
    """The ``__eq__`` of Monarch's class: ``original``, except for objects of ``ours``."""

    def __init__(self, original: Any, ours: type) -> None:
        self._original, self._ours = original, ours

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        return lambda other: other == instance if isinstance(other, self._ours) else self._original(instance, other)
