"""Makes proxies of the meshes and ports that endpoints return.

It runs in the thread of the future's observer. The gateway, which holds the real mesh, receives an ``Adopt`` message
for each before any request can name it.
"""

from __future__ import annotations

from typing import Any

from meshgate.errors import UnreadableResult
from meshgate.proxies.actor_mesh import ActorMeshProxy
from meshgate.proxies.actor_signatures import actor_class_of
from meshgate.proxies.host_and_proc_mesh import HostMeshProxy, ProcMeshProxy
from meshgate.proxies.mesh import MeshProxy, OwnedObject
from meshgate.proxies.ports import Port
from meshgate.serialization.pickling import dump_class, pickled_by_value
from meshgate.serialization.unpickling import MeshHandle
from meshgate.session.objects import Kind
from meshgate.session.session import ClientSession
from meshgate.shapes.shape import Region, Shape
from meshgate_wire.messages import Adopt, stream_of


class ProxyFactory:
    """Implements ``MakeProxy`` of ``meshgate.serialization.unpickling`` for one session."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    def hosts(self, handle: MeshHandle, region: Region) -> HostMeshProxy:
        shape = region.as_shape()
        header = Adopt(object=handle.object, kind="hosts", region=shape.to_wire())
        return HostMeshProxy(self._adopt(handle, "hosts", "", shape, header), shape)

    def procs(self, handle: MeshHandle, hosts: Any, region: Region, root: Region) -> ProcMeshProxy:
        shape = region.as_shape()
        parent = hosts if isinstance(hosts, HostMeshProxy) else None
        header = Adopt(
            object=handle.object,
            kind="procs",
            region=shape.to_wire(),
            root=root.to_wire(),
            parent=parent._ref if parent is not None else None,
        )
        return ProcMeshProxy(self._adopt(handle, "procs", "", shape, header, parent), shape, parent)

    def actors(self, handle: MeshHandle, Class: type, name: str, shape: Shape, procs: Any | None) -> ActorMeshProxy:
        try:
            actor = actor_class_of(Class)
        except ValueError as error:
            raise UnreadableResult(f"the actor mesh {name!r} cannot be used here: {error}") from error
        parent = procs if isinstance(procs, ProcMeshProxy) else None
        header = Adopt(
            object=handle.object,
            kind="actors",
            name=name,
            region=shape.to_wire(),
            parent=parent._ref if parent is not None else None,
        )
        class_data = dump_class(Class, by_value=pickled_by_value(Class))
        owned = self._adopt(handle, "actors", name, shape, header, parent, class_data)
        return ActorMeshProxy(owned, shape, actor, parent)

    def port(self, address: str, rank: int | None, once: bool) -> Port[Any]:
        remote = self._session.objects.create("port", "", "a port that an endpoint returned")
        header = Adopt(object=remote.number, kind="port", address=address)
        self._session.post(header, stream=stream_of(remote.number))
        return Port(self._session, remote, release=True)

    def _adopt(
        self,
        handle: MeshHandle,
        kind: Kind,
        name: str,
        shape: Shape,
        header: Adopt,
        parent: MeshProxy | None = None,
        *buffers: bytes,
    ) -> OwnedObject:
        parents = (parent._object,) if parent is not None else ()
        if handle.reference:
            remote = self._session.objects.create(kind, name, f"{name or kind}, which an actor sent", parents)
            header = header.model_copy(update={"object": remote.number, "has_reference": True})
            buffers = (*buffers, handle.reference)
        else:
            remote = self._session.objects.adopt(handle.object, kind, name, parents)
        self._session.post(header, buffers, stream=stream_of(remote.number))
        return OwnedObject(self._session, remote, shape, release=True)
