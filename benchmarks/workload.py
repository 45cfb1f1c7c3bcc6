"""The measured actor: the same class for direct Monarch and meshgate."""

from __future__ import annotations

from typing import Any

import numpy as np
from monarch.actor import Actor, current_rank, endpoint


class Target(Actor):
    """Does next to nothing, so that the round trip is what is measured."""

    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}
        self._noted: list[int] = []

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def take(self, array: Any) -> int:
        return int(array.nbytes)

    @endpoint
    def give(self, nbytes: int) -> Any:
        if nbytes not in self._arrays:
            self._arrays = {nbytes: np.ones(nbytes, np.uint8)}
        return self._arrays[nbytes]

    @endpoint
    def take_from(self, giver: Any, nbytes: int) -> int:
        """What ``keep()`` does, written by hand."""
        return int(giver.give.call_one(nbytes).get().nbytes)

    @endpoint
    def take_from_own(self, givers: Any, nbytes: int) -> int:
        """As ``take_from``, of the giver of this rank."""
        return int(givers.slice(**current_rank()).give.call_one(nbytes).get().nbytes)

    @endpoint
    def note(self, number: int) -> int:
        self._noted.append(number)
        return number

    @endpoint
    def noted(self) -> list[int]:
        return self._noted
