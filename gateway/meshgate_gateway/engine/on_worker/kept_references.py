"""References to kept values, as actors have them: what ``kept.ref()`` arrives as. Delivered by value.

A reference is a few numbers, which an actor passes on or returns like any other value. To fetch the value, its process
asks the engine, which knows what was released and who has died, and has the value delivered as those of arguments are
(``calls/kept_values.py``). So a reference keeps nothing alive: that is for the driver, and for calls that are under
way.

Pickles name what is here by ``MODULE``, which ``refer_to_values`` puts into ``sys.modules``.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from types import ModuleType
from typing import Any

MODULE = "_meshgate_kept"


class ValueLostError(RuntimeError):
    """The process has ended that kept the value. The driver gets it as ``meshgate.ValueLostError``."""


class KeptRef:
    """A value that stays in a process of the session.

    ``number`` is that of its object in the session, ``position`` its rank in the call ``label`` that returned it, and
    ``rank`` the base rank of the process that keeps it.
    """

    def __init__(self, number: int, position: int, rank: int, label: str) -> None:
        self._number, self._position, self._rank, self._label = number, position, rank, label

    def get(self) -> Any:
        """The value: the object itself in the process that keeps it, a copy elsewhere. Blocks until it is here;
        ``await ref`` does not.

        Raises ``ValueLostError`` if the process that keeps it has ended, ``RuntimeError`` if it was released.
        """
        module: Any = sys.modules[MODULE]
        store = getattr(module, "store", None)
        if store is not None and (kept := store.find(self._number, self._position)) is not None:
            return kept.value
        if os.getpid() != module.hello["pid"]:  # the value would come to the process of the actor
            raise RuntimeError(f"cannot get {self._what()} in a forked process: get it before the fork")
        place = {"stream": "kept", "object": self._number, "at": self._rank}
        try:
            with module.connect() as connection:
                connection.sendall(json.dumps({**module.hello, **place}).encode() + b"\n")
                with connection.makefile("rb") as file:
                    answer = file.read()
        except OSError as refused:
            raise RuntimeError(f"cannot get {self._what()}: the engine cannot be asked: {refused}") from refused
        kind, content = answer[:1], answer[1:]
        if kind == b"+":
            return module.store.take(int(content), 0)
        if kind == b"!":
            raise pickle.loads(content)
        reason = content.decode() or "the session or this mesh has ended"
        error: Any = (ValueLostError if kind == b"?" else RuntimeError)(f"cannot get {self._what()}: {reason}")
        error.call, error.ranks = self._label, (self._position,)
        raise error

    def _what(self) -> str:
        return f"the value of {self._label} on rank {self._position}"

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.get).__await__()

    def __reduce__(self) -> Any:
        return type(self), (self._number, self._position, self._rank, self._label)

    def __repr__(self) -> str:
        return f"<reference to {self._what()}>"


def refer_to_values(connect: Callable[[], socket.socket], hello: Mapping[str, Any]) -> None:
    """From now on this process can have references. ``connect()`` connects to the engine."""
    module: Any = sys.modules.setdefault(MODULE, ModuleType(MODULE))
    for kind in (KeptRef, ValueLostError):
        kind.__module__ = MODULE  # so that it is pickled by name, and is one class in all processes
        setattr(module, kind.__name__, kind)
    module.refer, module.refer_to_all, module.connect, module.hello = refer, refer_to_all, connect, hello


def refer(number: int, label: str, places: Sequence[tuple[int, int]], at: int | None) -> KeptRef:
    """A reference in the arguments of the call that is being unpickled. ``places`` are positions and base ranks, by
    rank of the call; ``at``: the index among them, if it is not that rank."""
    from monarch.actor import context  # noqa: PLC0415 - resolved on the worker

    return KeptRef(number, *places[context().message_rank.rank if at is None else at], label)


def refer_to_all(
    number: int, label: str, places: Sequence[tuple[int, int]], labels: Sequence[str], sizes: Sequence[int]
) -> Any:
    """As ``refer``, to all values."""
    from monarch.actor import Extent, ValueMesh  # noqa: PLC0415 - resolved on the worker

    references = [KeptRef(number, *place, label) for place in places]
    return ValueMesh(Extent(list(labels), list(sizes)).region.as_shape(), references)
