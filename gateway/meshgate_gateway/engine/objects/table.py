"""The objects of a session by number: each is present, not created yet, failed or released.

A message may refer to an object whose creation is on another stream and has not arrived yet; ``ObjectTable.wait`` waits
for it. An object that depends on a failed one fails with that step as the cause.
"""

from __future__ import annotations

import asyncio
import operator
import random
from collections.abc import Container, Sequence
from typing import Any, NamedTuple, Protocol

from meshgate_gateway.engine.failures import RequestFailed, invalid
from meshgate_gateway.engine.monarch.interface import Arguments, HostAttacher, Payloads, Readiness, Slicer
from meshgate_gateway.engine.objects.records import (
    ActorMesh,
    ActorSlice,
    Channel,
    HostMesh,
    KeptMesh,
    ProcMesh,
    SessionObject,
    answered,
    remember,
)
from meshgate_gateway.engine.objects.regions import procs_region, rank_region, ranks_within
from meshgate_wire import Fragments
from meshgate_wire.messages import Argument, Failure, MeshRef, Region

_NEVER_ARRIVED = Failure(
    kind="invalid", message="the process that held the session ended before the gateway had received this object"
)
MAX_RELEASED = 65_536  # numbers kept, because late messages of other streams may refer to released objects


class ObjectTable:
    """Clients choose the numbers of what they create. Mesh references that arrive from workers get negative numbers."""

    def __init__(self) -> None:
        self._objects: dict[int, SessionObject | Failure] = {}
        self._released: dict[int, None] = {}  # oldest first
        self._awaited: dict[int, asyncio.Future[SessionObject | Failure | None]] = {}  # None: it was released
        self._references: dict[int, Any] = {}
        self._next_reference = -1

    def add(self, number: int, made: SessionObject | Failure) -> None:
        """Defines ``number``; a failure may replace an object, but no kept mesh, which knows itself why its call has
        failed. Raises RequestFailed if the number is taken."""
        if isinstance(made, Failure):
            if number in self._released or isinstance(self._objects.get(number), KeptMesh):
                return
        elif number in self._objects or number in self._released:
            raise invalid(f"object {number} already exists")
        self._objects[number] = made
        self._wake(number, made)

    def _wake(self, number: int, made: SessionObject | Failure | None) -> None:
        waiting = self._awaited.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(made)

    def require(self, number: int) -> SessionObject | None:
        """The object, or None if it is not created yet. Raises RequestFailed if it failed or was released."""
        found = self._objects.get(number)
        if found is None and number in self._released:
            raise invalid(f"object {number} was released while a message still refers to it")
        if isinstance(found, Failure):
            raise RequestFailed(found.as_cause())
        return found

    def failure(self, number: int) -> Failure | None:
        """Why the object could not be created, if it could not."""
        found = self._objects.get(number)
        return found if isinstance(found, Failure) else None

    def get(self, number: int) -> SessionObject | None:
        """The object, or None if it is not present, for whatever reason."""
        found = self._objects.get(number)
        return None if isinstance(found, Failure) else found

    async def wait(self, number: int) -> SessionObject:
        """As ``require``, but waits until the object is created. If it is released at once, it still is what was waited
        for: the release followed the creation in their stream, and only the request on another stream is late."""
        found = self.require(number)
        if found is not None:
            return found
        waiting = self._awaited.get(number)
        if waiting is None:
            waiting = self._awaited[number] = asyncio.get_running_loop().create_future()
        made = await asyncio.shield(waiting)
        if number not in self._released:
            made = self.require(number)  # a failure may have replaced it
        if isinstance(made, Failure):
            raise RequestFailed(made.as_cause())
        if made is None:
            self.require(number)
            raise AssertionError(f"object {number} was awaited, and is neither present nor released")
        return made

    def reserve(self) -> int:
        """A number for an object that the engine creates itself."""
        number = self._next_reference
        self._next_reference -= 1
        return number

    def add_reference(self, reference: Any) -> int:
        """A number for a mesh reference that arrived from a worker; the client then says what it is (``Adopt``)."""
        number = self._next_reference
        self._next_reference -= 1
        self._references[number] = reference
        return number

    def reference(self, number: int) -> Any:
        try:
            return self._references[number]
        except KeyError:
            raise invalid(f"object {number} did not arrive from a worker, or was released") from None

    def release(self, number: int) -> None:
        """Forgets the object. Requests that still wait for it fail."""
        self._references.pop(number, None)
        self._objects.pop(number, None)
        self._released[number] = None
        if len(self._released) > MAX_RELEASED:
            del self._released[next(iter(self._released))]
        self._wake(number, None)

    def fail_awaited(self, being_created: Container[int]) -> int:
        """Fails every object that requests wait for, that does not exist and is not ``being_created``. Returns the
        highest number that was ever named, or 0."""
        for number in [*self._awaited]:
            if number not in self._objects and number not in being_created:
                self.add(number, _NEVER_ARRIVED)
        return max((0, *self._objects, *self._released))

    def forget_adopted(self) -> None:
        """Forgets what clients said of mesh references, but not the references: another client may adopt them."""
        for number in [number for number in self._objects if number in self._references]:
            del self._objects[number]

    def failures(self) -> list[tuple[int, Failure]]:
        """What could not be created."""
        return [(number, found) for number, found in self._objects.items() if isinstance(found, Failure)]

    def values(self) -> list[SessionObject]:
        return [found for found in self._objects.values() if not isinstance(found, Failure)]

    def items(self) -> list[tuple[int, SessionObject]]:
        return [(number, found) for number, found in self._objects.items() if not isinstance(found, Failure)]


class KeptArgument(NamedTuple):
    """Kept values in the arguments of a call: ``region`` of ``kept``. ``whole``: each rank gets all of them;
    ``reference``: it gets references in their place."""

    kept: KeptMesh
    region: Region
    whole: bool
    reference: bool = False


class Taker(NamedTuple):
    """What kept values are delivered for: the call ``name`` of the actors ``target``, in ``region`` of ``procs``.

    ``chosen``: the position of the only process that needs the values. ``cast``: no answer says that the actors have
    got the message.
    """

    name: str
    procs: ProcMesh
    region: Region
    target: int
    chosen: int | None = None
    call: int = 0
    cast: bool = False


_fragments_of = operator.attrgetter("fragments")


class HostsMissing(RequestFailed):
    """A part of a mesh of hosts cannot be used. The message says which of its hosts are missing, and why."""

    def __init__(self, message: str, mesh: str) -> None:
        super().__init__(Failure(kind="supervision", message=message, mesh=mesh))


class Resolver(HostAttacher, Slicer, Readiness, Payloads, Arguments, Protocol):
    """What the lookup needs of Monarch."""


class Lookup:
    """Finds what references name. Every method raises RequestFailed if the object failed, was released or is of another
    kind, and the coroutines wait for objects that are not created yet."""

    def __init__(self, objects: ObjectTable, monarch: Resolver) -> None:
        self._objects, self._monarch = objects, monarch

    async def hosts(self, ref: MeshRef) -> tuple[HostMesh, Any]:
        """The host mesh, and Monarch's mesh of the part that ``ref`` names."""
        found = await self._objects.wait(ref.object)
        if not isinstance(found, HostMesh):
            raise invalid(f"object {ref.object} is not a host mesh")
        mesh = self.part_of_hosts(found, ref.region)
        return found, mesh if ref.python is None else self._monarch.with_python(mesh, ref.python)

    async def procs(self, ref: MeshRef) -> tuple[ProcMesh, Any]:
        """The proc mesh, and Monarch's mesh of the part that ``ref`` names."""
        found = await self._objects.wait(ref.object)
        if not isinstance(found, ProcMesh):
            raise invalid(f"object {ref.object} is not a proc mesh")
        return found, self._slice(found, found.mesh, ref.region)

    def _slice(self, found: HostMesh | ProcMesh, mesh: Any, region: Region | None) -> Any:
        if region is None or region == found.region:
            return mesh
        ranks_within(region, found.region, found.name)
        part = found.slices.get(region)
        return part if part is not None else remember(found.slices, region, self._monarch.slice_mesh(mesh, region))

    def part_of_hosts(self, hosts: HostMesh, region: Region | None) -> Any:
        """Monarch's mesh of the part ``region`` of ``hosts``. Raises HostsMissing if it was attached to without one."""
        whole = self.attached(hosts)
        if not hosts.apart:
            return self._slice(hosts, whole, region)
        region = region or hosts.region
        ranks = ranks_within(region, hosts.region, hosts.name)
        if missing := hosts.missing_among(hosts.names[rank] for rank in ranks):
            raise HostsMissing(missing, hosts.name)
        if (part := hosts.slices.get(region)) is None:
            part = self._monarch.attach(hosts.name, [hosts.hosts[rank] for rank in ranks])
            part = self._monarch.slice_mesh(part, procs_region(region, {}))
            remember(hosts.slices, region, part)
        return part

    def attached(self, hosts: HostMesh) -> Any:
        """Monarch's mesh of those of these hosts that are not missing, attached to again if necessary. Raises
        HostsMissing if all are."""
        if hosts.must_attach:
            there = [host for host in hosts.hosts if hosts.health(host.name).available]
            if not there:
                raise HostsMissing(hosts.missing_among(hosts.names), hosts.name)
            hosts.mesh = self._monarch.attach(hosts.name, there)
            hosts.must_attach, hosts.apart = False, len(there) < len(hosts.hosts)
            hosts.attaching = asyncio.ensure_future(self._monarch.wait_initialized(hosts.mesh))
            hosts.attaching.add_done_callback(answered)  # what uses the hosts reports why they do not answer
            hosts.slices.clear()
        return hosts.mesh

    def part(self, procs: ProcMesh, region: Region) -> Any:
        """Monarch's mesh of the part ``region`` of ``procs``."""
        return self._slice(procs, procs.mesh, region)

    async def channel(self, number: int) -> Channel:
        found = await self._objects.wait(number)
        if not isinstance(found, Channel):
            raise invalid(f"object {number} is not a port")
        return found

    def actors(self, found: object, ref: MeshRef) -> tuple[ActorMesh, Any, Sequence[int]]:
        """The actor mesh ``found``, Monarch's reference to the part that ``ref`` names, and that part's base ranks."""
        if not isinstance(found, ActorMesh):
            raise invalid(f"object {ref.object} is not an actor mesh")
        region = ref.region
        if region is None and found.whole is not None:
            return found, found.whole.actors, found.whole.ranks
        if region is None:
            region = found.region
        part = found.slices.get(region)
        if part is None:
            ranks = ranks_within(region, found.region, found.name)
            actors = found.actors if region == found.region else self._monarch.slice_actors(found.actors, region)
            part = remember(found.slices, region, ActorSlice(actors, ranks))
        if ref.region is None:
            found.whole = part
        return found, part.actors, part.ranks

    def one_actor(self, mesh: ActorMesh, ref: MeshRef, rank: int, position: int, payload: Any) -> tuple[Any, Any]:
        """Monarch's reference to one actor of the part that ``ref`` names, and ``payload`` for it.

        ``rank`` is its base rank, ``position`` its rank in the part.
        """
        alone = MeshRef(object=ref.object, region=rank_region(rank))
        region = mesh.region if ref.region is None else ref.region
        return self.actors(mesh, alone)[1], self._monarch.payload_at(payload, position, region)

    async def arguments(self, arguments: Sequence[Argument]) -> list[Any]:
        """Monarch's own objects for what a pickled argument refers to, and a ``KeptArgument`` for kept values, which
        ``KeptValues.deliver`` replaces."""
        return [await self._argument(argument) for argument in arguments]

    async def _argument(self, argument: Argument) -> Any:
        ref = argument.ref
        if argument.kind == "hosts":
            hosts = (await self.hosts(ref))[1]
            if ref.python is not None:  # a mesh of its own, which must be up before it can be pickled
                await self._monarch.wait_initialized(hosts)
            return hosts
        if argument.kind == "procs":
            return (await self.procs(ref))[1]
        if argument.kind == "kept":
            kept = await self._objects.wait(ref.object)
            if not isinstance(kept, KeptMesh):
                raise invalid(f"object {ref.object} is not a kept mesh")
            return KeptArgument(kept, ref.region or kept.region, argument.whole, argument.reference)
        if argument.kind == "port":
            return self._monarch.port_argument((await self.channel(ref.object)).port)
        mesh, actors, _ = self.actors(await self._objects.wait(ref.object), ref)
        if mesh.up is not None:
            await asyncio.wait([mesh.up])  # it knows why actors could not be spawned; Monarch may only know that
            if mesh.failed is not None:
                raise RequestFailed(mesh.failed.as_cause())
        if not mesh.unique_name:
            await self._monarch.wait_actors_initialized(mesh.actors)
        region = ref.region or mesh.region
        return self._monarch.actors_argument(mesh.class_data, mesh.name, actors, region, mesh.procs_mesh)

    def payload(self, buffers: Sequence[Fragments], objects: Sequence[Any]) -> Any:
        """Monarch's payload of a message's ``buffers``: a pickle and its out-of-band buffers, with ``objects`` in place
        of the pickle's persistent ids."""
        if not buffers:
            raise invalid("the message has no pickled arguments")
        if objects and any(isinstance(each, KeptArgument) for each in objects):
            raise invalid("this message cannot take kept values")
        data, *beside = map(_fragments_of, buffers)
        return self._monarch.payload(data, beside, objects)

    def label(self, mesh: int, rank: int) -> tuple[str, str]:
        """The name of a process's mesh and of its host, for output. Empty if the mesh is not there, or failed.

        A process with actors of one mesh is labelled with the name of that mesh.
        """
        found = self._objects.get(mesh)
        if not isinstance(found, ProcMesh):
            return "", ""
        names = [each.name for each in self._objects.values() if isinstance(each, ActorMesh) and each.procs is found]
        return names[0] if len(names) == 1 else found.name, found.host_of(rank)


def choose(mesh: ActorMesh, ranks: Sequence[int]) -> int:
    """The position of one of ``ranks``, at random: of a living one, unless all are dead."""
    if not ranks:
        raise invalid(f"mesh {mesh.name!r} has no actors to choose from")
    living = [at for at, rank in enumerate(ranks) if rank not in mesh.dead] if mesh.dead else ()
    return random.choice(living or range(len(ranks)))
