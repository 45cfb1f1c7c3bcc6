"""The gateway's end of the tree, as the engine uses it: versions in from the client, out to the hosts, acknowledgements
back.

It also decides whether a snapshot may be reused: a version from which no process was started, and from which none will
be, is turned into the next one on the hosts. So processes are started from a version only after ``wait``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import BaseUnknown, HostsBehind, MalformedMessage
from ..relay.commands import Timeouts
from ..relay.frames import Offer
from ..relay.plan import CONTROL_FANOUT, GATEWAY, STRIPES, HostSlot, Routes, plan
from ..store.store import Store
from ..transport.runner import Address, Runner
from ..tree.delta import INLINE_LIMIT, Delta, decode, encode, full_delta, patch, transfer_size
from ..tree.tree import NOTHING, Directory, short
from ..upload import Patience

_MAX_TREES = 8
_PROGRESS = 1024 * 1024  # bytes
THE_GATEWAY = "the gateway"


# Which host is ready to run which version, as the engine knows it, and waiting for it.
#
# The tracker is notified of every acknowledgement and of every version that is retired. Waiters belong to one event
# loop.


@dataclass(slots=True)
class VersionStatus:
    """Of one version: the hosts that are ready, why others cannot get it, and why the gateway cannot distribute it."""

    ready: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    gateway: str | None = None


class VersionTracker:
    def __init__(self) -> None:
        self._statuses: dict[bytes, VersionStatus] = {}
        self._waiters: dict[bytes, list[asyncio.Future[None]]] = {}
        self._lost: dict[str, str] = {}
        self._unreachable: dict[str, str] = {}

    def status(self, root: bytes) -> VersionStatus:
        return self._statuses.get(root) or VersionStatus()

    def is_awaited(self, root: bytes) -> bool:
        """Whether anyone is waiting for this version now."""
        return bool(self._waiters.get(root))

    def add(self, root: bytes, ready: Iterable[str], failed: Mapping[str, str]) -> None:
        """Hosts are ready for a version, or cannot get it."""
        status = self._statuses.setdefault(root, VersionStatus())
        for name in ready:
            status.ready.add(name)
            status.failed.pop(name, None)
        for name, reason in failed.items():
            status.ready.discard(name)
            status.failed[name] = reason
        self._wake(root)

    def set_gateway(self, root: bytes, problem: str | None) -> None:
        """Why the gateway cannot distribute the version; None if it can."""
        self._statuses.setdefault(root, VersionStatus()).gateway = problem
        self._wake(root)

    def _wake(self, root: bytes) -> None:
        for waiter in self._waiters.pop(root, []):
            if not waiter.done():
                waiter.set_result(None)

    def retire(self, root: bytes) -> None:
        """Forgets which hosts are ready for this version: they may collect it unnoticed."""
        self._statuses.pop(root, None)

    @property
    def lost_hosts(self) -> Mapping[str, str]:
        """The hosts that were lost, and why."""
        return self._lost

    def set_unreachable(self, host: str, problem: str) -> None:
        """What the host cannot reach and why, for the error if it is late. "" if it can again."""
        self._unreachable[host] = problem

    def host_lost(self, host: str, reason: str) -> None:
        """A host was lost with all it has. Fails the waits for it."""
        self._lost[host] = reason
        self._clear(host)
        for root in list(self._waiters):
            self._wake(root)

    def host_started(self, host: str) -> None:
        """A host is there, new or restarted: it has nothing yet."""
        self._lost.pop(host, None)
        self._unreachable.pop(host, None)
        self._clear(host)

    def _clear(self, host: str) -> None:
        for status in self._statuses.values():
            status.ready.discard(host)
            status.failed.pop(host, None)

    async def wait(
        self, root: bytes, hosts: Iterable[str], timeout: float, progress: Callable[[], int | None] = lambda: 0
    ) -> None:
        """Until all ``hosts`` are ready for ``root``. Raises HostsBehind, naming those that are not: as soon as one
        cannot be or the gateway cannot distribute the version, and after ``timeout`` seconds in which neither
        ``progress()`` nor the number of hosts that are ready has changed. Time in which ``progress()`` is None does not
        count."""
        wanted = set(hosts)
        loop = asyncio.get_running_loop()
        patience = Patience(timeout, loop.time())
        while True:
            behind = self._behind(root, wanted)
            if not behind:
                return
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.setdefault(root, []).append(waiter)
            try:
                await asyncio.wait((waiter,), timeout=patience.pause)
            finally:
                if waiter in self._waiters.get(root, []):
                    self._waiters[root].remove(waiter)
            moved = progress()
            done = None if moved is None else (moved, len(self.status(root).ready))
            if patience.ends(done, loop.time()) and not waiter.done():
                late = f"did not acknowledge it, and nothing moved for {timeout:.0f} s"
                reasons = {name: f"{late}; it {problem}" for name, problem in self._unreachable.items() if problem}
                raise HostsBehind(root.hex(), {name: reasons.get(name, late) for name in sorted(behind)})

    def _behind(self, root: bytes, hosts: set[str]) -> set[str]:
        """The hosts that are not ready yet. Raises HostsBehind if one of them cannot be."""
        status = self.status(root)
        behind = hosts - status.ready
        if not behind:
            return behind
        if status.gateway is not None:
            raise HostsBehind(root.hex(), {}, status.gateway)
        reasons = {**status.failed, **self._lost}
        failed = {name: reasons[name] for name in sorted(behind) if name in reasons}
        if failed:
            raise HostsBehind(root.hex(), failed)
        return behind


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a version has come. ``failed``: why, by host, lost ones included; and under "the gateway" why the gateway
    cannot distribute it. ``hosts`` counts hosts only. ``sent``: bytes of pieces and deltas that the gateway has sent,
    of all versions."""

    root: bytes
    ready: frozenset[str]
    failed: Mapping[str, str]
    hosts: int
    sent: int


@dataclass(frozen=True, slots=True)
class DecodedOffer:
    """A version that can be published: the delta to it, decoded and encoded; how many bytes it adds; its tree."""

    delta: Delta
    encoded: bytes
    size: int
    tree: Directory


class Uploader(Protocol):
    """What the distributor needs from the engine; called in the engine's event loop."""

    def request_pieces(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        """Request these pieces from the client (SyncWants); pass them to ``Distributor.supply``."""
        ...

    def report_progress(self, progress: Progress) -> None:
        """A host became ready or failed (SyncStatus)."""
        ...

    def connected(self) -> bool:
        """Whether the client is there."""
        ...


class Distributor:
    """The distributor of one session. ``owner`` names the session; ``fanout`` and ``stripes`` are as in ``plan``. Runs
    in the engine's event loop: call ``start`` first, ``close`` last."""

    def __init__(
        self, home: str, *, secret: bytes, owner: str, uploader: Uploader, timeouts: Timeouts | None = None
    ) -> None:
        self.tracker = VersionTracker()
        self.fanout, self.stripes = CONTROL_FANOUT, STRIPES
        self.address: Address | None = None
        self._uploader = uploader
        self._store = Store(home, snapshots=False)
        self._owner = owner
        self._runner = Runner(GATEWAY, self._store, secret=secret, owner=owner, gateway=self, timeouts=timeouts)
        self._hosts: dict[str, HostSlot] = {}
        self._expected: set[str] = set()
        self._routes: dict[str, Routes] = {}
        self._offered: list[bytes] = []
        self._opened: set[bytes] = set()
        self._supplied = 0
        self._trees: dict[bytes, Directory] = {}

    async def start(self, bind: str = "127.0.0.1", port: int = 0) -> Address:
        """Listens for hosts; returns the address."""
        self.address = await self._runner.listen(bind, port)
        self._runner.configure(None, {})
        return self.address

    async def close(self) -> None:
        await self._runner.close()
        self._store.snapshots.release(self._owner)
        self._store.close()

    # --- hosts ------------------------------------------------------------------------------------------

    def expect_hosts(self, names: Iterable[str]) -> None:
        """These hosts will be added. Until then they count as not ready in the progress that is reported."""
        self._expected.update(names)

    def add_hosts(self, hosts: Sequence[HostSlot]) -> dict[str, Routes]:
        """Adds hosts, or adds them again after a restart; returns the routes to configure each of them with.

        A host keeps its routes for good, also after a restart: every parent on a route was added before its child, so
        no two hosts ever wait for each other.
        """
        for host in hosts:
            self._hosts[host.name] = host
            self.tracker.host_started(host.name)
        if any(host.name not in self._routes for host in hosts):
            routes = plan(list(self._hosts.values()), fanout=self.fanout, stripes=self.stripes).routes
            self._routes.update({host.name: routes[host.name] for host in hosts if host.name not in self._routes})
        return {host.name: self._routes[host.name] for host in hosts}

    def parent_of(self, name: str) -> str | None:
        """The host that ``name`` hears of versions from, or ``GATEWAY``; None if it has not been added. It asks the
        next on its route while this one does not answer."""
        routes = self._routes.get(name)
        return routes.control[0] if routes is not None else None

    def restart_host(self, name: str) -> None:
        """The host's relay ended. The host has nothing until it is added again; ``wait`` waits for it."""
        self.tracker.host_started(name)

    def remove_host(self, name: str, reason: str | None) -> None:
        """The host is lost: fails the waits for it and reports it with ``reason``. None: it was replaced
        and is no longer expected."""
        self._hosts.pop(name, None)
        self._expected.discard(name)
        if reason is None:
            self.tracker.host_started(name)
        else:
            self.tracker.host_lost(name, reason)
        if self.current is not None:
            self._report_progress(self.current)

    # --- versions ---------------------------------------------------------------------------------------

    @property
    def current(self) -> bytes | None:
        """The version that was published last."""
        return self._offered[-1] if self._offered else None

    def bases(self) -> list[bytes]:
        """The versions that can be the base of a delta, newest first."""
        return [*reversed(self._trees), *(root for root in list(self._store.records.trees) if root not in self._trees)]

    def has_base(self, root: bytes) -> bool:
        """Whether ``root`` can be the base of a delta, and be published without one."""
        return root in self._trees or self._store.records.tree(root) is not None

    def decode_offer(self, root: bytes, delta: bytes | None) -> DecodedOffer:
        """Decodes an offer for ``publish``: ``delta`` leads to version ``root`` from one that is held here; without it,
        ``root`` itself is held here. Raises BaseUnknown, DeltaMismatch, MalformedMessage.

        Changes nothing. Takes long for large trees: it may run in another thread, one call at a time.
        """
        if delta is None:
            tree = self._tree(root)
            decoded = full_delta(tree)
            return DecodedOffer(decoded, encode(decoded), transfer_size(decoded), tree)
        decoded = decode(delta)
        if decoded.root != root:
            raise MalformedMessage(f"invalid offer of version {short(root)}: its delta leads to {short(decoded.root)}")
        tree = patch(self._tree(decoded.base), decoded)
        base = decoded.base
        if base not in (NOTHING, *self._offered) and self._store.records.tree(base) is None:
            decoded = full_delta(tree)  # the base is in memory here, but no longer in the store
            delta = encode(decoded)
        return DecodedOffer(decoded, delta, transfer_size(decoded), tree)

    def _tree(self, root: bytes) -> Directory:
        tree = self._trees.get(root) or self._store.records.tree(root)
        if tree is None:
            raise BaseUnknown(root)
        return tree

    def publish(
        self, root: bytes, delta: bytes | DecodedOffer | None = None, pieces: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """Distributes version ``root`` to all hosts. ``delta``: as ``decode_offer`` takes it, or what that returned.
        ``pieces`` came with the offer, as for ``supply``. Raises what ``decode_offer`` raises.

        The version before it is retired on the hosts, unless processes were started from it or a caller waits for it.
        """
        decoded = delta if isinstance(delta, DecodedOffer) else self.decode_offer(root, delta)
        self._trees.pop(root, None)
        self._trees[root] = decoded.tree
        for old in list(self._trees)[:-_MAX_TREES]:
            del self._trees[old]
        before = self.current
        status = self.tracker.status(root)
        if root == before and not status.failed and status.gateway is None:
            self._report_progress(root)
            return
        reusable = before is not None and before not in self._opened and not self.tracker.is_awaited(before)
        replaces = before if reusable and before is not None and before != root else NOTHING
        size = decoded.size
        inline = tuple(pieces) if size <= INLINE_LIMIT else ()
        retired = [old for old in self._offered if old != root and not self.tracker.is_awaited(old)]
        self._offered = [old for old in self._offered if old != root and old not in retired]
        self._offered.append(root)
        for old in retired:
            self.tracker.retire(old)
        offer = Offer(root, decoded.delta.base, replaces, size > INLINE_LIMIT, decoded.encoded, inline)
        self._runner.publish(offer, retired)
        if pieces and not inline:
            self._runner.supply(list(pieces))
        if root in self._opened:
            self._runner.hold(root)
        if self.tracker.lost_hosts:
            self._report_progress(root)

    def supply(self, pieces: list[tuple[bytes, bytes]]) -> None:
        """Pieces that were requested from the client, their digests checked by ``protocol.unpack``."""
        self._supplied += len(pieces)
        self._runner.supply(pieces)

    async def wait(self, root: bytes, hosts: Iterable[str], timeout: float) -> None:
        """Waits until processes can be started from version ``root`` on these hosts; from then on they hold its
        snapshots. The version may be published later. Raises HostsBehind, naming the hosts that do not have it and
        why, after ``timeout`` seconds in which nothing moved although the client was connected."""
        self._opened.add(root)
        wanted = set(hosts)
        if not wanted <= self.tracker.status(root).ready and self.has_base(root):
            self._offer_again(root, wanted)
        if self.has_base(root):
            self._runner.hold(root)
        await self.tracker.wait(root, wanted, timeout, lambda: self._progress(root))

    def _progress(self, root: bytes) -> int | None:
        """Grows while pieces come from the client or leave for hosts. None while the client is away and has pieces that
        are missing here. The small deltas of saves do not count: they may follow each other for ever."""
        if not self._uploader.connected() and not self._store.ready(root):
            return None
        return self._supplied + self._bytes_sent // _PROGRESS

    @property
    def _bytes_sent(self) -> int:
        return self._runner.relay.bytes_sent if self._runner.relay is not None else 0

    def _offer_again(self, root: bytes, wanted: set[str]) -> None:
        """Announces a version again that was retired meanwhile, or that some of these hosts failed to get."""
        status = self.tracker.status(root)
        failed = wanted & status.failed.keys()
        if failed or status.gateway is not None or root not in self._offered:
            status.gateway = None
            for name in failed:
                del status.failed[name]
            offer = self.decode_offer(root, None)
            self._runner.publish(Offer(root, NOTHING, NOTHING, offer.size > INLINE_LIMIT, offer.encoded))
        if root not in self._offered:
            self._offered.insert(0, root)

    # --- runner.GatewayCallbacks ------------------------------------------------------------------------

    def request_pieces(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        self._uploader.request_pieces(root, digests)

    def report_status(self, root: bytes, ready: tuple[str, ...], failed: tuple[tuple[str, str], ...]) -> None:
        problems = dict(failed)
        if GATEWAY in ready or GATEWAY in problems:
            self.tracker.set_gateway(root, problems.pop(GATEWAY, None))
        self.tracker.add(root, [name for name in ready if name != GATEWAY], problems)
        self._report_progress(root)

    def report_unreachable(self, hosts: tuple[tuple[str, str], ...]) -> None:
        for name, problem in hosts:
            self.tracker.set_unreachable(name, problem)

    def _report_progress(self, root: bytes) -> None:
        status = self.tracker.status(root)
        failed = {**status.failed, **self.tracker.lost_hosts}
        hosts = len(self._hosts.keys() | failed.keys() | self._expected)
        if status.gateway is not None:
            failed[THE_GATEWAY] = status.gateway
        self._uploader.report_progress(Progress(root, frozenset(status.ready), failed, hosts, self._bytes_sent))
