"""Values that stay in the cluster: ``KeptMesh``, which ``endpoint.keep()`` and ``put()`` return.

A kept mesh names values in the processes of a mesh, one for each rank. As an argument, it travels as a reference: the
gateway has the called processes get the values from those that keep them, before the call is sent to them. With
``ref()``, actors get references, which they can pass on, and return: here they become a kept mesh again.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from meshgate.errors import InvalidRequestError, UnpicklableArgument, UnreadableResult
from meshgate.proxies.mesh import MeshProxy, OwnedObject, require_name
from meshgate.serialization.pickling import dumps_call
from meshgate.session.futures import FutureProxy
from meshgate.session.objects import RemoteObject
from meshgate.session.pending_calls import PendingValueMesh
from meshgate.session.session import ClientSession, RemoteReference
from meshgate.shapes.mesh_trait import ShapedMesh
from meshgate.shapes.ndslice import Slice
from meshgate.shapes.shape import Extent, Region, Shape
from meshgate.shapes.value_mesh import ValueMesh
from meshgate_wire.messages import Argument, MeshRef, NameKept, PutValue, ReadKept, stream_of

if TYPE_CHECKING:
    # Type checkers accept a kept mesh for any parameter: what an endpoint gets is the value, not the mesh.
    _AnyArgument = Any
else:
    _AnyArgument = object

R = TypeVar("R")
_ONLY_AS_ARGUMENT = (
    "a kept mesh can be an argument of endpoints, of actors' constructors and of put(), and in a message to a port. "
    "Fetch the values with .get(), or let an endpoint take them"
)
_held: weakref.WeakValueDictionary[tuple[str, int], OwnedValues] = weakref.WeakValueDictionary()  # with the session


@dataclass(frozen=True, slots=True)
class KeptInfo:
    """What a rank keeps: the ``type`` of the value, its approximate size in ``bytes``, and of an array or a tensor its
    ``dtype`` and ``shape``."""

    type: str
    bytes: int
    dtype: str = ""
    shape: tuple[int, ...] | None = None


class OwnedValues(OwnedObject):
    """The kept values of one call, shared by all slices of their mesh. They are released when the last one is gone."""

    __slots__ = ("described", "request")

    def __init__(self, session: ClientSession, remote: RemoteObject, shape: Shape, call: PendingValueMesh) -> None:
        super().__init__(session, remote, shape, release=True)
        self.described: FutureProxy[ValueMesh[Any]] = call.future
        self.request: PendingValueMesh | None = call

    def use(self) -> None:
        """The program learns of a failure of the call from what uses the values."""
        if self.request is not None:
            self.request.unread = None
            self.request = None
            if self.described.done():
                self.described.exception()


class KeptMesh(ShapedMesh, RemoteReference, Generic[R], _AnyArgument):  # type: ignore[misc]
    """Values that stay in the processes of a mesh: results of ``endpoint.keep()``, or what ``put()`` has sent.

    As an argument of an endpoint, of an actor's constructor or of ``put()``, a mesh with the extent of the called mesh
    passes to each rank the value of its own rank; a mesh of one rank passes its value to all; ``all()`` passes all
    values to each. A message to a port takes the value of one rank, or ``all()``. The values travel inside the cluster.
    A process that keeps a value itself gets the object, not a copy.

    The values are dropped when the program holds no slice of the mesh any more, no actor has a reference to one and no
    call is getting them, and with ``release()``. Those that are ``named`` stay as long as the session.
    """

    _not_for_workers = _ONLY_AS_ARGUMENT

    def __init__(self, values: OwnedValues, shape: Shape) -> None:
        self._values = values
        self._shape = shape

    def get(self, timeout: float | None = None) -> ValueMesh[R]:
        """Fetches the values to this machine. Each ``get`` fetches them again.

        Raises the error of the call if it failed, ``ValueLostError`` if a process with a value has ended, and
        ``TimeoutError`` after ``timeout`` seconds.
        """
        return self._fetch().get(timeout)

    def __await__(self) -> Generator[object, None, ValueMesh[R]]:
        return self._fetch().__await__()

    def _fetch(self) -> FutureProxy[ValueMesh[R]]:
        remote, session = self._remote, self._session
        self._require_kept()
        self._values.use()
        call = PendingValueMesh(remote.number, remote.name, self._shape)
        ref = self._ref
        stream = stream_of(remote.number)
        session.request(call, lambda number: ReadKept(call=number, target=ref), stream=stream)
        return call.future

    def info(self, timeout: float | None = None) -> ValueMesh[KeptInfo]:
        """What each rank keeps. Waits until the values are there; they are not fetched. Raises as ``get``."""
        self._require_kept()
        described = self._values.described.get(timeout)
        owned = self._values.shape.ndslice
        found = [KeptInfo(**_renamed(described.get(owned.index(rank)))) for rank in self._shape.ranks()]
        return ValueMesh(self._shape, found)

    def all(self) -> PassedValues:
        """For an argument: every rank gets a ``ValueMesh`` of all values."""
        return PassedValues(self, whole=True)

    def ref(self) -> PassedValues:
        """For an argument: a rank gets a small reference in place of the value. The actor fetches the value with
        ``reference.get()`` or ``await reference``, passes the reference to other actors of the session, or returns it
        to the program, where it is a kept mesh of one rank. ``all().ref()`` passes references to all values.

        The values stay as long as an actor has a reference, although the program no longer holds the mesh. Hold it if
        an actor may return one.
        """
        return PassedValues(self, reference=True)

    def release(self) -> None:
        """Drops the values now, for all slices of the mesh and for actors with references. Calls that were made before
        still get them."""
        if not self._remote.released:
            self._remote.released = True
            self._session.named_values.pop(self._remote.number, None)
            self._session.release(self._remote.number, at_once=True)

    def named(self, name: str) -> KeptMesh[R]:
        """Keeps the values as long as the session, or until ``release()``, and returns this mesh.

        If the session is detached, the process that takes it over finds them: ``job.attach().kept[name]``.
        """
        require_name(name, "the name of kept values")
        if not name:
            raise ValueError("the name of kept values must not be empty")
        self._require_kept()
        remote, procs = self._remote, self._remote.parents[0]
        header = NameKept(kept=remote.number, name=name, label=remote.name, procs=procs, region=self._shape.to_wire())
        self._session.post(header, stream=stream_of(remote.number))
        self._values.finalizer.detach()
        self._session.named_values[remote.number] = self._values
        return self

    @property
    def _remote(self) -> RemoteObject:
        return self._values.remote

    @property
    def _session(self) -> ClientSession:
        return self._values.session

    @property
    def _ref(self) -> MeshRef:
        return MeshRef(object=self._remote.number, region=self._shape.to_wire())

    def _require_kept(self) -> None:
        if self._remote.released:
            raise InvalidRequestError(f"the values of {self._remote.name} were released with release()")

    def _as_argument(self, session: ClientSession) -> Argument:
        if session is not self._session:
            raise InvalidRequestError(
                f"{self!r} belongs to another session, whose processes cannot be reached from here. Nothing was sent. "
                "Fetch its values with get(), and pass those"
            )
        self._require_kept()
        return Argument(kind="kept", ref=self._ref)

    def _new_with_shape(self, shape: Shape) -> KeptMesh[R]:
        return self if shape == self._shape else KeptMesh(self._values, shape)

    def __repr__(self) -> str:
        return f"<KeptMesh {self._remote.name}: {self.extent}, {self._state()}>"

    def _state(self) -> str:
        if self._remote.released:
            return "released"
        described = self._values.described
        if not described.done():
            return "not there yet"
        try:
            values = self.info().values()
        except Exception as error:  # noqa: BLE001 - whatever the endpoint has raised
            return f"failed: {type(error).__name__}"
        return f"{sum(each.bytes for each in values) / 1e6:,.1f} MB"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnpicklableArgument(f"{self!r} cannot be pickled: {_ONLY_AS_ARGUMENT}")


class PassedValues(RemoteReference, _AnyArgument):  # type: ignore[misc]
    """The values of a kept mesh as an argument: all of them for each rank (``whole``), or as references, or both."""

    _not_for_workers = _ONLY_AS_ARGUMENT

    def __init__(self, kept: KeptMesh[Any], *, whole: bool = False, reference: bool = False) -> None:
        self._kept, self._how = kept, {"whole": whole, "reference": reference}

    def ref(self) -> PassedValues:
        """As ``KeptMesh.ref``."""
        return PassedValues(self._kept, whole=self._how["whole"], reference=True)

    def _as_argument(self, session: ClientSession) -> Argument:
        return self._kept._as_argument(session).model_copy(update=self._how)

    def __repr__(self) -> str:
        return f"{self._kept!r}{'.all()' * self._how['whole']}{'.ref()' * self._how['reference']}"


def keep_results(mesh: MeshProxy, label: str, call: PendingValueMesh) -> KeptMesh[Any]:
    """The kept mesh that the results of ``call`` on ``mesh`` become, once it is sent with the number of its object."""
    mesh._client.post_released()  # so that there is room for what is about to be kept
    # The values are in the processes: they outlive the actors.
    procs = mesh._owned.remote.parents[:1] if mesh._kind == "actors" else (mesh._object,)
    remote = mesh._client.objects.create("kept", label, label, procs or (mesh._object,))
    remote.streams = (mesh._stream,)
    return _hold(OwnedValues(mesh._client, remote, mesh._shape, call))


def _hold(values: OwnedValues) -> KeptMesh[Any]:
    """The mesh of ``values``, of which actors may return references."""
    _held[values.session.session_id, values.remote.number] = values
    return KeptMesh(values, values.shape)


def find_values(client: ClientSession, remote: RemoteObject, shape: Shape) -> KeptMesh[Any]:
    """The values ``remote``, which an earlier holder of the session has named. Their processes describe them."""
    call = PendingValueMesh(remote.number, remote.name, shape)
    ref, stream = MeshRef(object=remote.number, region=shape.to_wire()), stream_of(remote.number)
    client.request(call, lambda number: ReadKept(call=number, target=ref, describe=True), stream=stream)
    values = OwnedValues(client, remote, shape, call)
    values.finalizer.detach()
    client.named_values[remote.number] = values
    return _hold(values)


def referred_values(client: ClientSession, number: int, rank: int, label: str) -> KeptMesh[Any]:
    """The value that an actor has returned a reference to: that of object ``number`` on base ``rank``.

    Raises ``UnreadableResult`` if the program has let go of it.
    """
    values = _held.get((client.session_id, number))
    if values is None:
        raise UnreadableResult(
            f"the result contains a reference to a value of {label}, of which the program holds no kept mesh any more. "
            "Hold it as long as actors may return references to its values, or keep the values with named()"
        )
    return KeptMesh(values, Region((), Slice(offset=rank, sizes=[], strides=[])).as_shape())


def put_value(mesh: MeshProxy, value: object) -> KeptMesh[Any]:
    """Sends ``value`` to each process of ``mesh``, where it stays."""
    client, label = mesh._client, f"{mesh._name}.put()"
    call = PendingValueMesh(mesh._object, label, mesh._shape)
    kept = keep_results(mesh, label, call)
    number = kept._remote.number
    pickled = dumps_call(
        (number, label),
        {"value": value},
        client.resolve,
        called=f"{mesh._name}.put",
        worker_python=client.worker_python,
    )
    use_in_call(client, pickled.arguments, mesh._shape, label, mesh._stream)
    client.require_usable(mesh._object, label)
    call.unread = client.unread
    ref = mesh._ref
    client.request(
        call,
        lambda made: PutValue(call=made, target=ref, keep=number, arguments=pickled.arguments),
        (pickled.data, *pickled.buffers),
        stream=mesh._stream,
    )
    return kept


def use_in_call(
    session: ClientSession,
    arguments: Sequence[Argument],
    shape: Shape | None,
    label: str,
    stream: int,
    *,
    answered: bool = True,
) -> None:
    """Call it before a message of ``stream`` with these arguments. ``answered``: the program learns from what it sends
    that the values' call has failed.

    Raises ``ValueError`` if kept values among them do not fit the ranks of ``label``, which has ``shape`` or, if it is
    None, is a port; and the reason if they can no longer be used.
    """
    for argument in arguments:
        region = argument.ref.region
        if argument.kind != "kept" or region is None:
            continue
        remote = session.objects.get(argument.ref.object)
        if remote is not None and session.objects.any_failed:
            session.require_usable(remote.number, label)
        extent = Extent(region.labels, region.sizes)
        if not argument.whole and extent.nelements != 1 and (shape is None or extent != shape.extent):
            name = remote.name if remote is not None else "its argument"
            if shape is None:
                raise ValueError(
                    f"{label} sends one message, but the values of {name} have {extent}. Nothing was sent. Pass the "
                    "value of one rank, with slice(); or .all(), to send all values together"
                )
            ranks = shape.extent if shape.extent.labels else "one rank"
            raise ValueError(
                f"{label} runs on {ranks}, but the values of {name} have {extent}. Nothing was sent. Pass a part of "
                "the same extent with slice(); one rank, whose value all get; or .all(), to pass all values to each "
                "rank"
            )
        session.objects.named_on(argument.ref.object, stream)
        if answered and (values := _held.get((session.session_id, argument.ref.object))) is not None:
            values.use()


def _renamed(description: dict[str, Any]) -> dict[str, Any]:
    return {"bytes" if name == "nbytes" else name: value for name, value in description.items()}
