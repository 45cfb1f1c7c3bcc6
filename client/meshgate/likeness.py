"""Exceptions that stand for ones whose class the laptop does not have: same name, same arguments, a readable text."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["Likeness", "likeness_of"]


class Likeness(Exception):
    """Base of all likenesses. Takes any arguments and any state, as whatever it stands for might have."""

    def __setstate__(self, state: Any) -> None:
        own, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        for part in (own, slots):
            if isinstance(part, dict):
                self.__dict__.update({str(name): value for name, value in part.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        kind = type(self)
        if kind is Likeness:
            return Likeness, self.args, self.__dict__
        return _rebuild, (kind.__module__, kind.__qualname__, self.args), self.__dict__

    def __call__(self, *args: object, **_: object) -> Likeness:
        """For a class that came as code, and is a likeness itself."""
        return Likeness(*args)

    # What pickle does to containers, should the class have been one.

    def __setitem__(self, key: object, value: object) -> None:
        self.__dict__.setdefault("items", {})[key] = value

    def append(self, value: object) -> None:
        self.__dict__.setdefault("elements", []).append(value)

    def extend(self, values: Any) -> None:
        self.__dict__.setdefault("elements", []).extend(values)


@functools.lru_cache(maxsize=1024)
def likeness_of(module: str, qualname: str) -> type[Likeness]:
    """The stand-in class for ``module.qualname``; the same one each time."""
    name = qualname.rpartition(".")[2]
    facts = {"__module__": module, "__qualname__": qualname, "__doc__": f"Stands for {module}.{qualname}."}
    return type(name, (Likeness,), facts)


def _rebuild(module: str, qualname: str, args: tuple[Any, ...]) -> Likeness:
    return likeness_of(module, qualname)(*args)
