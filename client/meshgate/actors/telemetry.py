"""Stand-ins for Monarch's ``span``, ``traced`` and ``get_meter``, for a laptop without torchmonarch.

They record nothing here. In code that travels to workers by value they become Monarch's own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])


def span(name: str) -> contextlib.AbstractContextManager[Any]:
    """A context manager that records a telemetry span in an actor."""
    return contextlib.nullcontext(name)


@overload
def traced(fn: F) -> F: ...
@overload
def traced(*, name: str | None = None) -> Callable[[F], F]: ...
def traced(fn: Any = None, *, name: str | None = None) -> Any:
    """Decorates a function, async or not, so that each call of it in an actor is a span named after it."""
    if fn is None:
        return functools.partial(traced, name=name)
    span_name = name if name is not None else fn.__name__
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def call(*args: Any, **kwargs: Any) -> Any:
            with span(span_name):
                return await fn(*args, **kwargs)

        return call

    @functools.wraps(fn)
    def call_sync(*args: Any, **kwargs: Any) -> Any:
        with span(span_name):
            return fn(*args, **kwargs)

    return call_sync


class Instrument:
    """A counter or histogram that drops what it is given."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name

    def add(self, amount: float, attributes: Any = None, context: Any = None) -> None:
        """Drops ``amount``."""

    def record(self, amount: float, attributes: Any = None, context: Any = None) -> None:
        """Drops ``amount``."""


class Meter:
    """Creates the instruments that Monarch's meter has."""

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Instrument:
        return Instrument("create_counter", name)

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> Instrument:
        return Instrument("create_up_down_counter", name)

    def create_histogram(
        self,
        name: str,
        unit: str = "",
        description: str = "",
        *,
        explicit_bucket_boundaries_advisory: Sequence[float] | None = None,
    ) -> Instrument:
        return Instrument("create_histogram", name)


def get_meter() -> Meter:
    """The OpenTelemetry meter of an actor's process."""
    return Meter()
