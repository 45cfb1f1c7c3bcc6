"""Stand-ins for exceptions whose class the laptop cannot import: same name, same arguments, readable text."""

from __future__ import annotations

import functools
from typing import Any


class ExceptionStandIn(Exception):
    """Base of all stand-ins. Accepts any arguments and any pickled state."""

    def __setstate__(self, state: Any) -> None:
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        for part in (attributes, slots):
            if isinstance(part, dict):
                self.__dict__.update({str(name): value for name, value in part.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        kind = type(self)
        if kind is ExceptionStandIn:
            return ExceptionStandIn, self.args, self.__dict__
        return _rebuild, (kind.__module__, kind.__qualname__, self.args), self.__dict__

    def __call__(self, *args: object, **_: object) -> ExceptionStandIn:
        """Makes an instance if the class itself was pickled by value, and is represented by a stand-in."""
        return ExceptionStandIn(*args)

    # pickle calls these if the class derives from a dict or a list.

    def __setitem__(self, key: object, value: object) -> None:
        self.__dict__.setdefault("items", {})[key] = value

    def append(self, value: object) -> None:
        self.__dict__.setdefault("elements", []).append(value)

    def extend(self, values: Any) -> None:
        self.__dict__.setdefault("elements", []).extend(values)


@functools.lru_cache(maxsize=1024)
def stand_in_for(module: str, qualname: str) -> type[ExceptionStandIn]:
    """The stand-in class for ``module.qualname``; always the same one."""
    name = qualname.rpartition(".")[2]
    namespace = {"__module__": module, "__qualname__": qualname, "__doc__": f"Stands for {module}.{qualname}."}
    return type(name, (ExceptionStandIn,), namespace)


def _rebuild(module: str, qualname: str, args: tuple[Any, ...]) -> ExceptionStandIn:
    return stand_in_for(module, qualname)(*args)
