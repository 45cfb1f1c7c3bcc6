"""A relay on every host of the session: given when the hosts are attached, and again where one has ended.

The hosts of a mesh get theirs together, in one mesh of processes that Monarch spawns. A host that came back, or whose
relay died, gets one by itself; so does each where together failed, for one host must not keep the others from theirs. A
host that cannot have one is named with the reason to whoever needs it, and for the next who does it is tried again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshgate_gateway.engine import on_worker
from meshgate_gateway.engine.library import OF_HOSTS, library
from meshgate_gateway.engine.monarch import told
from meshgate_gateway.engine.objects import Hosts
from meshgate_gateway.engine.races import before
from meshgate_sync.distributor import Distributor
from meshgate_sync.errors import HostsBehind
from meshgate_sync.plan import GATEWAY, HostSlot
from meshgate_wire.messages import Host, Region

if TYPE_CHECKING:
    from meshgate_gateway.engine.engine import Engine

__all__ = ["Relays"]

log = logging.getLogger(__name__)

GIVE_TIMEOUT = 90.0  # seconds that processes and their relays may take to be there
LIVED = 10.0  # seconds after which a relay is taken to be well
DEATHS = 3  # times in a row that a relay which never was well is given again unasked
STOP_TIMEOUT = 5.0
LOOPBACK = "127.0.0.1"
FIRST_NUMBER = -(2**31)  # of their meshes of processes; objects of the session never get so low


class _NotThere(Exception):
    """Relays cannot be had, for the reason that the message tells."""


@dataclass(slots=True)
class _Group:
    """Relays that were spawned together; ``names`` by rank. ``broken``: why they cannot all be there."""

    procs: Any
    names: tuple[str, ...]
    broken: asyncio.Future[str]
    relays: Any = None

    def break_off(self, why: str) -> None:
        if not self.broken.done():
            self.broken.set_result(why)


@dataclass(slots=True)
class _Seat:
    """A host: where it is now, and the relay that it has (in ``group``) or is being given."""

    name: str
    hosts: Hosts
    rank: int
    group: int = 0
    since: float = 0.0
    deaths: int = 0
    giving: asyncio.Task[None] | None = None
    lost: bool = False
    trouble: str = ""

    @property
    def host(self) -> Host:
        return self.hosts.hosts[self.rank]


class Relays:
    """``gateway``: where the relays reach the one of this process."""

    def __init__(
        self, engine: Engine, distributor: Distributor, gateway: tuple[str, int], *, secret: bytes, owner: str
    ) -> None:
        self._engine, self._distributor = engine, distributor
        self._secret, self._owner = secret, owner
        self._remote = gateway[0] != LOOPBACK
        self._addresses: dict[str, tuple[str, int]] = {GATEWAY: gateway}
        self._seats: dict[str, _Seat] = {}
        self._groups: dict[int, _Group] = {}
        self._number = FIRST_NUMBER
        self._closing = False

    def give(self, hosts: Hosts) -> None:
        """Gives relays to those hosts that have none. Of hosts that are known already it learns where they are now."""
        self._distributor.expect_hosts(filter(None, hosts.names))
        for rank, name in enumerate(hosts.names if hosts.hosts[0].name else ()):
            seat = self._seats.setdefault(name, _Seat(name, hosts, rank))
            returned = seat.lost and name not in hosts.lost
            seat.hosts, seat.rank, seat.lost = hosts, rank, name in hosts.lost
            if seat.lost:
                self._without(seat, hosts.lost[name])
            elif returned:  # until it has a relay it is waited for, rather than told to be lost still
                self._distributor.restart_host(name)
        self._give([self._seats[name] for name in hosts.names if name in self._seats])

    async def ready(self, names: Iterable[str], root: str) -> None:
        """Waits until these hosts have relays. Raises HostsBehind (version ``root``) for those that cannot have one."""
        seats = [self._seats[name] for name in names if name in self._seats]
        self._give(seats)
        while giving := {seat.giving for seat in seats if seat.giving is not None}:  # one may end meanwhile
            await asyncio.wait(giving)
        if missing := {seat.name: seat.trouble for seat in seats if not seat.group}:
            raise HostsBehind(root, missing)

    def host_lost(self, name: str, why: str) -> None:
        """The host has ended, and its relay with it."""
        seat = self._seats.get(name)
        if seat is not None:
            seat.lost = True
            self._without(seat, why)
            for group in self._groups.values():
                if name in group.names:
                    group.break_off(f"{name}: {why}")

    def host_left(self, name: str) -> None:
        """The host was lost, and another has its place: nobody waits for it any more."""
        self._seats.pop(name, None)
        self._distributor.remove_host(name, None)

    def process_ended(self, number: int, rank: int) -> bool:
        """A process's connection closed; whether it was a relay's."""
        group = self._groups.get(number)
        if group is None:
            return False
        name = group.names[rank]
        group.break_off(f"the process of the relay of {name} ended")
        seat = self._seats.get(name)
        if seat is not None and seat.group == number and not self._closing:
            self._relay_ended(seat)
        return True

    def _relay_ended(self, seat: _Seat) -> None:
        lived = self._engine.loop.time() - seat.since
        seat.deaths = 1 if lived > LIVED else seat.deaths + 1
        if seat.deaths > DEATHS:
            self._without(seat, f"its relay ended {seat.deaths} times, the last time after {lived:.0f} s")
        else:
            seat.group = 0
            self._distributor.restart_host(seat.name)
            self._give([seat])

    async def close(self) -> None:
        """Ends the relays with their processes; those of lost hosts are not waited for."""
        self._closing = True
        stops = []
        for group in self._groups.values():
            group.break_off("the session ended")
            if all(name in self._seats and not self._seats[name].lost for name in group.names):
                stops.append(asyncio.ensure_future(self._engine.binding.stop_procs(group.procs, "the session ended")))
        if stops:
            _, late = await asyncio.wait(stops, timeout=STOP_TIMEOUT)
            for stop in late:
                stop.cancel()
            await asyncio.gather(*stops, return_exceptions=True)

    # --- giving -----------------------------------------------------------------------------------------

    def _give(self, seats: Iterable[_Seat]) -> None:
        """Begins to give relays to those of ``seats`` that have none and can have one: to a whole mesh together."""
        by_mesh: dict[int, list[_Seat]] = {}
        for seat in seats:
            if not (seat.group or seat.giving or seat.lost or self._closing):
                by_mesh.setdefault(id(seat.hosts), []).append(seat)
        for lacking in by_mesh.values():
            whole = len(lacking) == len(lacking[0].hosts.names)
            for together in [lacking] if whole else [[seat] for seat in lacking]:
                task = self._engine.start(self._given(together))
                for seat in together:
                    seat.giving = task

    async def _given(self, seats: list[_Seat]) -> None:
        try:
            await self._start(seats)
        except Exception as error:  # noqa: BLE001 - whatever Monarch raises is the reason
            reason = told(error) or type(error).__name__
            log.warning("hosts %s got no relay: %s", [seat.name for seat in seats], reason)
            if len(seats) == 1 and not seats[0].lost:
                self._without(seats[0], reason)
            elif len(seats) > 1:
                await asyncio.gather(*(self._given([seat]) for seat in seats if not seat.lost))
        finally:
            for seat in seats:
                seat.giving = None

    async def _start(self, seats: list[_Seat]) -> None:
        """Raises whatever goes wrong, and leaves nothing behind then."""
        engine, hosts = self._engine, seats[0].hosts
        mesh = engine.meshes.mesh_of(hosts)
        if len(seats) < len(hosts.names):
            mesh = engine.binding.part(mesh, Region(labels=("hosts",), offset=seats[0].rank, sizes=(1,), strides=(1,)))
        self._number += 1
        number, streams = self._number, engine.streams
        begin = functools.partial(on_worker.begin, streams.address, streams.secret, number, None, None)
        procs = engine.binding.spawn_procs(mesh, {}, "meshgate_code", begin)
        group = _Group(procs, tuple(seat.name for seat in seats), engine.loop.create_future())
        self._groups[number] = group
        try:
            if not await before((group.broken,), self._configured(group, seats), limit=GIVE_TIMEOUT):
                late = f"it was not there within {GIVE_TIMEOUT:.0f} s"
                raise _NotThere(group.broken.result() if group.broken.done() else late)  # noqa: TRY301
        except BaseException:
            streams.drop(number)
            raise
        for seat in seats:
            seat.group, seat.since, seat.trouble = number, engine.loop.time(), ""

    async def _configured(self, group: _Group, seats: Sequence[_Seat]) -> None:
        binding, count = self._engine.binding, len(seats)
        relays = group.relays = binding.spawn_own(group.procs, "relay", _host_code(), "sync", library(OF_HOSTS))
        await binding.initialized(group.procs)
        bind = "0.0.0.0" if self._remote else LOOPBACK
        told_at = [_ip_of(seat.host.address) if self._remote else "" for seat in seats]
        names = [seat.name for seat in seats]
        started = await binding.ask_own(relays, count, "start", names, self._secret, self._owner, bind, told_at)
        moved = [name for name in names if name in self._addresses]
        for name, address in zip(names, started, strict=True):
            self._addresses[name] = (address[0], address[1])
        slots = [HostSlot(seat.name, zone=seat.host.zone, node=seat.host.node) for seat in seats]
        routes = self._distributor.add_hosts(slots)
        plain = {name: (route.control, route.stripes) for name, route in routes.items()}
        await binding.ask_own(relays, count, "configure", plain, self._addresses)
        if moved:
            self._tell_moved({name: self._addresses[name] for name in moved})

    def _tell_moved(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """Has those who turned from these hosts to others come back to them."""
        binding = self._engine.binding
        for seat in self._seats.values():
            group = self._groups.get(seat.group)
            if group is not None and seat.name not in addresses:
                rank = group.names.index(seat.name)
                one = Region(labels=("hosts",), offset=rank, sizes=(1,), strides=(1,))
                relay = group.relays if len(group.names) == 1 else binding.part_of_actors(group.relays, one)
                binding.cast(relay, "moved", False, binding.own_arguments(dict(addresses)), "all", None)

    def _without(self, seat: _Seat, why: str) -> None:
        seat.group = 0
        seat.trouble = why
        self._distributor.remove_host(seat.name, why)


def _host_code() -> type:
    from meshgate_gateway.engine.code_on_worker import HostCode  # noqa: PLC0415 - it imports Monarch

    return HostCode


def _ip_of(address: str) -> str:
    """The host part of ``tcp://10.0.0.3:26600`` or ``tcp://10.0.0.3:26600@tcp://0.0.0.0:26600``."""
    dialled = address.partition("tcp://")[2].partition("@")[0]
    return dialled.rpartition(":")[0].strip("[]")
