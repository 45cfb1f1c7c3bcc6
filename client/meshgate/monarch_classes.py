"""Objects that ``isinstance`` accepts as objects of Monarch's classes, without importing Monarch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, ClassVar


def monarch_api(name: str = "monarch.actor") -> dict[str, object]:
    """The names of Monarch's module ``name``; none if nothing has imported it."""
    module = sys.modules.get(name)
    return vars(module) if module is not None else {}


class SeenAsMonarchs:
    """Makes ``isinstance`` accept an object as one of the class of ``_monarch_module`` called ``_monarch_name``.

    Monarch's classes cannot be subclassed: they are written in Rust, or need Rust objects. ``isinstance`` checks
    ``__class__`` only if the real type does not match, so ``type(x)`` and checks for classes of meshgate do not change.

    A subclass defines ``__reduce__``: pickle's default compares ``__class__`` with the type. One that is a dataclass
    defines ``__eq__`` for the same reason.
    """

    __slots__ = ()

    _monarch_module: ClassVar[str] = "monarch.actor"
    _monarch_name: ClassVar[str]

    if not TYPE_CHECKING:

        @property
        def __class__(self):
            return monarch_api(self._monarch_module).get(self._monarch_name, type(self))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The text in IPython, which would otherwise be that of Monarch's class."""
        return {"text/plain": repr(self)}
