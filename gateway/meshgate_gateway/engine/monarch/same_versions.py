"""Actors are created only in processes with the gateway's versions of Python and Monarch."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import re
from collections.abc import Callable
from typing import Any

from meshgate_gateway.engine.on_worker import versions
from meshgate_wire import Hello
from meshgate_wire.handshake import PYTHON_VERSION, monarch_version

_PROBLEM = re.compile(r"RuntimeError: (worker \S+ has Python .*)")


class SameVersions:
    """Makes what Monarch sends to construct an actor check the versions of the process first.

    ``laptop()`` describes the versions of the laptop, for errors.
    """

    def __init__(self) -> None:
        self.laptop: Callable[[], str] = lambda: versions_of(None)

    def check_before(self, arguments: type) -> None:
        """Changes how objects of the dataclass ``arguments`` are pickled: the check precedes their fields."""

        def reduce(made: Any) -> tuple[Any, ...]:
            fields = tuple(getattr(made, field.name) for field in dataclasses.fields(arguments))
            return operator.getitem, ((self, _Made(arguments, fields)), 1)

        arguments.__reduce__ = reduce  # type: ignore[assignment]

    def difference(self, worker: str, python: str, monarch: str) -> str:
        """The error if a worker with these versions cannot be used, else empty; so it is if they are unknown."""
        if not python or not monarch:
            return ""
        return versions.difference(worker, python, monarch, PYTHON_VERSION, monarch_version(), self.laptop())

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickling runs the check from its source, and raises RuntimeError."""
        known = (PYTHON_VERSION, monarch_version(), self.laptop())
        return exec, (f"{inspect.getsource(versions)}\ncheck_versions(*{known!r})", {})


class _Made:
    """Unpickles as an object of a class, made of its fields."""

    __slots__ = ("_class", "_fields")

    def __init__(self, Class: type, fields: tuple[Any, ...]) -> None:
        self._class, self._fields = Class, fields

    def __reduce__(self) -> tuple[Any, ...]:
        return self._class, self._fields


def version_problem(report: str) -> str:
    """The error of a failed check, if ``report`` of Monarch's has one; else empty."""
    found = _PROBLEM.search(report)
    return found[1] if found else ""


def versions_of(laptop: Hello | None) -> str:
    """The versions of the client that sent ``laptop``, for an error."""
    if laptop is None:
        return "no laptop is connected"
    monarch = f"torchmonarch {laptop.monarch}" if laptop.monarch else "no torchmonarch"
    return f"the laptop has Python {laptop.python} and {monarch}"
