"""What the client knows of the objects it has named: how each came about, what it stands on, whether it still works.

An object exists here before the gateway has heard of it. When its creation fails, or it is stopped, everything made
from it is affected as well; :meth:`Objects.trouble` finds that out without asking the gateway.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from meshgate_wire.messages import Failure, Host

__all__ = ["Kind", "Objects", "RemoteObject"]

Kind: TypeAlias = Literal["hosts", "procs", "actors", "port"]


@dataclass(slots=True, eq=False)
class RemoteObject:
    """One object of the session. ``step`` says for people how it was made; ``parents`` are what it was made from."""

    number: int
    kind: Kind
    name: str
    step: str
    parents: tuple[int, ...] = ()
    failure: Failure | None = None  # of its creation
    stopped: str = ""  # why, once the user has stopped it
    dropped: bool = False  # the program holds no proxy of it any more
    expected_hosts: int = 0  # of a job's host mesh: how many the job says there are
    hosts: tuple[Host, ...] = ()
    stands_on: tuple[RemoteObject, ...] = field(default=(), repr=False, compare=False)  # parents, and theirs


@dataclass(slots=True)
class Objects:
    """The table. Numbers are positive and never reused; those that the gateway gave are negative."""

    returned: dict[str, int] = field(default_factory=dict)
    """How often, by mesh, hosts have come back in the place of others: those have nothing of what was done there."""
    _known: dict[int, RemoteObject] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def create(self, kind: Kind, name: str, step: str, parents: Sequence[int] = ()) -> RemoteObject:
        """A new object with a number of its own."""
        return self._add(RemoteObject(next(self._numbers), kind, name, step, tuple(parents)))

    def adopt(self, number: int, kind: Kind, name: str, parents: Sequence[int] = ()) -> RemoteObject:
        """An object that the gateway numbered."""
        step = f"{name or kind}, which an endpoint returned"
        return self._add(RemoteObject(number, kind, name, step, tuple(parents)))

    def _add(self, new: RemoteObject) -> RemoteObject:
        parents = [self._known[parent] for parent in new.parents if parent in self._known]
        new.stands_on = tuple(parents) + tuple(known for parent in parents for known in parent.stands_on)
        self._known[new.number] = new
        return new

    def get(self, number: int) -> RemoteObject | None:
        return self._known.get(number)

    def named(self, name: str) -> list[int]:
        """The numbers of all objects of this name."""
        # list() of the values makes no tuples: a garbage collection amid it might drop objects.
        return [known.number for known in list(self._known.values()) if known.name == name]

    def unattached(self) -> str:
        """Why the hosts of meshes of the job could not be attached, last time; empty where all could, or may yet."""
        newest = {known.name: known for known in list(self._known.values()) if known.expected_hosts}
        return "; ".join(known.failure.message for known in newest.values() if known.failure is not None)

    def __len__(self) -> int:
        return len(self._known)

    def release(self, number: int) -> bool:
        """Forgets an object; whether it was known."""
        return self._known.pop(number, None) is not None

    def drop(self, number: int) -> bool:
        """The program holds no proxy of an object any more; whether nothing can come of it, so that it may be released.

        What still works is kept: its processes run. For finalizers: takes no lock.
        """
        known = self._known.get(number)
        if known is None:
            return False
        known.dropped = True
        return self.trouble(number) is not None

    def stop(self, number: int, reason: str) -> list[int]:
        """An object was stopped. Returns what may be released: what stood on it and has been dropped."""
        known = self._known[number]
        known.stopped = known.stopped or reason
        return self._dropped_on(known)

    def _dropped_on(self, base: RemoteObject) -> list[int]:
        dropped = [known for known in list(self._known.values()) if known.dropped]
        return [known.number for known in dropped if base is known or base in known.stands_on]

    def failed(self, number: int, failure: Failure) -> list[int]:
        """The gateway says that the creation of ``number`` failed. Returns what may be released, as ``stop``."""
        known = self._known.get(number)
        if known is None:
            return []
        known.failure = known.failure or failure
        return self._dropped_on(known)

    def trouble(self, number: int) -> tuple[RemoteObject, Failure] | None:
        """The object among ``number`` and what it stands on that does not work, and why; None if all do."""
        asked = self._known.get(number)
        if asked is None:
            return None
        if asked.failure is not None or asked.stopped:
            return _trouble_of(asked)
        for known in asked.stands_on:  # every call comes by here: no recursion
            if known.failure is not None or known.stopped:
                return _trouble_of(known)
        return None

    def stands_on(self, number: int, base: int) -> bool:
        """Whether ``number`` is ``base``, or was made from it."""
        if number == base:
            return True
        known = self._known.get(number)
        return known is not None and any(self.stands_on(parent, base) for parent in known.parents)

    def hosts_of(self, number: int) -> Sequence[Host]:
        """The hosts that ``number`` stands on, in rank order; none until the gateway has named them."""
        known = self._known.get(number)
        if known is None:
            return ()
        return known.hosts or (self.hosts_of(known.parents[0]) if known.parents else ())


def _trouble_of(known: RemoteObject) -> tuple[RemoteObject, Failure]:
    if known.failure is not None:
        return known, known.failure
    message = f"{known.kind} mesh {known.name!r} was stopped: {known.stopped}"
    return known, Failure(kind="supervision", message=message, mesh=known.name)
