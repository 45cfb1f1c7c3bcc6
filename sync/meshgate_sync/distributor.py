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

from .delta import Delta, brings, decode, encode, patch, whole
from .digest import NOTHING, short
from .errors import BaseUnknown, MalformedMessage
from .frames import Offer
from .plan import CONTROL_FANOUT, GATEWAY, STRIPES, HostSlot, Routes, plan
from .runner import Address, Runner
from .store import Store
from .timing import Timing
from .tree import Directory
from .versions import Board, Standing

__all__ = ["Distributor", "Laptop", "Progress", "Understood"]

_REMEMBERED = 8
_THE_GATEWAY = "the gateway"
INLINE = 2 * 1024 * 1024
"""Versions that bring no more bytes than this travel with their announcement; larger ones in stripes."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a version has come. ``hosts`` counts those in ``failed``, lost ones among them, but not "the gateway",
    which is there when the gateway cannot hand the version on. ``left``: bytes of pieces and deltas that the gateway
    has sent, of all versions."""

    root: bytes
    ready: frozenset[str]
    failed: Mapping[str, str]
    hosts: int
    left: int


@dataclass(frozen=True, slots=True)
class Understood:
    """A version that can be published: what leads to it, also as it is sent, and what it is."""

    delta: Delta
    encoded: bytes
    size: int
    tree: Directory


class Laptop(Protocol):
    """What the engine does for the distributor, in its event loop."""

    def ask(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        """Have the laptop send these pieces (SyncWants); they come back through ``Distributor.supply``."""
        ...

    def progress(self, progress: Progress) -> None:
        """Some host became ready or failed (SyncStatus)."""
        ...


class Distributor:
    """One session's. ``owner`` names the session; ``fanout`` and ``stripes`` are as in ``plan``. Lives in the engine's
    event loop: ``start`` first, ``close`` last."""

    def __init__(self, home: str, *, secret: bytes, owner: str, laptop: Laptop, timing: Timing | None = None) -> None:
        self.board = Board()
        self.fanout, self.stripes = CONTROL_FANOUT, STRIPES
        self.address: Address | None = None
        self._laptop = laptop
        self._store = Store(home, snapshots=False)
        self._owner = owner
        self._runner = Runner(GATEWAY, self._store, secret=secret, owner=owner, gateway=self, timing=timing)
        self._hosts: dict[str, HostSlot] = {}
        self._expected: set[str] = set()
        self._routes: dict[str, Routes] = {}
        self._offered: list[bytes] = []
        self._opened: set[bytes] = set()
        self._trees: dict[bytes, Directory] = {}

    async def start(self, bind: str = "127.0.0.1", port: int = 0) -> Address:
        """Listens for the first hosts of the trees; returns where."""
        self.address = await self._runner.listen(bind, port)
        self._runner.configure(None, {})
        return self.address

    async def close(self) -> None:
        await self._runner.close()
        self._store.snapshots.release(self._owner)
        self._store.close()

    # --- hosts ------------------------------------------------------------------------------------------

    def expect_hosts(self, names: Iterable[str]) -> None:
        """These will be added: until then they count, in what the laptop is told, among those that are not ready."""
        self._expected.update(names)

    def add_hosts(self, hosts: Sequence[HostSlot]) -> dict[str, Routes]:
        """Takes hosts in, or in again after a restart; returns the routes to configure each of them with.

        A host keeps its routes for good, also when it is started again: all that anyone asks were there before, so
        that no two hosts ever wait for each other.
        """
        for host in hosts:
            self._hosts[host.name] = host
            self.board.came(host.name)
        if any(host.name not in self._routes for host in hosts):
            routes = plan(list(self._hosts.values()), fanout=self.fanout, stripes=self.stripes).routes
            self._routes.update({host.name: routes[host.name] for host in hosts if host.name not in self._routes})
        return {host.name: self._routes[host.name] for host in hosts}

    def restart_host(self, name: str) -> None:
        """The host's relay ended: it has nothing until it is added again, for which everyone waits."""
        self.board.came(name)

    def remove_host(self, name: str, why: str | None) -> None:
        """The host is lost: whoever waits for it, and the laptop, are told why. None: it is not expected any more."""
        self._hosts.pop(name, None)
        self._expected.discard(name)
        if why is None:
            self.board.came(name)
        else:
            self.board.gone(name, why)
        if self.current is not None:
            self._tell_laptop(self.current)

    # --- versions ---------------------------------------------------------------------------------------

    @property
    def current(self) -> bytes | None:
        """The version published last."""
        return self._offered[-1] if self._offered else None

    def held(self) -> list[bytes]:
        """Versions that a delta may be told against, newest first."""
        return [*reversed(self._trees), *(root for root in list(self._store.records.trees) if root not in self._trees)]

    def holds(self, root: bytes) -> bool:
        """Whether a delta against ``root`` can be understood, and ``root`` itself published without one."""
        return root in self._trees or self._store.records.tree(root) is not None

    def understand(self, root: bytes, delta: bytes | None) -> Understood:
        """What ``publish`` needs to know of version ``root``, to which ``delta`` leads from a version held here;
        without one, it is held here itself. Raises BaseUnknown, DeltaMismatch, MalformedMessage.

        Changes nothing and takes long for large trees: it may run in another thread, one at a time.
        """
        if delta is None:
            tree = self._tree(root)
            described = whole(tree)
            return Understood(described, encode(described), brings(described), tree)
        described = decode(delta)
        if described.root != root:
            raise MalformedMessage(f"a delta to {short(described.root)} in the offer of {short(root)}")
        tree = patch(self._tree(described.base), described)
        if described.base not in (NOTHING, *self._offered) and self._store.records.tree(described.base) is None:
            described = whole(tree)  # what it was told against is remembered here, but no longer on the disk
            delta = encode(described)
        return Understood(described, delta, brings(described), tree)

    def _tree(self, root: bytes) -> Directory:
        tree = self._trees.get(root) or self._store.records.tree(root)
        if tree is None:
            raise BaseUnknown(root)
        return tree

    def publish(
        self, root: bytes, delta: bytes | Understood | None = None, pieces: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """Brings version ``root`` to all hosts. ``delta``: as ``understand`` takes it, or what that returned.
        ``pieces`` came with it, as for ``supply``. Raises as ``understand``.

        The version before is given up on the hosts unless processes were started from it or someone waits for it.
        """
        understood = delta if isinstance(delta, Understood) else self.understand(root, delta)
        self._trees.pop(root, None)
        self._trees[root] = understood.tree
        for old in list(self._trees)[:-_REMEMBERED]:
            del self._trees[old]
        before = self.current
        standing = self.board.standing(root)
        if root == before and not standing.failed and standing.gateway is None:
            self._tell_laptop(root)
            return
        reusable = before is not None and before not in self._opened and not self.board.awaited(before)
        replaces = before if reusable and before is not None and before != root else NOTHING
        size = understood.size
        inline = tuple(pieces) if size <= INLINE else ()
        retired = [old for old in self._offered if old != root and not self.board.awaited(old)]
        self._offered = [old for old in self._offered if old != root and old not in retired]
        self._offered.append(root)
        for old in retired:
            self.board.forget(old)  # from now on its snapshots may be collected, and nobody tells us
        offer = Offer(root, understood.delta.base, replaces, size > INLINE, understood.encoded, inline)
        self._runner.publish(offer, retired)
        if pieces and not inline:
            self._runner.supply(list(pieces))
        if root in self._opened:
            self._runner.hold(root)
        if self.board.missing:
            self._tell_laptop(root)

    def supply(self, pieces: list[tuple[bytes, bytes]]) -> None:
        """Pieces that the laptop was asked for, as ``protocol.unpack`` returns them: their digests are checked."""
        self._runner.supply(pieces)

    async def wait(self, root: bytes, hosts: Iterable[str], timeout: float) -> None:
        """Until processes can be started from version ``root`` on these hosts; from then on its snapshots stay. A
        version that has not been published yet is waited for. Raises HostsBehind, naming the hosts that have not got
        it and why."""
        self._opened.add(root)
        wanted = set(hosts)
        if not wanted <= self.board.standing(root).ready and self.holds(root):
            self._offer_again(root, wanted)
        if self.holds(root):
            self._runner.hold(root)
        await self.board.wait(root, wanted, timeout)

    def _offer_again(self, root: bytes, wanted: set[str]) -> None:
        """Announces a version that was given up meanwhile, or that some of these hosts could not take."""
        standing = self.board.standing(root)
        failed = wanted & standing.failed.keys()
        if failed or standing.gateway is not None or root not in self._offered:
            standing.gateway = None
            for name in failed:
                del standing.failed[name]
            told = self.understand(root, None)
            self._runner.publish(Offer(root, NOTHING, NOTHING, told.size > INLINE, told.encoded))
        if root not in self._offered:
            self._offered.insert(0, root)

    def standing(self, root: bytes) -> Standing:
        return self.board.standing(root)

    # --- runner.Gateway ---------------------------------------------------------------------------------

    def ask(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        self._laptop.ask(root, digests)

    def report(self, root: bytes, ready: tuple[str, ...], failed: tuple[tuple[str, str], ...]) -> None:
        problems = dict(failed)
        if GATEWAY in ready or GATEWAY in problems:
            self.board.note_gateway(root, problems.pop(GATEWAY, None))
        self.board.note(root, [name for name in ready if name != GATEWAY], problems)
        self._tell_laptop(root)

    def report_trouble(self, hosts: tuple[tuple[str, str], ...]) -> None:
        for name, why in hosts:
            self.board.trouble(name, why)

    def _tell_laptop(self, root: bytes) -> None:
        standing = self.board.standing(root)
        left = self._runner.relay.bytes_sent if self._runner.relay is not None else 0
        failed = {**standing.failed, **self.board.missing}
        hosts = len(self._hosts.keys() | failed.keys() | self._expected)
        if standing.gateway is not None:
            failed[_THE_GATEWAY] = standing.gateway
        self._laptop.progress(Progress(root, frozenset(standing.ready), failed, hosts, left))
