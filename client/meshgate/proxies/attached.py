"""A session that this process has taken over from another: its meshes, its calls and its channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshgate.errors import InvalidRequestError
from meshgate.proxies.actor_mesh import ActorMeshProxy, actor_class_from
from meshgate.proxies.host_and_proc_mesh import HostMeshProxy, ProcMeshProxy, shape_of_procs
from meshgate.proxies.kept import KeptMesh, find_values
from meshgate.proxies.mesh import MeshProxy, OwnedObject
from meshgate.proxies.ports import Port, PortReceiver
from meshgate.session.detached import Creation
from meshgate.session.futures import FutureProxy
from meshgate.session.pending_calls import PendingCall, PendingStream, PendingValue, PendingValueMesh
from meshgate.shapes.shape import Extent, Region, Shape
from meshgate_wire.messages import AttachHosts, KeptCall, MeshRef, NameKept, OpenChannel, SpawnProcs

if TYPE_CHECKING:
    from meshgate.proxies.client import Client


@dataclass(frozen=True, slots=True)
class AttachedCall:
    """A call that an earlier process made. ``endpoint`` is ``mesh.endpoint``, ``age`` its age in seconds at the attach.

    ``state``: it is ``"in flight"``; ``"finished"``, and no process has read the result; ``"read"``, and the result is
    still there; or ``"lost"``: there was no space to keep the result, and the future raises an error with the reason.
    ``futures`` has one future for each rank of a ``stream`` call, and one for any other call.
    """

    number: int
    mesh: str
    endpoint: str
    tag: str
    age: float
    state: Literal["in flight", "finished", "read", "lost"]
    futures: tuple[FutureProxy[Any], ...]

    @property
    def future(self) -> FutureProxy[Any]:
        """The call's future. Raises ValueError for a ``stream`` call of several ranks."""
        if len(self.futures) != 1:
            raise ValueError(f"{self.endpoint} was called with stream() and has {len(self.futures)} futures")
        return self.futures[0]

    def __repr__(self) -> str:
        tag = f", tag {self.tag!r}" if self.tag else ""
        return f"<call {self.endpoint}: {self.state}, {self.age:.0f} s old at the attach{tag}>"


@dataclass(frozen=True, slots=True)
class AttachedSession:
    """A session that ``job.attach()`` has taken over.

    ``hosts``, ``procs``, ``actors``, ``channels`` and ``kept`` hold what the session has, by name; ``session[name]``
    finds an actor mesh, else a proc mesh, else a host mesh. If several have a name, it names the newest, and the others
    are ``name#2``, with the number of the object. What was stopped or has failed is left out. ``calls`` are the calls
    that are in flight, or whose results are kept, in the order in which they were made. ``never_received`` is how many
    calls an earlier process had posted that the gateway never received, as far as that can be known, and
    ``lines_dropped`` how many lines of output at the start are no longer kept.
    """

    id: str
    name: str
    takeovers: int
    hosts: Mapping[str, HostMeshProxy]
    procs: Mapping[str, ProcMeshProxy]
    actors: Mapping[str, ActorMeshProxy]
    channels: Mapping[str, tuple[Port[Any], PortReceiver[Any]]]
    kept: Mapping[str, KeptMesh[Any]]
    calls: tuple[AttachedCall, ...]
    never_received: int
    lines_dropped: int
    code_version: str | None
    previous_holder: str
    client: Client

    def __getitem__(self, name: str) -> Any:
        for meshes in (self.actors, self.procs, self.hosts):
            if name in meshes:
                return meshes[name]
        known = ", ".join(sorted({*self.actors, *self.procs, *self.hosts})) or "none"
        raise KeyError(f"session {self.name!r} has no mesh {name!r}; its meshes are: {known}")

    def tagged(self, tag: str) -> list[AttachedCall]:
        """The calls that were made in a ``with meshgate.tag(tag)`` block."""
        return [call for call in self.calls if call.tag == tag]

    def __repr__(self) -> str:
        states = [call.state for call in self.calls]
        calls = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "none"
        return f"<session {self.name!r}: actors {sorted(self.actors)}, calls: {calls}>"


def take_over(client: Client, *, replay: bool, timeout: float) -> AttachedSession:
    """What ``client``, which has connected to an existing session, has found there. Starts its output and channels."""
    takeover = client.takeover
    assert takeover is not None
    attached = takeover.complete.get(timeout)
    client.calls.continue_at(attached.next_call)
    client.detached = attached.name
    client.code_version, client.code_paths = attached.code_version, attached.code_paths
    builder = _Builder(client)
    for header in takeover.created:
        builder.add(header)
    calls = tuple(call for kept in takeover.calls if (call := builder.call(kept)) is not None)
    client.resume_output(replay=replay)
    return AttachedSession(
        id=client.session_id,
        name=attached.name,
        takeovers=attached.takeovers,
        hosts=builder.named(HostMeshProxy),
        procs=builder.named(ProcMeshProxy),
        actors=builder.named(ActorMeshProxy),
        channels=builder.channels,
        kept=builder.kept,
        calls=calls,
        never_received=attached.never_received,
        lines_dropped=attached.lines_dropped,
        code_version=attached.code_version,
        previous_holder=attached.previous_holder,
        client=client,
    )


class _Builder:
    """Builds proxies from the messages that created the objects, as the process that sent them did."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._meshes: dict[int, Any] = {}
        self.channels: dict[str, tuple[Port[Any], PortReceiver[Any]]] = {}
        self.kept: dict[str, KeptMesh[Any]] = {}

    def add(self, header: Creation) -> None:
        if isinstance(header, NameKept):
            self._add_kept(header)
            return
        number = header.object
        if isinstance(header, OpenChannel):
            self._add_channel(header)
        elif isinstance(header, AttachHosts):
            remote = self._client.objects.get(number)
            shape = Extent(("hosts",), (remote.expected_hosts if remote is not None else 0,)).region.as_shape()
            self._meshes[number] = HostMeshProxy(self._owned(number, shape), shape)
        elif isinstance(header, SpawnProcs):
            hosts = self._part(header.hosts)
            if hosts is not None:
                shape = shape_of_procs(hosts._shape, header.per_host)
                self._meshes[number] = ProcMeshProxy(self._owned(number, shape), shape, hosts)
        else:
            procs = self._part(header.procs)
            if procs is not None:
                owned = self._owned(number, procs._shape)
                self._meshes[number] = ActorMeshProxy(owned, procs._shape, actor_class_from(header), procs)

    def _add_kept(self, header: NameKept) -> None:
        remote = self._client.objects.get(header.kept)
        if remote is None or self._client.objects.failure_of(header.kept) is not None:
            return
        shape = Region.from_wire(header.region).as_shape()
        name = header.name if header.name not in self.kept else f"{header.name}#{header.kept}"
        self.kept[name] = find_values(self._client, remote, shape)

    def _add_channel(self, header: OpenChannel) -> None:
        remote = self._client.objects.get(header.object)
        if remote is None:
            return
        inbox = self._client.open_inbox(header.object, header.name)
        port: Port[Any] = Port(self._client, remote, release=False)
        self.channels[header.name or f"#{header.object}"] = (port, PortReceiver(self._client, inbox))

    def _owned(self, number: int, shape: Shape) -> OwnedObject:
        remote = self._client.objects.get(number)
        assert remote is not None, f"object {number} was not announced"
        return OwnedObject(self._client, remote, shape)

    def _part(self, ref: MeshRef) -> Any:
        """The mesh, or the slice of it; None if an endpoint returned it, so that its creation is unknown."""
        mesh = self._meshes.get(ref.object)
        if mesh is None or ref.region is None:
            return mesh
        return mesh._with_shape(Region.from_wire(ref.region).as_shape())

    def named(self, kind: type[Any]) -> dict[str, Any]:
        """The usable meshes of one kind by name. The newest has the plain name."""
        found: dict[str, Any] = {}
        for number, mesh in sorted(self._meshes.items(), reverse=True):
            if type(mesh) is kind and self._client.objects.failure_of(number) is None:
                found[mesh._name if mesh._name not in found else f"{mesh._name}#{number}"] = mesh
        return found

    def call(self, kept: KeptCall) -> AttachedCall | None:
        mesh = self._part(kept.target)
        if mesh is None:  # an endpoint returned the mesh
            return None
        label = f"{mesh._name}.{kept.endpoint}"
        call = _PENDING[kept.adverb](mesh, label)
        if kept.state == "lost":
            for future in call.futures():
                future.fail(InvalidRequestError(f"the result of {label} is lost: {kept.reason}"))
        else:
            self._client.restore_call(kept.call, call)
        futures = tuple(call.futures())
        return AttachedCall(kept.call, mesh._name, label, kept.tag, kept.age, kept.state, futures)

    def __iter__(self) -> Iterator[MeshProxy]:
        return iter(self._meshes.values())


_PENDING: dict[str, Callable[[Any, str], PendingCall]] = {
    "call": lambda mesh, label: PendingValueMesh(mesh._object, label, mesh._shape),
    "call_one": lambda mesh, label: PendingValue(mesh._object, label),
    "choose": lambda mesh, label: PendingValue(mesh._object, label),
    "stream": lambda mesh, label: PendingStream(mesh._object, label, len(mesh._shape)),
}
