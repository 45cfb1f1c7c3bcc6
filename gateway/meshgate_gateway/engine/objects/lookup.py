"""From references in messages to records and to Monarch's own objects."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

from meshgate_gateway.engine.failures import invalid
from meshgate_gateway.engine.monarch.interface import Fragments as Pieces
from meshgate_gateway.engine.objects.records import ActorMesh, ActorSlice, Channel, HostMesh, ProcMesh, remember
from meshgate_gateway.engine.objects.regions import ranks_within
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_wire import Fragments
from meshgate_wire.messages import Argument, Host, MeshRef, Region


class Resolver(Protocol):
    """What the lookup needs of Monarch."""

    def attach(self, name: str, hosts: Sequence[Host]) -> Any: ...

    def slice_mesh(self, mesh: Any, region: Region) -> Any: ...

    def slice_actors(self, actors: Any, region: Region) -> Any: ...

    def with_python(self, hosts: Any, python: str) -> Any: ...

    async def wait_initialized(self, mesh: Any) -> None: ...

    async def wait_actors_initialized(self, actors: Any) -> str: ...

    def payload(self, data: Pieces, buffers: Sequence[Pieces] = (), objects: Sequence[Any] = ()) -> Any: ...

    def payload_at(self, payload: Any, position: int, region: Region) -> Any: ...

    def port_argument(self, port: Any) -> Any: ...

    def actors_argument(self, class_data: Pieces, name: str, actors: Any, region: Region, procs: Any) -> Any: ...


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
        mesh = self._slice(found, self.attached(found), ref.region)
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

    def attached(self, hosts: HostMesh) -> Any:
        """Monarch's mesh of these hosts, attached to again if necessary."""
        if hosts.must_attach:
            hosts.mesh = self._monarch.attach(hosts.name, hosts.hosts)
            hosts.must_attach = False
            hosts.slices.clear()
        return hosts.mesh

    async def channel(self, number: int) -> Channel:
        found = await self._objects.wait(number)
        if not isinstance(found, Channel):
            raise invalid(f"object {number} is not a port")
        return found

    def actors(self, found: object, ref: MeshRef) -> tuple[ActorMesh, Any, Sequence[int]]:
        """The actor mesh ``found``, Monarch's reference to the part that ``ref`` names, and that part's base ranks."""
        if not isinstance(found, ActorMesh):
            raise invalid(f"object {ref.object} is not an actor mesh")
        region = found.region if ref.region is None else ref.region
        part = found.slices.get(region)
        if part is None:
            ranks = ranks_within(region, found.region, found.name)
            actors = found.actors if region == found.region else self._monarch.slice_actors(found.actors, region)
            part = remember(found.slices, region, ActorSlice(actors, ranks))
        return found, part.actors, part.ranks

    def one_actor(self, mesh: ActorMesh, ref: MeshRef, rank: int, position: int, payload: Any) -> tuple[Any, Any]:
        """Monarch's reference to one actor of the part that ``ref`` names, and ``payload`` for it.

        ``rank`` is its base rank, ``position`` its rank in the part.
        """
        alone = MeshRef(object=ref.object, region=Region(labels=(), offset=rank, sizes=(), strides=()))
        region = mesh.region if ref.region is None else ref.region
        return self.actors(mesh, alone)[1], self._monarch.payload_at(payload, position, region)

    async def arguments(self, arguments: Sequence[Argument]) -> list[Any]:
        """Monarch's own objects for what a pickled argument refers to."""
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
        if argument.kind == "port":
            return self._monarch.port_argument((await self.channel(ref.object)).port)
        mesh, actors, _ = self.actors(await self._objects.wait(ref.object), ref)
        if not mesh.unique_name:
            await self._monarch.wait_actors_initialized(mesh.actors)
        region = ref.region or mesh.region
        return self._monarch.actors_argument(mesh.class_data, mesh.name, actors, region, mesh.procs_mesh)

    def payload(self, buffers: Sequence[Fragments], objects: Sequence[Any]) -> Any:
        """Monarch's payload of a message's ``buffers``: a pickle and its out-of-band buffers, with ``objects`` in place
        of the pickle's persistent ids."""
        if not buffers:
            raise invalid("the message has no pickled arguments")
        data, *beside = (buffer.fragments for buffer in buffers)
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
