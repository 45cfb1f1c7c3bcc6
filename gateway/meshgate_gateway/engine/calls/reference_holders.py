"""What has references to kept values, besides the driver and its calls: processes, and messages on their way.

A process says so on a connection of its own, which the kernel closes when the process ends
(``on_worker/kept_references.ProcessReferences`` is the other end of it). It also says when a reference has arrived that
it has got from another process or from the engine, so that the sender need no longer keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from meshgate_gateway.engine.objects.records import KeptMesh

ENGINE = (0, 0)  # in place of the mesh and the rank of a process that has passed a reference


class ReferenceHolders:
    """``find(number)`` is the kept mesh with this number, if its values have not been dropped; ``let_go(kept)`` is
    called when one has a holder less."""

    def __init__(self, find: Callable[[int], KeptMesh | None], let_go: Callable[[KeptMesh], object]) -> None:
        self.find, self._let_go = find, let_go
        self.processes: dict[tuple[int, int], ReferringProcess] = {}  # by mesh and rank
        self.casts: dict[int, Cast] = {}
        self._numbers = count(1)

    def connected(self, mesh: int, rank: int, write: Callable[[bytes], object]) -> ReferringProcess:
        """A process has got its first reference. ``write`` sends to it."""
        process = self.processes[mesh, rank] = ReferringProcess(self, (mesh, rank), write)
        return process

    def cast(self, kept: KeptMesh, target: int, receivers: int) -> Cast:
        """A message without an answer refers to ``kept``: to so many actors of the mesh ``target``."""
        cast = Cast(self, next(self._numbers), kept, target, receivers)
        self.casts[cast.number] = cast
        self.hold(kept)
        return cast

    def arrived(self, sender: tuple[int, int], number: int) -> None:
        """A copy of the reference that ``sender`` has passed as ``number`` is where it was sent."""
        if sender == ENGINE:
            if (cast := self.casts.get(number)) is not None:
                cast.arrived()
        elif (process := self.processes.get(sender)) is not None:
            process.write(b"%d\n" % number)

    def actors_ended(self, target: int) -> None:
        """All actors of the mesh have ended: nothing more arrives there."""
        for cast in [cast for cast in self.casts.values() if cast.target == target]:
            cast.end()

    def hold(self, kept: KeptMesh) -> None:
        kept.holders += 1

    def let_go(self, kept: KeptMesh) -> None:
        kept.holders -= 1
        self._let_go(kept)


class Cast:
    """A reference in a message of the engine's, until all actors have got it, or have ended. ``passed`` is what their
    processes name it by."""

    def __init__(self, holders: ReferenceHolders, number: int, kept: KeptMesh, target: int, receivers: int) -> None:
        self._holders, self.number, self._kept, self.target, self._left = holders, number, kept, target, receivers
        self.passed = (*ENGINE, number)

    def arrived(self) -> None:
        self._left -= 1
        if not self._left:
            self.end()

    def end(self) -> None:
        if self._holders.casts.pop(self.number, None) is not None:
            self._holders.let_go(self._kept)


class ReferringProcess:
    """A process that has references, or has had some."""

    def __init__(self, holders: ReferenceHolders, place: tuple[int, int], write: Callable[[bytes], object]) -> None:
        self._holders, self._place, self.write = holders, place, write
        self._kept: dict[int, KeptMesh] = {}

    def received(self, line: bytes) -> None:
        """Handles what the process says: ``+`` and the number of an object to whose values it has its first reference,
        which is answered; ``-`` and that number if its last one is gone; or ``=``, mesh and rank of a process and the
        number of a reference that has arrived from there."""
        kind, numbers = line[:1], [int(each) for each in line[1:].split()]
        if kind == b"=":
            mesh, rank, number = numbers
            self._holders.arrived((mesh, rank), number)
            return
        (number,) = numbers
        if kind == b"-":
            self._let_go(number)
            return
        kept = self._holders.find(number)
        if kept is not None and number not in self._kept:  # what has been dropped stays so: a fetch says why
            self._kept[number] = kept
            self._holders.hold(kept)
        self.write(b"+\n")

    def _let_go(self, number: int) -> None:
        if (kept := self._kept.pop(number, None)) is not None:
            self._holders.let_go(kept)

    def end(self) -> None:
        """The process has ended."""
        self._holders.processes.pop(self._place, None)
        for number in [*self._kept]:
            self._let_go(number)
