"""The objects of a session by number: each is present, not created yet, failed or released.

A message may refer to an object whose creation is on another stream and has not arrived yet; ``ObjectTable.wait`` waits
for it. An object that depends on a failed one fails with that step as the cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import Any

from meshgate_gateway.engine.failures import RequestFailed, invalid
from meshgate_gateway.engine.objects.records import SessionObject
from meshgate_wire.messages import Failure

MAX_RELEASED = 65_536  # numbers kept, because late messages of other streams may refer to released objects


class ObjectTable:
    """Clients choose the numbers of what they create. Mesh references that arrive from workers get negative numbers."""

    def __init__(self) -> None:
        self._objects: dict[int, SessionObject | Failure] = {}
        self._released: dict[int, None] = {}  # oldest first
        self._awaited: dict[int, asyncio.Future[None]] = {}
        self._references: dict[int, Any] = {}
        self._next_reference = -1

    def add(self, number: int, made: SessionObject | Failure) -> None:
        """Defines ``number``; a failure may replace an object. Raises RequestFailed if the number is taken."""
        if isinstance(made, Failure):
            if number in self._released:
                return
        elif number in self._objects or number in self._released:
            raise invalid(f"object {number} already exists")
        self._objects[number] = made
        self._wake(number)

    def _wake(self, number: int) -> None:
        waiting = self._awaited.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def require(self, number: int) -> SessionObject | None:
        """The object, or None if it is not created yet. Raises RequestFailed if it failed or was released."""
        found = self._objects.get(number)
        if found is None and number in self._released:
            raise invalid(f"object {number} was released while a message still refers to it")
        if isinstance(found, Failure):
            raise RequestFailed(_as_cause(found))
        return found

    def failure(self, number: int) -> Failure | None:
        """Why the object could not be created, if it could not."""
        found = self._objects.get(number)
        return found if isinstance(found, Failure) else None

    def get(self, number: int) -> SessionObject | None:
        """The object, or None if it is not present, for whatever reason."""
        found = self._objects.get(number)
        return None if isinstance(found, Failure) else found

    async def wait(self, number: int) -> SessionObject:
        """As ``require``, but waits until the object is created."""
        found = self.require(number)
        while found is None:
            waiting = self._awaited.get(number)
            if waiting is None:
                waiting = self._awaited[number] = asyncio.get_running_loop().create_future()
            await asyncio.shield(waiting)
            found = self.require(number)
        return found

    def reserve(self) -> int:
        """A number for an object that the engine creates itself."""
        number = self._next_reference
        self._next_reference -= 1
        return number

    def add_reference(self, reference: Any) -> int:
        """A number for a mesh reference that arrived from a worker; the client then says what it is (``Adopt``)."""
        number = self._next_reference
        self._next_reference -= 1
        self._references[number] = reference
        return number

    def reference(self, number: int) -> Any:
        try:
            return self._references[number]
        except KeyError:
            raise invalid(f"object {number} did not arrive from a worker, or was released") from None

    def release(self, number: int) -> None:
        """Forgets the object. Requests that still wait for it fail."""
        self._references.pop(number, None)
        self._objects.pop(number, None)
        self._released[number] = None
        if len(self._released) > MAX_RELEASED:
            del self._released[next(iter(self._released))]
        self._wake(number)

    def fail_awaited(self, failure: Failure, being_created: Container[int]) -> int:
        """Makes ``failure`` of every object that requests wait for, that does not exist and is not ``being_created``.
        Returns the highest number that was ever named, or 0."""
        for number in [*self._awaited]:
            if number not in self._objects and number not in being_created:
                self.add(number, failure)
        return max((0, *self._objects, *self._released))

    def forget_adopted(self) -> None:
        """Forgets what clients said of mesh references, but not the references: another client may adopt them."""
        for number in [number for number in self._objects if number in self._references]:
            del self._objects[number]

    def failures(self) -> list[tuple[int, Failure]]:
        """What could not be created."""
        return [(number, found) for number, found in self._objects.items() if isinstance(found, Failure)]

    def values(self) -> list[SessionObject]:
        return [found for found in self._objects.values() if not isinstance(found, Failure)]

    def items(self) -> list[tuple[int, SessionObject]]:
        return [(number, found) for number, found in self._objects.items() if not isinstance(found, Failure)]


def _as_cause(failure: Failure) -> Failure:
    if failure.kind == "step":
        return failure
    return failure.model_copy(update={"kind": "step", "step": failure.step or failure.mesh})
