"""The messages that created a session's objects, and what its holders numbered: what a new holder must know."""

from __future__ import annotations

from collections.abc import Iterator

from meshgate_wire.messages import AttachHosts, OpenChannel, SpawnActors, SpawnProcs, Stop

Creation = AttachHosts | SpawnProcs | SpawnActors | OpenChannel
CREATIONS = (AttachHosts, SpawnProcs, SpawnActors, OpenChannel)
MAX_GAP = 65_536  # numbers; a client leaves none, and a larger gap is only counted


class Creations:
    """The creations of a session's objects, and which of the meshes the program has stopped."""

    def __init__(self) -> None:
        self._created: dict[int, Creation] = {}
        self._stopped: dict[int, Stop] = {}

    def add(self, header: Creation) -> None:
        self._created[header.object] = header

    def stopped(self, header: Stop) -> None:
        """Notes that a whole mesh was stopped. Stopped hosts stay usable unless they are shut down."""
        created = self._created.get(header.target.object)
        if header.target.region is None and (header.shutdown or not isinstance(created, AttachHosts)):
            self._stopped[header.target.object] = header

    def released(self, number: int) -> None:
        """Forgets a channel. Meshes stay, because others may have been made from them."""
        if isinstance(self._created.get(number), OpenChannel):
            del self._created[number]

    @property
    def highest(self) -> int:
        """The highest number of an object so far."""
        return max(self._created, default=0)

    def __contains__(self, number: object) -> bool:
        return number in self._created

    def __iter__(self) -> Iterator[Creation | Stop]:
        """Every creation, parents first, then every stop."""
        for number in sorted(self._created):
            yield self._created[number]
        yield from self._stopped.values()

    def names(self, kind: type[SpawnProcs | SpawnActors]) -> list[str]:
        """The names of the meshes of one kind that the program has not stopped."""
        found = self._created.items()
        return [each.name for number, each in found if isinstance(each, kind) and number not in self._stopped]

    @property
    def newest_procs(self) -> SpawnProcs | None:
        return next((each for each in reversed(self._created.values()) if isinstance(each, SpawnProcs)), None)


class CallNumbers:
    """Which numbers of calls have arrived. A client counts up, so a number that is missing was posted and lost."""

    def __init__(self) -> None:
        self.highest = 0
        self._missing: set[int] = set()
        self._uncounted = 0

    def start(self, highest: int) -> None:
        """Numbers up to ``highest`` have all been used."""
        self.highest = highest
        self._missing.clear()
        self._uncounted = 0

    def add(self, number: int) -> None:
        if number <= self.highest:
            self._missing.discard(number)
            return
        gap = number - self.highest - 1
        if gap > MAX_GAP:
            self._uncounted += gap
        elif gap:
            self._missing.update(range(self.highest + 1, number))
        self.highest = number

    @property
    def missing(self) -> int:
        return len(self._missing) + self._uncounted
