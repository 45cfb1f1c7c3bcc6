"""Reads results: values, errors, and the proxies of meshes and ports that endpoints returned.

Runs in the thread of whoever wants the result. A mesh that comes back is told to the gateway (``Adopt``), which
holds the real one, before anything can be asked of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshgate.channel import Port
from meshgate.errors import MeshgateError, UnreadableResult
from meshgate.failures import Raised, from_failure
from meshgate.pickling import dump_class, travels_by_value
from meshgate.proxies import ActorMeshProxy, HostMeshProxy, MeshProxy, Owned, ProcMeshProxy, class_of
from meshgate.shape import Region, Shape
from meshgate.unpickling import MeshHandle, loads, loads_raised
from meshgate_wire import Fragments
from meshgate_wire.messages import Adopt, Adopted, Failure, stream_of

if TYPE_CHECKING:
    from meshgate.client import Client

__all__ = ["ResultReader"]


class ResultReader:
    """The client's ``Reader``, and the ``MakeProxy`` of unpickling."""

    def __init__(self, client: Client) -> None:
        self._client = client

    # --- Reader

    def value(self, buffer: Fragments, objects: Adopted, endpoint: str) -> Any:
        same_python = self._client.same_python
        try:
            return loads(buffer, objects=objects.objects, make_proxy=self, same_python=same_python)
        except UnreadableResult as error:
            raise UnreadableResult(f"{endpoint}: {error}", module=error.module, endpoint=endpoint) from error

    def raised(self, buffer: Fragments, objects: Adopted) -> Raised:
        """What an endpoint raised."""
        same_python = self._client.same_python
        return loads_raised(buffer, objects=objects.objects, make_proxy=self, same_python=same_python)

    def error(self, failure: Failure, buffers: Sequence[Fragments], endpoint: str) -> MeshgateError:
        raised = [self.raised(buffer, Adopted()) for buffer in buffers]
        return from_failure(failure, raised, endpoint=endpoint)

    # --- MakeProxy

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
            actor = class_of(Class)
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
        class_data = dump_class(Class, by_value=travels_by_value(Class))
        owned = self._adopt(handle, "actors", name, shape, header, parent, class_data)
        return ActorMeshProxy(owned, shape, actor, parent)

    def port(self, address: str, rank: int | None, once: bool) -> Port[Any]:
        client = self._client
        known = client.objects.create("port", "", "a port that an endpoint returned")
        header = Adopt(object=known.number, kind="port", address=address)
        client.post(header, stream=stream_of(known.number))
        return Port(client, known, release=True)

    def _adopt(
        self,
        handle: MeshHandle,
        kind: Any,
        name: str,
        shape: Shape,
        header: Adopt,
        parent: MeshProxy | None = None,
        *buffers: bytes,
    ) -> Owned:
        client = self._client
        parents = (parent._object,) if parent is not None else ()
        known = client.objects.adopt(handle.object, kind, name, parents)
        client.post(header, buffers, stream=stream_of(handle.object))
        return Owned(client, known, shape, release=True)
