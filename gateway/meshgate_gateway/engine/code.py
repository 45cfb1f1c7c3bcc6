"""The code of a session: versions come in from the laptop, go out to the hosts, and spawning waits for them.

Nothing of this runs until the laptop offers a version. Then each host of the session gets a relay, in a process of its
own that Monarch spawns there, and the relays hand on what they get (``meshgate_sync``).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from meshgate_gateway.engine import on_worker
from meshgate_gateway.engine.calls import Pending
from meshgate_gateway.engine.library import OF_HOSTS, OF_PROCESSES, library
from meshgate_gateway.engine.objects import Actors, Hosts, Procs, RequestFailed, extent_of, invalid, ranks_of
from meshgate_sync.compress import unsqueeze
from meshgate_sync.distributor import Distributor, Progress
from meshgate_sync.errors import BaseUnknown, HostsBehind, SyncError
from meshgate_sync.home import default_home
from meshgate_sync.plan import GATEWAY, HostSlot
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
from meshgate_wire.messages import Failure, Reload, Sync, stream_of

if TYPE_CHECKING:
    from meshgate_gateway.engine.engine import Engine, Handler

log = logging.getLogger(__name__)

STREAM = 2**31 - 1
OFFER_TIMEOUT = 120.0  # seconds that a version which a spawn names may take to be offered
CODE_TIMEOUT = 600.0  # seconds that hosts may take to get it
_FROM_LAPTOP: TypeAdapter[SyncOffer | SyncPieces | SyncGone] = TypeAdapter(
    Annotated[SyncOffer | SyncPieces | SyncGone, Field(discriminator="type")]
)


class Code:
    """The engine's end of the sync. ``host``: the address at which relays reach this process; None: the loopback."""

    def __init__(self, engine: Engine, host: str | None) -> None:
        self._engine, self._host = engine, host
        self._secret = secrets.token_bytes(32)
        self._owner = secrets.token_hex(8)
        self._distributor: Distributor | None = None
        self._starting: asyncio.Task[Distributor] | None = None
        self._offered: dict[bytes, asyncio.Event] = {}
        self._relays: dict[str, asyncio.Task[None]] = {}  # by mesh of hosts
        self._addresses: dict[str, tuple[str, int]] = {}
        self._spawned: list[Any] = []
        self._reloaders: dict[int, Actors] = {}

    def handlers(self) -> dict[type, Handler]:
        return {Sync: self._sync, Reload: self._reload}

    # --- versions ---------------------------------------------------------------------------------------

    async def _sync(self, header: Sync, buffers: Sequence[Fragments]) -> None:
        try:
            message = _FROM_LAPTOP.validate_json(header.body)
        except ValidationError as error:
            raise invalid(f"a sync message that is none: {error}") from None
        distributor = await self._started()
        if isinstance(message, SyncOffer):
            self._offer(distributor, message, buffers)
        elif isinstance(message, SyncPieces):
            distributor.supply(unpack(unsqueeze(buffers[0].join(), message.size)))

    def _offer(self, distributor: Distributor, offer: SyncOffer, buffers: Sequence[Fragments]) -> None:
        root = bytes.fromhex(offer.root)
        delta = unsqueeze(buffers[0].join(), offer.delta_size) if offer.delta_size else None
        pieces = unpack(unsqueeze(buffers[1].join(), offer.pack_size)) if offer.pack_size else ()
        try:
            distributor.publish(root, delta, pieces)
        except BaseUnknown:
            held = tuple(version.hex() for version in distributor.held())
            self._tell(SyncNeed(root=offer.root, held=held[:64]))
            return
        self._offered.setdefault(root, asyncio.Event()).set()

    def _tell(self, message: SyncNeed | SyncWants | SyncStatus, buffers: Sequence[bytes] = ()) -> None:
        self._engine.send(Sync(body=message.model_dump_json()), buffers, stream=STREAM)

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

    async def need(self, version: str, hosts: Sequence[str]) -> None:
        """Waits until processes can be started from ``version`` on ``hosts``. Raises RequestFailed, kind stale_code."""
        root = bytes.fromhex(version)
        offered = self._offered.setdefault(root, asyncio.Event())
        try:
            await asyncio.wait_for(offered.wait(), OFFER_TIMEOUT)
            distributor = await self._started()
            for relays in list(self._relays.values()):
                await asyncio.shield(relays)
            await distributor.wait(root, hosts, CODE_TIMEOUT)
        except asyncio.TimeoutError:
            raise _stale(f"version {version[:12]} was not offered within {OFFER_TIMEOUT:.0f} s") from None
        except HostsBehind as error:
            raise _stale(str(error)) from error
        except SyncError as error:
            raise _stale(f"version {version[:12]} of the code: {error}") from error

    # --- relays -----------------------------------------------------------------------------------------

    async def _started(self) -> Distributor:
        if self._starting is None:
            self._starting = self._engine.loop.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Distributor:
        distributor = Distributor(default_home(), secret=self._secret, owner=self._owner, laptop=self)
        self._addresses[GATEWAY] = await distributor.start(self._host or "127.0.0.1")
        self._distributor = distributor
        for known in self._engine.objects.each():
            if isinstance(known, Hosts):
                self.hosts_attached(known)
        return distributor

    def hosts_attached(self, hosts: Hosts) -> None:
        """Gives the hosts relays, if there is code to be synced."""
        if self._distributor is not None and hosts.name not in self._relays:
            self._relays[hosts.name] = self._engine.start(self._start_relays(self._distributor, hosts))

    async def _start_relays(self, distributor: Distributor, hosts: Hosts) -> None:
        from meshgate_gateway.engine.code_on_worker import HostCode  # noqa: PLC0415 - it imports Monarch

        binding = self._engine.binding
        streams = self._engine.streams
        begin = functools.partial(on_worker.begin, streams.address, streams.secret, 0, None, None)
        procs = binding.spawn_procs(hosts.mesh, {}, "meshgate_code", begin)
        self._spawned.append(procs)
        relays = binding.spawn_own(procs, "relay", HostCode, "sync", library(OF_HOSTS))
        count = len(hosts.names)
        bind = "0.0.0.0" if self._host else "127.0.0.1"
        told = [_ip_of(address) if self._host else "" for address in hosts.addresses]
        try:
            started = await binding.ask_own(
                relays, count, "start", list(hosts.names), self._secret, self._owner, bind, told
            )
            for name, address in zip(hosts.names, started, strict=True):
                self._addresses[name] = (address[0], address[1])
            routes = distributor.add_hosts([HostSlot(name) for name in hosts.names])
            plain = {name: (route.control, route.stripes) for name, route in routes.items()}
            await binding.ask_own(relays, count, "configure", plain, dict(self._addresses))
        except Exception as error:
            log.warning("hosts of %s got no relay: %s", hosts.name, error)
            raise _stale(f"the hosts of {hosts.name!r} could not be given a relay for code: {error}") from error

    # --- processes --------------------------------------------------------------------------------------

    def code_of(self, version: str | None, paths: Sequence[str]) -> Any:
        """What ``on_worker.begin`` takes hold of."""
        return (library(OF_PROCESSES), version, list(paths)) if version else None

    async def bring(self, number: int, procs: Procs, version: str, paths: Sequence[str]) -> None:
        """Brings running processes to ``version`` before actors are spawned in them. Raises RequestFailed."""
        reloader = await self._reloader(number, procs, version)
        try:
            await self._engine.binding.ask_own(reloader.inner, extent_of(procs.region), "reload", version, list(paths))
        except Exception as error:
            raise _stale(f"the processes of {procs.name!r} could not be brought to the newest code: {error}") from error
        procs.version = version

    async def _reloader(self, number: int, procs: Procs, version: str) -> Actors:
        """The actors that reload these processes, whose hosts have ``version`` by now."""
        from meshgate_gateway.engine.code_on_worker import ProcessCode  # noqa: PLC0415 - it imports Monarch

        if procs.version is None:
            raise invalid(f"the processes of {procs.name!r} were spawned before sync(): spawn them again")
        if procs.dead:
            raise invalid(f"ranks {sorted(procs.dead)} of {procs.name!r} are dead: spawn the processes again")
        await self.need(version, sorted(set(procs.host_names)))
        reloader = self._reloaders.get(number)
        if reloader is None:
            inner = self._engine.binding.spawn_own(
                procs.mesh, "meshgate_code", ProcessCode, "sync", library(OF_PROCESSES)
            )
            reloader = Actors(inner, procs.name, "ProcessCode", (), procs.region, procs)
            self._reloaders[number] = reloader
        return reloader

    async def _reload(self, header: Reload, buffers: Sequence[Fragments]) -> None:
        self._engine.start(self._engine.guarded(header, self._reload_now(header)))

    async def _reload_now(self, header: Reload) -> None:
        from meshgate_gateway.engine.engine import HostsOf  # noqa: PLC0415 - the engine imports this module

        number = header.target.object
        procs = await self._engine.objects.when(number)
        if not isinstance(procs, Procs):
            raise invalid(f"object {number} is not a proc mesh")
        reloader = await self._reloader(number, procs, header.version)
        pending = Pending(header.call, "call", procs.name, "reload", ranks_of(procs.region), HostsOf(reloader))
        arguments = self._engine.binding.own_arguments(header.version, list(header.paths))
        self._engine.start_call(pending, reloader, reloader.inner, arguments, stream_of(number))
        procs.version = header.version

    async def close(self) -> None:
        """Ends the relays with their processes, and the gateway's own."""
        await asyncio.gather(
            *(self._engine.binding.stop_procs(procs, "the session ended") for procs in self._spawned),
            return_exceptions=True,
        )
        if self._distributor is not None:
            await self._distributor.close()


def _stale(message: str) -> RequestFailed:
    return RequestFailed(Failure(kind="stale_code", message=message))


def _ip_of(address: str) -> str:
    """The host part of ``tcp://10.0.0.3:26600`` or ``tcp://10.0.0.3:26600@tcp://0.0.0.0:26600``."""
    dialled = address.partition("tcp://")[2].partition("@")[0]
    return dialled.rpartition(":")[0].strip("[]")
