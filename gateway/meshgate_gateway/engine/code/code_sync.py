"""The versions of a session's code: they come from the client and go to the hosts, and spawns wait for them.

Nothing starts until the client offers a version. Then each host of the session gets a sync agent
(``host_agents.py``), and the agents pass on what they receive (``meshgate_sync``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Protocol

import async_timeout
from pydantic import Field, TypeAdapter, ValidationError

from meshgate_gateway.engine.code.host_agents import PROCESS_MODULES, HostAgents, run_until, worker_sources
from meshgate_gateway.engine.engine_metrics import EngineMetrics
from meshgate_gateway.engine.failures import RequestFailed, invalid, stale_code
from meshgate_gateway.engine.interfaces import Handler, Send
from meshgate_gateway.engine.objects.records import HostMesh
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_sync.distribution.distributor import THE_GATEWAY, DecodedOffer, Distributor, Progress
from meshgate_sync.errors import BaseUnknown, HostsBehind, SyncError
from meshgate_sync.store.home import default_home
from meshgate_sync.upload import (
    Patience,
    SyncGone,
    SyncNeed,
    SyncOffer,
    SyncPieces,
    SyncStatus,
    SyncWants,
    decompress,
    join_digests,
    unpack,
)
from meshgate_wire import Fragments
from meshgate_wire.fields import shorten
from meshgate_wire.messages import SYNC_STREAM, Sync

log = logging.getLogger(__name__)

OFFER_TIMEOUT = 120.0  # seconds in which a connected client offers a version that a spawn names
DISTRIBUTION_TIMEOUT = 600.0  # seconds without progress on its way to the hosts
MAX_BASES_NAMED = 64
MAX_REASON = 4096  # characters
MAX_REASONS = 100_000  # bytes of JSON of all reasons in a status; a header that contains it needs up to twice as many
_CLIENT_MESSAGE: TypeAdapter[SyncOffer | SyncPieces | SyncGone] = TypeAdapter(
    Annotated[SyncOffer | SyncPieces | SyncGone, Field(discriminator="type")]
)


class MakeAgents(Protocol):
    def __call__(
        self, distributor: Distributor, gateway: tuple[str, int], /, *, secret: bytes, owner: str
    ) -> HostAgents:
        """``gateway`` is the address of the distributor, at the root of the tree of agents."""


class _Version:
    """A version that was offered, or that a spawn has named."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.offered = asyncio.Event()
        self.files_changed = False  # some of its files changed before the client could send them
        self.superseded: asyncio.Future[bytes] = loop.create_future()  # by which version
        self.rejected: asyncio.Future[str] = loop.create_future()  # why

    def supersede(self, root: bytes) -> None:
        self.files_changed = False
        if not self.superseded.done():
            self.superseded.set_result(root)

    def reject(self, reason: str) -> None:
        if not self.rejected.done():
            self.rejected.set_result(reason)
        self.offered.set()


class CodeSync:
    """The engine's side of the sync. ``host`` is the address at which agents reach this process; None: loopback."""

    def __init__(
        self, objects: ObjectTable, send: Send, make_agents: MakeAgents, host: str | None, metrics: EngineMetrics,
        connected: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._objects, self._send, self._make_agents, self._host = objects, send, make_agents, host
        self._metrics = metrics
        self.connected = connected  # of ``Uploader``, for the distributor
        self.secret = secrets.token_bytes(32)
        self._owner = secrets.token_hex(8)
        self._distributor: Distributor | None = None
        self._agents: HostAgents | None = None
        self._starting: asyncio.Task[Distributor] | None = None
        self._versions: dict[bytes, _Version] = {}
        self._closing = False

    def handlers(self) -> Mapping[type, Handler]:
        return {Sync: self.sync}

    @property
    def current_version(self) -> str:
        """The digest of the version that was published last; empty before the first."""
        current = self._distributor.current if self._distributor is not None else None
        return current.hex() if current is not None else ""

    def has_version(self, host: str) -> bool:
        """Whether ``host`` is ready to run that version."""
        distributor = self._distributor
        if distributor is None or distributor.current is None:
            return False
        return host in distributor.tracker.status(distributor.current).ready

    def parent_of(self, host: str) -> str:
        """The host that ``host`` gets announcements of versions from, or "gateway"; empty if no code was synced."""
        parent = self._distributor.parent_of(host) if self._distributor is not None else None
        return "" if parent is None else parent or "gateway"

    # --- versions ---------------------------------------------------------------------------------------

    async def sync(self, header: Sync, buffers: Sequence[Fragments]) -> None:
        try:
            message = _CLIENT_MESSAGE.validate_json(header.body)
        except ValidationError as error:
            raise invalid(f"invalid sync message: {error}") from None
        try:
            distributor = await self.start()
            if isinstance(message, SyncOffer):
                await self._offer(distributor, message, buffers)
            elif isinstance(message, SyncPieces):
                distributor.supply(await asyncio.to_thread(_unpack, buffers[0], message.size))
            else:
                self._files_changed(distributor, message)
        except Exception as error:  # noqa: BLE001 - the client gets every error as a status
            log.warning("cannot use version %s: %s", message.root[:12], error)
            self._reject(message.root, f"{error or type(error).__name__}")

    async def _offer(self, distributor: Distributor, offer: SyncOffer, buffers: Sequence[Fragments]) -> None:
        """Decodes in a thread, which can take long, while calls proceed. Later sync messages wait."""
        root = bytes.fromhex(offer.root)
        self._metrics.version_offered(root)
        try:
            decoded, pieces = await asyncio.to_thread(_decode, distributor, offer, buffers)
        except BaseUnknown:
            bases = tuple(version.hex() for version in distributor.bases())
            self._send_sync(SyncNeed(root=offer.root, held=bases[:MAX_BASES_NAMED]))
            return
        distributor.publish(root, decoded, pieces)
        if self._version(root).superseded.done() or self._version(root).rejected.done():
            del self._versions[root]  # a new offer of an old version
        self._version(root).offered.set()
        for other, version in self._versions.items():
            if version.files_changed and other != root:
                version.supersede(root)

    def _files_changed(self, distributor: Distributor, message: SyncGone) -> None:
        """Spawns that wait for the version wait for the one after it instead."""
        if message.why:
            self._reject(message.root, message.why)
            return
        root = bytes.fromhex(message.root)
        version = self._version(root)
        version.files_changed = True
        if distributor.current not in (None, root):
            version.supersede(distributor.current)

    def _reject(self, root: str, reason: str) -> None:
        self._metrics.version_dropped(bytes.fromhex(root))
        self._version(bytes.fromhex(root)).reject(f"the gateway cannot use version {root[:12]} of the code: {reason}")
        self._send_sync(SyncStatus(root=root, ready=0, hosts=0, failed=_shorten({THE_GATEWAY: reason})))

    def _version(self, root: bytes) -> _Version:
        return self._versions.setdefault(root, _Version())

    def _send_sync(self, message: SyncNeed | SyncWants | SyncStatus, buffers: Sequence[bytes] = ()) -> None:
        self._send(Sync(body=message.model_dump_json()), buffers, stream=SYNC_STREAM)

    def request_pieces(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        """``Uploader.request_pieces`` of the distributor."""
        self._send_sync(SyncWants(root=root.hex()), (join_digests(digests),))

    def report_progress(self, progress: Progress) -> None:
        """``Uploader.report_progress`` of the distributor."""
        if progress.failed:
            self._metrics.version_dropped(progress.root)
        elif 0 < progress.hosts <= len(progress.ready):
            self._metrics.version_ready(progress.root)
        failed = _shorten(progress.failed)
        lost = {name for known in self._objects.values() if isinstance(known, HostMesh) for name in known.missing}
        status = SyncStatus(
            root=progress.root.hex(),
            ready=len(progress.ready),
            hosts=progress.hosts,
            failed=failed,
            failures=len(progress.failed),
            lost=tuple(name for name in failed if name in lost),
            sent=progress.sent,
        )
        self._send_sync(status)

    async def wait_for_version(self, version: str, hosts: Sequence[str]) -> str:
        """Waits until processes on ``hosts`` can start from ``version``, or from the version that superseded it.

        Returns which. Raises RequestFailed of kind ``stale_code``, or CancelledError if the session ends: the client
        must get the reason for its end, not a failure that results from it.
        """
        try:
            return await self._wait_for_version(version, hosts)
        except RequestFailed:
            if self._closing:
                raise asyncio.CancelledError from None
            raise

    async def _wait_for_version(self, version: str, hosts: Sequence[str]) -> str:
        wanted = sorted({name for name in hosts if name})
        root = bytes.fromhex(version)
        try:
            while True:
                found = self._version(root)
                await self._wait_offered(found)
                if await run_until((found.superseded, found.rejected), self._wait_on_hosts(root, wanted)):
                    return root.hex()
                if not found.superseded.done():
                    raise stale_code(found.rejected.result())
                root = found.superseded.result()
        except asyncio.TimeoutError:
            raise stale_code(
                f"the client did not send version {version[:12]} of the code within {OFFER_TIMEOUT:.0f} s; "
                "call job.sync() again"
            ) from None
        except HostsBehind as error:
            raise stale_code(str(error), error.hosts) from error
        except (SyncError, OSError) as error:
            raise stale_code(f"cannot distribute version {version[:12]} of the code: {error}") from error

    async def _wait_offered(self, version: _Version) -> None:
        """Raises TimeoutError. Time without the client, such as a laptop that sleeps, does not count."""
        loop = asyncio.get_running_loop()
        patience = Patience(OFFER_TIMEOUT, loop.time())
        while not version.offered.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                async with async_timeout.timeout(patience.pause):
                    await version.offered.wait()
            if patience.ends(0 if self.connected() else None, loop.time()) and not version.offered.is_set():
                raise asyncio.TimeoutError

    async def _wait_on_hosts(self, root: bytes, hosts: Sequence[str]) -> None:
        distributor = await self.start()
        assert self._agents is not None
        await self._agents.wait_ready(hosts, root.hex())
        await distributor.wait(root, hosts, DISTRIBUTION_TIMEOUT)

    def process_code(self, version: str | None, paths: Sequence[str]) -> Any:
        """What ``on_worker.set_up_process`` starts a process from; None without a version."""
        return (worker_sources(PROCESS_MODULES), version, list(paths)) if version else None

    # --- agents -----------------------------------------------------------------------------------------

    async def start(self) -> Distributor:
        """Starts the distributor and the agents, once. A start that failed is tried again."""
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Distributor:
        distributor = Distributor(default_home(), secret=self.secret, owner=self._owner, uploader=self)
        try:
            gateway = await distributor.start(self._host or "127.0.0.1")
        except BaseException:
            await distributor.close()
            raise
        self._distributor = distributor
        self._agents = self._make_agents(distributor, gateway, secret=self.secret, owner=self._owner)
        for known in self._objects.values():
            if isinstance(known, HostMesh):
                self._agents.provide(known)
        return distributor

    def hosts_attached(self, hosts: HostMesh) -> None:
        """Provides the hosts with agents, if there is code to sync."""
        if self._agents is not None:
            self._agents.provide(hosts)

    def host_lost(self, name: str, reason: str) -> None:
        if self._agents is not None:
            self._agents.host_lost(name, reason)

    def host_replaced(self, name: str) -> None:
        """A lost host does not return: another has its place, or none."""
        if self._agents is not None:
            self._agents.host_replaced(name)

    def process_ended(self, number: int, rank: int) -> bool:
        """The connection of a process closed. Returns whether it was an agent's."""
        return self._agents is not None and self._agents.process_ended(number, rank)

    async def close(self) -> None:
        """Ends the agents and the distributor."""
        self._closing = True
        if self._agents is not None:
            await self._agents.close()
        if self._distributor is not None:
            await self._distributor.close()


def _decode(
    distributor: Distributor, offer: SyncOffer, buffers: Sequence[Fragments]
) -> tuple[DecodedOffer, list[tuple[bytes, bytes]]]:
    delta = decompress(buffers[0].join(), offer.delta_size) if offer.delta_size else None
    pieces = _unpack(buffers[1], offer.pack_size) if offer.pack_size else []
    return distributor.decode_offer(bytes.fromhex(offer.root), delta), pieces


def _shorten(reasons: Mapping[str, str]) -> dict[str, str]:
    """The ``reasons``, by host, that fit into a message. The gateway's own comes first."""
    kept: dict[str, str] = {}
    size = 0
    for name in sorted(reasons, key=lambda name: name != THE_GATEWAY):
        reason = shorten(reasons[name], MAX_REASON)
        size += len(json.dumps([name, reason]))
        if size > MAX_REASONS:
            break
        kept[name] = reason
    return kept


def _unpack(packed: Fragments, size: int) -> list[tuple[bytes, bytes]]:
    return unpack(decompress(packed.join(), size))
