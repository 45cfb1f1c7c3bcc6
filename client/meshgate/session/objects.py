"""The table of a session's objects: how and from what each was created, and whether it can still be used.

An object is in the table before the gateway has heard of it. If its creation fails or it is stopped, everything made
from it is affected as well; ``ObjectTable.failure_of`` finds that out without asking the gateway.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from meshgate_wire.messages import Failure, Host

Kind: TypeAlias = Literal["hosts", "procs", "actors", "port", "kept"]


@dataclass(frozen=True, slots=True)
class EndingHost:
    """A host that the cluster is going to end: it is drained, preempted or taken back.

    ``reason`` is what the cluster says about it. ``deadline`` is in seconds of ``time.monotonic()``.
    """

    name: str
    reason: str
    deadline: float

    @property
    def seconds_left(self) -> float:
        """For how long calls on the host can still run; 0 if it should have ended."""
        return max(0.0, self.deadline - time.monotonic())


@dataclass(slots=True, eq=False)
class RemoteObject:
    """One object of the session. ``step`` describes in error messages how it was created."""

    number: int
    kind: Kind
    name: str
    step: str
    parents: tuple[int, ...] = ()  # what it was created from
    failure: Failure | None = None  # of its creation
    stopped: str = ""  # why, once the user has stopped it
    unreferenced: bool = False  # the program holds no proxy of it
    expected_hosts: int = 0  # of a job's host mesh: its size according to the job
    streams: tuple[int, ...] = ()  # of kept values: those with messages that name them
    released: bool = False  # kept values, by the program, under whichever of their names
    hosts: tuple[Host, ...] = ()
    ending: Mapping[str, EndingHost] = field(default_factory=dict)  # by name, of ``hosts``
    lost: dict[int, str] = field(default_factory=dict)  # why, by rank of the mesh
    ancestors: tuple[RemoteObject, ...] = field(default=(), repr=False, compare=False)  # parents and theirs, each once


@dataclass(slots=True)
class ObjectTable:
    """All objects of a session by number. Numbers are positive and never reused; the gateway's own are negative."""

    host_restarts: Counter[str] = field(default_factory=Counter)
    """How often hosts of each mesh were replaced by new ones, which have nothing of what was done on the old."""
    _objects: dict[int, RemoteObject] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    any_failed: bool = False  # whether ``failure_of`` may return something: calls ask no further otherwise

    def create(self, kind: Kind, name: str, step: str, parents: Sequence[int] = ()) -> RemoteObject:
        """Adds an object under a new number."""
        return self._add(RemoteObject(next(self._numbers), kind, name, step, tuple(parents)))

    def adopt(self, number: int, kind: Kind, name: str, parents: Sequence[int] = ()) -> RemoteObject:
        """Adds an object that an endpoint returned, under the number that the gateway gave it."""
        step = f"{name or kind}, which an endpoint returned"
        return self._add(RemoteObject(number, kind, name, step, tuple(parents)))

    def restore(self, number: int, kind: Kind, name: str, step: str, parents: Sequence[int] = ()) -> RemoteObject:
        """Adds an object that an earlier holder of the session created."""
        return self._add(RemoteObject(number, kind, name, step, tuple(parents)))

    def continue_at(self, number: int) -> None:
        """The next object that is created has this number."""
        self._numbers = itertools.count(number)

    def _add(self, new: RemoteObject) -> RemoteObject:
        parents = [self._objects[parent] for parent in new.parents if parent in self._objects]
        # Each once: with repetitions they would double with each object that is made from all earlier ones.
        new.ancestors = tuple(dict.fromkeys([*parents, *(each for parent in parents for each in parent.ancestors)]))
        self._objects[new.number] = new
        return new

    def get(self, number: int) -> RemoteObject | None:
        return self._objects.get(number)

    def newest_hosts(self) -> int:
        """The number of the newest mesh of the job's hosts; 0 if there is none."""
        return max((remote.number for remote in list(self._objects.values()) if remote.expected_hosts), default=0)

    def attach_failures(self) -> str:
        """Why the last attach of each host mesh failed, joined; empty if none did so far."""
        # Copy the values, not the items: tuples could start a garbage collection whose finalizers change the table.
        newest = {remote.name: remote for remote in list(self._objects.values()) if remote.expected_hosts}
        return "; ".join(remote.failure.message for remote in newest.values() if remote.failure is not None)

    def ranks_of_hosts(self, names: Iterable[str]) -> tuple[str, dict[int, str]]:
        """The newest mesh of the job's hosts that has one of ``names``, and which of them it has, by rank."""
        wanted = set(names)
        for remote in reversed(list(self._objects.values())):
            if found := {rank: host.name for rank, host in enumerate(remote.hosts) if host.name in wanted}:
                return remote.name, found
        return "", {}

    def __len__(self) -> int:
        return len(self._objects)

    def named_on(self, number: int, stream: int) -> None:
        """Notes that a message of ``stream`` is about to name kept values."""
        remote = self._objects.get(number)
        if remote is not None and stream not in remote.streams:
            remote.streams = (*remote.streams, stream)

    def remove(self, number: int) -> bool:
        """Removes an object. Returns whether it was in the table."""
        return self._objects.pop(number, None) is not None

    def unreference(self, number: int) -> bool:
        """Notes that the program holds no proxy of an object. Returns whether the object can be released.

        An object that works is kept, since its processes run. For finalizers: takes no lock.
        """
        remote = self._objects.get(number)
        if remote is None:
            return False
        remote.unreferenced = True
        return self.failure_of(number) is not None

    def stop(self, number: int, reason: str) -> list[int]:
        """Marks an object as stopped. Returns the unreferenced objects made from it, which can be released."""
        remote = self._objects[number]
        remote.stopped = remote.stopped or reason
        self.any_failed = True
        return self._unreferenced_from(remote)

    def fail(self, number: int, failure: Failure) -> list[int]:
        """Marks the creation of an object as failed. Returns what ``stop`` returns.

        If only an earlier step failed, the failure of that step is kept: it knows the exception.
        """
        remote = self._objects.get(number)
        if remote is None:
            return []
        if failure.kind != "step" or not any(ancestor.failure for ancestor in remote.ancestors):
            remote.failure = remote.failure or failure
        self.any_failed = True
        return self._unreferenced_from(remote)

    def _unreferenced_from(self, base: RemoteObject) -> list[int]:
        unreferenced = [remote for remote in list(self._objects.values()) if remote.unreferenced]
        return [remote.number for remote in unreferenced if base is remote or base in remote.ancestors]

    def failure_of(self, number: int) -> tuple[RemoteObject, Failure] | None:
        """The failed or else stopped object among ``number`` and its ancestors, with the reason; None if all work.

        What could not be created failed for this reason, also if the program has stopped it meanwhile.
        """
        remote = self._objects.get(number)
        if remote is None:
            return None
        stopped = None
        for each in (remote, *remote.ancestors):  # on the path of every call: no recursion
            if each.failure is not None:
                return each, each.failure
            if stopped is None and each.stopped:
                stopped = each
        return None if stopped is None else (stopped, _stopped(stopped))

    def lose_ranks(self, number: int, ranks: Sequence[int], reason: str) -> None:
        """Notes that ranks of a mesh died."""
        remote = self._objects.get(number)
        if remote is not None:
            remote.lost.update(dict.fromkeys(ranks, reason))

    def lost_ranks(self, number: int) -> dict[int, str]:
        """Why ranks of a mesh died, or of the actors on a proc mesh, or of the processes of actors; by rank."""
        mesh = self._objects.get(number)
        procs = number if mesh is None or mesh.kind != "actors" else next(iter(mesh.parents), number)
        lost: dict[int, str] = {}
        for remote in list(self._objects.values()):
            on_mesh = remote.kind == "actors" and number in remote.parents[:1]
            if on_mesh or remote.number in (number, procs):
                lost.update(remote.lost)
        return lost

    def derives_from(self, number: int, base: int) -> bool:
        """Whether ``number`` is ``base`` or was made from it."""
        if number == base:
            return True
        remote = self._objects.get(number)
        if remote is None:
            return False
        return base in remote.parents or any(ancestor.number == base for ancestor in remote.ancestors)


# With Monarch's words, for programs that match them.
_STOPPED = {
    "hosts": "hosts mesh {name}",
    "procs": "actor mesh is stopped due to proc mesh shutdown: procs mesh {name}",
    "actors": "The actor mesh {name} and all its descendants have failed: it",
}


def _stopped(remote: RemoteObject) -> Failure:
    message = f"{_STOPPED[remote.kind].format(name=repr(remote.name))} was stopped: {remote.stopped}"
    return Failure(kind="supervision", message=message, mesh=remote.name)
