"""The gateway's end of the tree, as the engine uses it: versions in from the laptop, out to the hosts, acknowledgements
back.

It also keeps the books on which a snapshot may be reused: a version from which no process was started, and from which
none will be, is turned into the next one on the hosts. So whoever starts processes from a version says so first
(``wait``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .delta import Delta, PutFile, Splice, decode, encode, whole
from .digest import NOTHING
from .errors import BaseUnknown
from .frames import Offer
from .plan import GATEWAY, HostSlot, Routes, plan
from .runner import Address, Runner
from .store import Store
from .upstream import Timing
from .versions import Board, Standing

__all__ = ["Distributor", "Laptop", "Progress"]

INLINE = 512 * 1024
"""Versions that bring no more bytes than this travel with their announcement; larger ones in stripes."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a version has come. ``left``: bytes of pieces that the gateway has sent, of all versions."""

    root: bytes
    ready: frozenset[str]
    failed: Mapping[str, str]
    hosts: int
    left: int


class Laptop(Protocol):
    """What the engine does for the distributor, in its event loop."""

    def ask(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        """Have the laptop send these pieces (SyncWants); they come back through ``Distributor.supply``."""
        ...

    def progress(self, progress: Progress) -> None:
        """Some host became ready or failed (SyncStatus)."""
        ...


class Distributor:
    """One session's. ``owner`` names the session. Lives in the engine's event loop: ``start`` first, ``close`` last."""

    def __init__(self, home: str, *, secret: bytes, owner: str, laptop: Laptop, timing: Timing | None = None) -> None:
        self.board = Board()
        self._laptop = laptop
        self._store = Store(home, snapshots=False)
        self._owner = owner
        self._runner = Runner(GATEWAY, self._store, secret=secret, owner=owner, gateway=self, timing=timing)
        self._hosts: dict[str, HostSlot] = {}
        self._offered: list[bytes] = []
        self._opened: set[bytes] = set()
        self._deltas: dict[bytes, Delta] = {}

    async def start(self, bind: str = "127.0.0.1", port: int = 0) -> Address:
        """Listens for the first hosts of the trees; returns where."""
        address = await self._runner.listen(bind, port)
        self._runner.configure(None, {})
        return address

    async def close(self) -> None:
        await self._runner.close()
        self._store.snapshots.release(self._owner)
        self._store.close()

    # --- hosts ------------------------------------------------------------------------------------------

    def add_hosts(self, hosts: Sequence[HostSlot]) -> dict[str, Routes]:
        """Takes hosts in, or in again after a restart; returns the routes to configure each of them with. Those taken
        in before keep theirs."""
        for host in hosts:
            self._hosts[host.name] = host
            self.board.gone(host.name)
        routes = plan(list(self._hosts.values())).routes
        return {host.name: routes[host.name] for host in hosts}

    def remove_host(self, name: str) -> None:
        self._hosts.pop(name, None)
        self.board.gone(name)

    # --- versions ---------------------------------------------------------------------------------------

    @property
    def current(self) -> bytes | None:
        """The version published last."""
        return self._offered[-1] if self._offered else None

    def holds(self, root: bytes) -> bool:
        """Whether a delta against ``root`` can be understood, and ``root`` itself published without one."""
        return root == NOTHING or self._store.tree(root) is not None

    def publish(self, root: bytes, delta: bytes | None = None, pieces: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Brings version ``root`` to all hosts. ``delta`` leads to it from a version held here; without one, it is
        held here itself. ``pieces`` came with it. Raises BaseUnknown, MalformedMessage.

        The version before is given up on the hosts unless processes were started from it or someone waits for it.
        """
        described = decode(delta) if delta is not None else self._describe(root)
        if not self.holds(described.base):
            raise BaseUnknown(described.base)
        before = self.current
        if root == before and not self.board.standing(root).failed:
            return
        reusable = before is not None and before not in self._opened and not self.board.awaited(before)
        replaces = before if reusable and before is not None and before != root else NOTHING
        brought = _brought(described)
        inline = tuple(pieces) if brought <= INLINE else ()
        self._runner.offer(Offer(root, described.base, replaces, brought > INLINE, delta or encode(described), inline))
        if not inline and pieces:
            self._runner.supply(list(pieces))
        if root in self._offered:
            self._offered.remove(root)
        if replaces != NOTHING:
            self.board.forget(replaces)
        self._retire()
        self._offered.append(root)

    def _retire(self) -> None:
        """Stops announcing the versions that no one waits for. What hosts have of them they keep."""
        for root in list(self._offered):
            if not self.board.awaited(root):
                self._offered.remove(root)
                self._runner.withdraw(root)

    def _describe(self, root: bytes) -> Delta:
        tree = self._store.tree(root)
        if tree is None:
            raise BaseUnknown(root)
        return whole(tree)

    def supply(self, pieces: list[tuple[bytes, bytes]]) -> None:
        """Pieces that the laptop was asked for. Raises MalformedMessage when one is not what its digest says."""
        self._runner.supply(pieces)

    async def wait(self, root: bytes, hosts: Iterable[str], timeout: float) -> None:
        """Until processes can be started from version ``root`` on these hosts; from then on its snapshots stay. Raises
        HostsBehind, naming those that have not got it and why; BaseUnknown when it was never published here."""
        self._opened.add(root)
        wanted = set(hosts)
        standing = self.board.standing(root)
        if not wanted <= standing.ready and (root not in self._offered or wanted & standing.failed.keys()):
            for name in wanted & standing.failed.keys():
                del standing.failed[name]
            described = self._describe(root)
            self._runner.offer(Offer(root, NOTHING, NOTHING, _brought(described) > INLINE, encode(described)))
            if root not in self._offered:
                self._offered.insert(0, root)
        self._runner.hold(root)
        await self.board.wait(root, wanted, timeout)

    def standing(self, root: bytes) -> Standing:
        return self.board.standing(root)

    # --- runner.Gateway ---------------------------------------------------------------------------------

    def ask(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        self._laptop.ask(root, digests)

    def report(self, root: bytes, ready: tuple[str, ...], failed: tuple[tuple[str, str], ...]) -> None:
        self.board.note(root, [name for name in ready if name != GATEWAY], dict(failed))
        standing = self.board.standing(root)
        left = self._runner.relay.bytes_sent if self._runner.relay is not None else 0
        self._laptop.progress(Progress(root, frozenset(standing.ready), dict(standing.failed), len(self._hosts), left))


def _brought(delta: Delta) -> int:
    """How many bytes of pieces a version brings at most."""
    total = 0
    for operation in delta.operations:
        if isinstance(operation, PutFile):
            total += operation.file.size
        elif isinstance(operation, Splice):
            total += sum(piece.size for piece in operation.middle)
    return total
