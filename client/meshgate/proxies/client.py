"""The client: a session whose host meshes a program can attach to.

A program may have several. What Monarch's functions do without naming one, such as opening a channel or finding a
controller, concerns the current client.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, ParamSpec, cast

from typing_extensions import TypeVar

from meshgate.actors import api, standins
from meshgate.actors.actor_class import endpoints_of
from meshgate.actors.local_monarch import equal_from_both_sides, refuse_local_monarch
from meshgate.actors.monarch_settings import monarch_settings
from meshgate.errors import GatewayError, UnreadableResult
from meshgate.monarch_classes import monarch_api
from meshgate.proxies.actor_mesh import ActorMeshProxy, actor_class_of
from meshgate.proxies.host_and_proc_mesh import HostMeshProxy, ProcMeshProxy
from meshgate.proxies.kept import KeptMesh, referred_values
from meshgate.proxies.mesh import MeshProxy, OwnedObject, require_name
from meshgate.proxies.ports import Port, PortReceiver, RankedPortReceiver
from meshgate.serialization.pickling import dump_class, pickled_by_value
from meshgate.serialization.unpickling import MeshHandle
from meshgate.session.dialing import Dialer
from meshgate.session.futures import FutureProxy
from meshgate.session.objects import Kind
from meshgate.session.session import ClientSession
from meshgate.session.settings import ClientSettings
from meshgate.shapes.shape import Extent, Region, Shape
from meshgate_wire.messages import Adopt, AttachHosts, GetControllers, OpenChannel, stream_of

R = TypeVar("R", default=Any)
T = TypeVar("T")
P = ParamSpec("P")


class ProxyFactory:
    """Makes proxies of the meshes and ports that endpoints return; implements ``MakeProxy`` for one session.

    It runs in the thread of the future's observer. The gateway, which holds the real mesh, receives an ``Adopt``
    message for each before any request can name it.
    """

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
        self._session.post(header, stream=stream_of(remote.number), waits=False)
        return Port(self._session, remote, release=True)

    def kept(self, number: int, rank: int, label: str) -> KeptMesh[Any]:
        return referred_values(self._session, number, rank, label)

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
        self._session.post(header, buffers, stream=stream_of(remote.number), waits=False)
        return OwnedObject(self._session, remote, shape, release=True)


class Client(ClientSession):
    """A session with the gateway that ``dialer`` reaches.

    It connects in the background; ``wait_connected`` waits for that. Closing the client, leaving it as a context
    manager, or exiting the program ends the session and stops its processes; exiting does not end a detached session.
    With ``session_id`` it takes over that session, as ``job.attach()`` does.
    """

    def __init__(
        self,
        dialer: Dialer,
        *,
        settings: ClientSettings | None = None,
        stream_output: bool | None = None,
        session_id: str | None = None,
        mesh_sizes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(
            dialer,
            settings or ClientSettings.load(output=stream_output),
            ProxyFactory(self),
            session_id=session_id,
            mesh_sizes=mesh_sizes,
        )
        _open_clients[next(_numbers)] = self
        refuse_local_monarch(any_open)
        equal_from_both_sides()
        monarch_settings.follow(configure_open_clients, any_open)

    @classmethod
    def connect(
        cls,
        dialer: Dialer,
        *,
        settings: ClientSettings | None = None,
        stream_output: bool | None = None,
        session_id: str | None = None,
        mesh_sizes: Mapping[str, int] | None = None,
    ) -> Client:
        """A connected client, whose engine has the settings of ``meshgate.config``.

        Raises ``GatewayError``, and leaves nothing behind, if it cannot connect; ``InvalidRequestError`` if the program
        has changed settings of Monarch that a session cannot apply.
        """
        client = cls(
            dialer,
            settings=settings,
            stream_output=stream_output,
            session_id=session_id,
            mesh_sizes=mesh_sizes,
        )
        try:
            client.wait_connected()
            if session_id is None and (wanted := monarch_settings.wanted()):
                client.configure_monarch(wanted).get()
        except BaseException:
            client.abandon()
            raise
        return client

    def connect_beside(self) -> Client:
        """Another session with the same gateway. Raises as ``connect`` does."""
        return Client.connect(self._connection.dialer)

    @property
    def connected(self) -> bool:
        """Whether there is a connection now. Without one nothing is lost, but results take until it is back."""
        return self._connection.connected

    def attach_hosts(self, mesh: str, count: int) -> HostMeshProxy:
        """The job's mesh ``mesh`` of ``count`` hosts."""
        remote = self.objects.create("hosts", mesh, f"attaching the hosts of {mesh!r}")
        remote.expected_hosts = count
        self.post(AttachHosts(object=remote.number, mesh=mesh), stream=stream_of(remote.number))
        shape = Extent(("hosts",), (count,)).region.as_shape()
        return HostMeshProxy(OwnedObject(self, remote, shape), shape)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_numbers = itertools.count()
_open_clients: weakref.WeakValueDictionary[int, Client] = weakref.WeakValueDictionary()  # in the order of opening
_current: contextvars.ContextVar[Client | None] = contextvars.ContextVar("meshgate_client", default=None)


def current_client() -> Client:
    """The client set with ``use_client``, or else the most recently opened client that is not closed."""
    client = _current.get()
    if client is not None:
        return client
    for client in _unclosed_clients():
        return client
    raise GatewayError("there is no session: apply a job and take its state() first, or pass client=...")


def _unclosed_clients() -> Iterator[Client]:
    """The newest first."""
    for reference in reversed(_open_clients.valuerefs()):
        client = reference()
        if client is not None and not client.closed:
            yield client


def configure_open_clients() -> None:
    """Applies the present settings of ``meshgate.config`` to every open session. Raises what the first one raises."""
    wanted = monarch_settings.wanted()
    for future in [client.configure_monarch(wanted) for client in _unclosed_clients()]:
        future.get()


def any_open() -> bool:
    """Whether this process has a session."""
    return any(True for _ in _unclosed_clients())


@contextlib.contextmanager
def use_client(client: Client) -> Iterator[Client]:
    """Makes ``client`` the current one inside a ``with`` block."""
    token = _current.set(client)
    try:
        yield client
    finally:
        _current.reset(token)


def shutdown_context(host_timeout: float | None = None) -> FutureProxy[None]:
    """Ends this process's sessions, and with them the processes that they spawned. Jobs continue.

    ``host_timeout`` has no effect: the gateway ends the processes in the background.
    """
    close_all_clients()
    return FutureProxy.resolved(None)


@atexit.register
def close_all_clients() -> None:
    """Ends the session of every open client, the newest first. An interrupted or failed one does not spare the rest."""
    with contextlib.ExitStack() as stack:
        for reference in _open_clients.valuerefs():
            if (client := reference()) is not None:
                stack.callback(client.leave if client.detached else client.close)


class Channel(Generic[R]):
    """Opens channels from actors to the laptop, on the current job's session or on ``client``."""

    @staticmethod
    def open(once: bool = False, *, client: Client | None = None, name: str = "") -> tuple[Port[R], PortReceiver[R]]:
        """A new port and its receiver. With ``once`` it takes a single message. Inside an actor they are Monarch's.

        A channel without a name is closed when the program drops the receiver. One with a ``name`` stays open until the
        session ends, and another process finds it with ``job.attach()``. Raises ValueError if the name is taken.
        """
        if client is None and api.inside_actor():
            return cast("tuple[Port[R], PortReceiver[R]]", _monarchs_channel().open(once))
        client = client or current_client()
        if name:
            require_name(name, "the name of a channel")
        remote = client.objects.create("port", name, "Channel.open()")
        inbox = client.open_inbox(remote.number, name, OpenChannel(object=remote.number, once=once, name=name))
        port: Port[Any] = Port(client, remote, release=False)
        return port, PortReceiver(client, inbox)

    @staticmethod
    def open_ranked(
        once: bool = False, *, client: Client | None = None, name: str = ""
    ) -> tuple[Port[R], RankedPortReceiver[R]]:
        """As ``open``, with a receiver of ``(rank, value)`` pairs."""
        if client is None and api.inside_actor():
            return cast("tuple[Port[R], RankedPortReceiver[R]]", _monarchs_channel().open_ranked(once))
        port, receiver = Channel[R].open(once, client=client, name=name)
        return port, receiver.ranked()


def _monarchs_channel() -> Any:
    return monarch_api()["Channel"]


class _Keeper(standins.Actor):
    """The endpoint of Monarch's actor that keeps controllers, of which a session has one for each name."""

    @standins.endpoint
    def get_or_spawn(self, keeper: Any, name: str, Class: type, *args: Any, **kwargs: Any) -> Any: ...


def get_or_spawn_controller(name: str, Class: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> FutureProxy[T]:
    """The session's actor called ``name``; if there is none, spawns ``Class(*args, **kwargs)`` on the first host.

    The program and all actors of its session get the same one. Raises ``ValueError`` if the class cannot be spawned.
    """
    cls = cast("type", Class)
    if api.inside_actor():
        inside: FutureProxy[T] = api.get_or_spawn_controller(name, cls, *args, **kwargs)
        return inside
    actor_class_of(cls)
    keeper: Any = _keeper_of(current_client())
    controller: FutureProxy[T] = keeper.get_or_spawn.call_one(keeper, name, cls, *args, **kwargs)
    return controller


def _keeper_of(client: Client) -> ActorMeshProxy:
    known: ActorMeshProxy | None = client.attached.get(_Keeper)
    if known is None or client.objects.failure_of(known._object) is not None:
        remote = client.objects.create("actors", "controllers", "get_or_spawn_controller()")
        header = GetControllers(
            object=remote.number,
            hosts=client.objects.newest_hosts(),
            version=client.code_version,
            paths=client.code_paths,
        )
        client.post(header, stream=stream_of(remote.number))
        shape = Extent((), ()).region.as_shape()
        known = ActorMeshProxy(OwnedObject(client, remote, shape), shape, endpoints_of(_Keeper), None)
        client.attached[_Keeper] = known
    return known
