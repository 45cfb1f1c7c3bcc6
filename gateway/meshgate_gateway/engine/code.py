"""The code of a session: versions come in from the laptop, go out to the hosts, and spawning waits for them.

Nothing of this runs until the laptop offers a version. Then each host of the session gets a relay, in a process of its
own that Monarch spawns there, and the relays hand on what they get (``meshgate_sync``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from meshgate_gateway.engine.library import OF_PROCESSES, library
from meshgate_gateway.engine.objects import Hosts, RequestFailed, invalid
from meshgate_gateway.engine.races import before
from meshgate_gateway.engine.relays import Relays
from meshgate_gateway.engine.reloading import Reloading
from meshgate_sync.compress import unsqueeze
from meshgate_sync.distributor import Distributor, Progress, Understood
from meshgate_sync.errors import BaseUnknown, HostsBehind, SyncError
from meshgate_sync.home import default_home
from meshgate_sync.protocol import (
    SyncGone,
    SyncNeed,
    SyncOffer,
    SyncPieces,
    SyncStatus,
    SyncWants,
    join_digests,
    unpack,
)
from meshgate_wire import Fragments
from meshgate_wire.messages import SYNC_STREAM, Failure, Reload, Sync

if TYPE_CHECKING:
    from meshgate_gateway.engine.engine import Engine, Handler

log = logging.getLogger(__name__)

OFFER_TIMEOUT = 120.0  # seconds that a version which a spawn names may take to be offered
CODE_TIMEOUT = 600.0  # seconds that hosts may take to get it
_FROM_LAPTOP: TypeAdapter[SyncOffer | SyncPieces | SyncGone] = TypeAdapter(
    Annotated[SyncOffer | SyncPieces | SyncGone, Field(discriminator="type")]
)


class _Version:
    """A version that was offered, or that a spawn has named; ``superseded``: by which; ``refused``: why."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.offered = asyncio.Event()
        self.gone = False
        self.superseded: asyncio.Future[bytes] = loop.create_future()
        self.refused: asyncio.Future[str] = loop.create_future()

    def supersede(self, root: bytes) -> None:
        self.gone = False
        if not self.superseded.done():
            self.superseded.set_result(root)

    def refuse(self, why: str) -> None:
        if not self.refused.done():
            self.refused.set_result(why)
        self.offered.set()


class Code:
    """The engine's end of the sync. ``host``: the address at which relays reach this process; None: the loopback."""

    def __init__(self, engine: Engine, host: str | None) -> None:
        self._engine, self._host = engine, host
        self._secret = secrets.token_bytes(32)
        self._owner = secrets.token_hex(8)
        self._distributor: Distributor | None = None
        self._relays: Relays | None = None
        self._starting: asyncio.Task[Distributor] | None = None
        self._versions: dict[bytes, _Version] = {}
        self.reloading = Reloading(engine, self)

    def handlers(self) -> dict[type, Handler]:
        return {Sync: self._sync, Reload: self.reloading.reload}

    # --- versions ---------------------------------------------------------------------------------------

    async def _sync(self, header: Sync, buffers: Sequence[Fragments]) -> None:
        try:
            message = _FROM_LAPTOP.validate_json(header.body)
        except ValidationError as error:
            raise invalid(f"a sync message that is none: {error}") from None
        try:
            distributor = await self._started()
            if isinstance(message, SyncOffer):
                await self._offer(distributor, message, buffers)
            elif isinstance(message, SyncPieces):
                distributor.supply(await asyncio.to_thread(_unpacked, buffers[0], message.size))
            else:
                self._gone(distributor, message)
        except Exception as error:  # noqa: BLE001 - the laptop is told whatever it is
            log.warning("version %s is refused: %s", message.root[:12], error)
            self._refuse(message.root, f"{error or type(error).__name__}")

    async def _offer(self, distributor: Distributor, offer: SyncOffer, buffers: Sequence[Fragments]) -> None:
        """Large ones take a while to be understood, in a thread, while calls go on; those that follow wait."""
        root = bytes.fromhex(offer.root)
        try:
            understood, pieces = await asyncio.to_thread(_understood, distributor, offer, buffers)
        except BaseUnknown:
            held = tuple(version.hex() for version in distributor.held())
            self._tell(SyncNeed(root=offer.root, held=held[:64]))
            return
        distributor.publish(root, understood, pieces)
        if self._version(root).superseded.done() or self._version(root).refused.done():
            del self._versions[root]  # it is offered anew
        self._version(root).offered.set()
        for other, version in self._versions.items():
            if version.gone and other != root:
                version.supersede(root)

    def _gone(self, distributor: Distributor, message: SyncGone) -> None:
        """Files of a version changed before they could be sent: who waits for it waits for the one after it."""
        if message.why:
            self._refuse(message.root, message.why)
            return
        root = bytes.fromhex(message.root)
        version = self._version(root)
        version.gone = True
        if distributor.current not in (None, root):
            version.supersede(distributor.current)

    def _refuse(self, root: str, reason: str) -> None:
        why = f"version {root[:12]} of the code: the gateway could not take it: {reason}"
        self._version(bytes.fromhex(root)).refuse(why)
        self._tell(SyncStatus(root=root, ready=0, hosts=0, failed={"the gateway": reason[:4096]}))

    def _version(self, root: bytes) -> _Version:
        return self._versions.setdefault(root, _Version())

    def _tell(self, message: SyncNeed | SyncWants | SyncStatus, buffers: Sequence[bytes] = ()) -> None:
        self._engine.send(Sync(body=message.model_dump_json()), buffers, stream=SYNC_STREAM)

    def ask(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        """``Laptop.ask`` of the distributor."""
        self._tell(SyncWants(root=root.hex()), (join_digests(digests),))

    def progress(self, progress: Progress) -> None:
        """``Laptop.progress`` of the distributor."""
        status = SyncStatus(
            root=progress.root.hex(),
            ready=len(progress.ready),
            hosts=progress.hosts,
            failed=dict(progress.failed),
            sent=progress.left,
        )
        self._tell(status)

    async def need(self, version: str, hosts: Sequence[str]) -> str:
        """Waits until processes can be started on ``hosts`` from ``version``, or, where its files changed before they
        could be sent, from the one after it; returns which. Raises RequestFailed, kind stale_code."""
        wanted = sorted({name for name in hosts if name})
        root = bytes.fromhex(version)
        try:
            while True:
                found = self._version(root)
                await asyncio.wait_for(found.offered.wait(), OFFER_TIMEOUT)
                if await before((found.superseded, found.refused), self._there(root, wanted)):
                    return root.hex()
                if not found.superseded.done():
                    raise self.stale(found.refused.result())
                root = found.superseded.result()
        except asyncio.TimeoutError:
            raise self.stale(f"version {version[:12]} was not offered within {OFFER_TIMEOUT:.0f} s") from None
        except HostsBehind as error:
            raise self.stale(str(error), error.hosts) from error
        except (SyncError, OSError) as error:
            raise self.stale(f"version {version[:12]} of the code: {error}") from error

    async def _there(self, root: bytes, hosts: Sequence[str]) -> None:
        distributor = await self._started()
        assert self._relays is not None
        await self._relays.ready(hosts, root.hex())
        await distributor.wait(root, hosts, CODE_TIMEOUT)

    def stale(self, message: str, hosts: Iterable[str] = ()) -> RequestFailed:
        """The error of who cannot have the code that was named."""
        return RequestFailed(Failure(kind="stale_code", message=message, hosts=dict(enumerate(hosts))))

    # --- relays -----------------------------------------------------------------------------------------

    async def _started(self) -> Distributor:
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._starting = self._engine.loop.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Distributor:
        distributor = Distributor(default_home(), secret=self._secret, owner=self._owner, laptop=self)
        try:
            gateway = await distributor.start(self._host or "127.0.0.1")
        except BaseException:
            await distributor.close()
            raise
        self._distributor = distributor
        self._relays = Relays(self._engine, distributor, gateway, secret=self._secret, owner=self._owner)
        for known in self._engine.objects.each():
            if isinstance(known, Hosts):
                self._relays.give(known)
        return distributor

    def hosts_attached(self, hosts: Hosts) -> None:
        """Gives the hosts relays, if there is code to be synced."""
        if self._relays is not None:
            self._relays.give(hosts)

    def host_lost(self, name: str, why: str) -> None:
        if self._relays is not None:
            self._relays.host_lost(name, why)

    def host_left(self, name: str) -> None:
        """The host was lost, and another has its place: nobody waits for it any more."""
        if self._relays is not None:
            self._relays.host_left(name)

    def process_ended(self, number: int, rank: int) -> bool:
        """A process's connection closed; whether it was a relay's."""
        return self._relays is not None and self._relays.process_ended(number, rank)

    # --- processes --------------------------------------------------------------------------------------

    def code_of(self, version: str | None, paths: Sequence[str]) -> Any:
        """What ``on_worker.begin`` takes hold of."""
        return (library(OF_PROCESSES), version, list(paths)) if version else None

    async def close(self) -> None:
        """Ends the relays with their processes, and the gateway's own."""
        if self._relays is not None:
            await self._relays.close()
        if self._distributor is not None:
            await self._distributor.close()


def _understood(
    distributor: Distributor, offer: SyncOffer, buffers: Sequence[Fragments]
) -> tuple[Understood, list[tuple[bytes, bytes]]]:
    delta = unsqueeze(buffers[0].join(), offer.delta_size) if offer.delta_size else None
    pieces = _unpacked(buffers[1], offer.pack_size) if offer.pack_size else []
    return distributor.understand(bytes.fromhex(offer.root), delta), pieces


def _unpacked(packed: Fragments, size: int) -> list[tuple[bytes, bytes]]:
    return unpack(unsqueeze(packed.join(), size))
