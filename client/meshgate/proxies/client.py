"""The client: a session whose host meshes a program can attach to, and the choice of the current client."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType

from meshgate.actors.local_monarch import equal_from_both_sides, refuse_local_monarch
from meshgate.actors.monarch_settings import monarch_settings
from meshgate.errors import GatewayError
from meshgate.proxies.host_and_proc_mesh import HostMeshProxy
from meshgate.proxies.mesh import OwnedObject
from meshgate.proxies.proxy_factory import ProxyFactory
from meshgate.session.dialing import Dialer
from meshgate.session.futures import FutureProxy
from meshgate.session.session import ClientSession
from meshgate.session.settings import ClientSettings
from meshgate.shapes.shape import Extent
from meshgate_wire.messages import AttachHosts, stream_of


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
        _open_clients.append(weakref.ref(self))
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


_open_clients: list[weakref.ref[Client]] = []
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
    for reference in reversed(_open_clients):
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
    """Ends the session of every open client."""
    for reference in reversed(_open_clients):
        client = reference()
        if client is not None and client.detached:
            client.leave()
        elif client is not None:
            client.close()
