"""The client of one session: names objects, sends requests, and knows what has become of them.

One client serves one job from any number of threads and event loops. Requests are sent in the order in which they
are made and none waits for the one before it: ``spawn_procs``, ``spawn`` and ``call`` travel together, and only
looking at a result waits.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import logging
import platform
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from meshgate.calls import Acknowledgement, Answer, Calls
from meshgate.channel import Inbox, Port
from meshgate.connection import Connection
from meshgate.dialing import Dialer
from meshgate.dispatch import Dispatch, step_failure
from meshgate.errors import GatewayError, MeshgateError
from meshgate.extent import Extent
from meshgate.objects import Objects
from meshgate.pickling import Pickled, dumps, require_same_python
from meshgate.proxies import HostMeshProxy, MeshProxy, Owned
from meshgate.reading import ResultReader
from meshgate.settings import ClientSettings
from meshgate_wire import Fragments, Header, MessageReceived, Sendable, Statistics
from meshgate_wire.messages import Argument, AttachHosts, Configure, EndSession, Sync, stream_of

__all__ = ["Client", "current_client", "use_client"]

log = logging.getLogger("meshgate.client")

CONTROL = 0
_THIS_PYTHON = "{}.{}.".format(*platform.python_version_tuple()[:2])


class Client:
    """A session with the gateway that ``dialer`` reaches.

    Connecting begins at once; :meth:`wait_connected` waits for it. Closing the client, leaving it as a context
    manager, or the end of the program ends the session and reaps its processes.
    """

    def __init__(
        self, dialer: Dialer, *, settings: ClientSettings | None = None, stream_output: bool | None = None
    ) -> None:
        self.settings = settings or ClientSettings.load(output=stream_output)
        self.session_id = secrets.token_hex(16)
        self.objects = Objects()
        self.calls = Calls()
        self.reader = ResultReader(self)
        self.code_version: str | None = None
        """Digest of the code that processes must run; set by the job's sync."""
        self.code_paths: tuple[str, ...] = ()
        """What of it comes first on their ``sys.path``."""
        self._before_close: list[Callable[[], object]] = []
        self._closed = False
        self.ended_in_order = False
        """After ``close``: whether the gateway has confirmed that the session's processes are gone."""
        self._dispatch = Dispatch(self.objects, self.calls, self.reader, self._consume, self.release)
        self._connection = Connection(dialer, self.settings, self._dispatch, self.session_id)
        self._connection.manual(CONTROL)  # output keeps its credit until it is printed
        self._connection.start()
        if not self.settings.output:
            self.post(Configure(stream_output=False), stream=CONTROL)
        _opened.append(weakref.ref(self))

    @classmethod
    def connect(
        cls, dialer: Dialer, *, settings: ClientSettings | None = None, stream_output: bool | None = None
    ) -> Client:
        """A client that is connected. Raises ``GatewayError`` where that cannot be, and then leaves nothing behind."""
        client = cls(dialer, settings=settings, stream_output=stream_output)
        try:
            client.wait_connected()
        except BaseException:
            client.abandon()
            raise
        return client

    def wait_connected(self) -> None:
        """Waits for the first connection, at most ``settings.connect_timeout`` seconds. Raises ``GatewayError``."""
        self._connection.established.get()

    def attach_hosts(self, mesh: str, count: int) -> HostMeshProxy:
        """The job's mesh ``mesh`` of ``count`` hosts."""
        known = self.objects.create("hosts", mesh, f"attaching the hosts of {mesh!r}")
        known.expected_hosts = count
        self.post(AttachHosts(object=known.number, mesh=mesh), stream=stream_of(known.number))
        shape = Extent(("hosts",), (count,)).region.as_shape()
        return HostMeshProxy(Owned(self, known, shape), shape)

    # --- what proxies use

    def post(self, header: Header, buffers: Sequence[Sendable] = (), *, stream: int) -> None:
        """Sends a request that has no answer of its own. Raises what ended the session."""
        self._connection.post(header, buffers, stream=stream)

    def ask(
        self,
        answer: Answer,
        make_header: Callable[[int], Header],
        buffers: Sequence[Sendable] = (),
        *,
        stream: int,
        though_in_trouble: bool = False,
    ) -> None:
        """Sends a request that ``answer`` waits for; ``make_header`` is given its number.

        Where what it addresses has failed or was stopped, the answer fails at once and nothing is sent.
        """
        if not though_in_trouble and self.objects.trouble(answer.target) is not None:
            answer.fail(step_failure(self.objects, answer.target, answer.endpoint))
            return
        number = self.calls.add(answer)
        try:
            self._connection.post(make_header(number), buffers, stream=stream)
        except BaseException:
            self.calls.end(number)
            raise

    def require_usable(self, number: int, endpoint: str) -> None:
        """Raises the reason why ``number`` cannot be called, if there is one."""
        if self.objects.trouble(number) is not None:
            raise step_failure(self.objects, number, endpoint)()

    def pickle(self, value: object) -> Pickled:
        pickled = dumps(value, self.resolve)
        self.require_same_python(pickled.code)
        return pickled

    def require_same_python(self, code: Sequence[str]) -> None:
        """Raises UnpicklableArgument where ``code`` would travel to workers of another Python minor version.

        Who knows is the gateway: where there is code, its first answer is waited for.
        """
        if code:
            if self._connection.peer is None:
                self._connection.established.get()
            assert self._connection.peer is not None
            require_same_python(code, self._connection.peer.python)

    def resolve(self, value: object) -> Argument | None:
        """What stands for a proxy or a port in an argument; None for anything else."""
        if isinstance(value, (MeshProxy, Port)):
            return value._as_argument(self)
        return None

    def open_inbox(self, number: int) -> Inbox:
        """Where the messages of channel ``number`` will arrive."""
        inbox = Inbox(self._connection.consume)
        self._dispatch.inboxes[number] = inbox
        self._connection.manual(stream_of(number))
        return inbox

    def before_close(self, step: Callable[[], object]) -> None:
        """Has ``step`` called when the client is closed."""
        self._before_close.append(step)

    def on_sync(self, received: Callable[[Sync, Sequence[Fragments]], None]) -> None:
        """``received`` gets the gateway's messages about code, on the connection's thread."""
        self._dispatch.sync = received

    def release(self, number: int) -> None:
        """Nobody holds object ``number`` any more. For finalizers: takes no lock, never blocks."""
        if self.objects.release(number):
            self._connection.release(number)

    def drop(self, number: int) -> None:
        """Nobody holds the mesh ``number`` any more: it is released when it has failed or was stopped, and what it
        stands on as well. For finalizers, as ``release``."""
        if self.objects.drop(number):
            self.release(number)

    def stopped(self, number: int, reason: str) -> None:
        """The user stops ``number``, and with it all that stands on it."""
        for dropped in self.objects.stop(number, reason):
            self.release(dropped)

    def show_output(self, procs: int, shown: bool) -> None:
        """Whether what the proc mesh ``procs`` prints appears here."""
        hidden = self._dispatch.hidden
        (hidden.discard if shown else hidden.add)(procs)

    def _consume(self, message: MessageReceived) -> None:
        self._connection.consume(message)

    # --- about the session

    @property
    def same_python(self) -> bool:
        """Whether the workers run this Python minor version, so that code can travel."""
        peer = self._connection.peer
        return peer is None or f"{peer.python}.".startswith(_THIS_PYTHON)

    @property
    def closed(self) -> bool:
        return self._closed or self._connection.error is not None

    @property
    def error(self) -> MeshgateError | None:
        """What ended the session, if it is over."""
        return self._connection.error

    def statistics(self) -> Statistics:
        return self._connection.statistics()

    # --- the end

    def close(self, timeout: float | None = None) -> None:
        """Ends the session: the gateway stops its processes. Waits for that, ``settings.close_timeout`` at most.

        Closing twice is harmless. Futures still open fail.
        """
        if self._closed:
            return
        self._closed = True
        for step in self._before_close:
            step()
        timeout = self.settings.close_timeout if timeout is None else timeout
        try:
            if self._connection.error is None:
                self._end_session(timeout if self._connection.connected else min(timeout, 1.0))
        finally:
            self.abandon()
            self._dispatch.close(timeout=1.0)

    def _end_session(self, timeout: float) -> None:
        answer = Acknowledgement(0, "end of the session")
        deadline = time.monotonic() + timeout
        with contextlib.suppress(GatewayError, TimeoutError):
            self._connection.drained().get(timeout)  # or the end would overtake what was asked for before
            self.ask(answer, lambda call: EndSession(call=call), stream=CONTROL, though_in_trouble=True)
            error = answer.future.exception(max(0.0, deadline - time.monotonic()))
            self.ended_in_order = error is None
            if error is not None:
                log.debug("the session did not end in order, the gateway reaps it after its lease: %s", error)

    def abandon(self) -> None:
        """Drops the connection without a word: the gateway ends the session when its lease is over."""
        self._closed = True
        self._connection.close(timeout=3.0)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "connected" if self._connection.connected else "connecting"
        return f"<Client of {self._connection.dialer}, {state}>"


_opened: list[weakref.ref[Client]] = []
_chosen: contextvars.ContextVar[Client | None] = contextvars.ContextVar("meshgate_client", default=None)


def current_client() -> Client:
    """The client chosen with :func:`use_client`, or else the one that was opened last and is not closed."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    for reference in reversed(_opened):
        client = reference()
        if client is not None and not client.closed:
            return client
    raise GatewayError("there is no session: apply a job and take its state() first, or pass client=...")


@contextlib.contextmanager
def use_client(client: Client) -> Iterator[Client]:
    """Makes ``client`` the current one inside a ``with`` block."""
    token = _chosen.set(client)
    try:
        yield client
    finally:
        _chosen.reset(token)


@atexit.register
def _close_all() -> None:
    for reference in reversed(_opened):
        client = reference()
        if client is not None:
            client.close()
