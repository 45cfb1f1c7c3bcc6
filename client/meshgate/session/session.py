"""One session with the gateway: names objects, sends requests, and tracks what becomes of them.

A session serves any number of threads and event loops. Requests are sent in the order in which they are made and none
waits for the one before it: ``spawn_procs``, ``spawn`` and ``call`` travel together, and only getting a result blocks.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from meshgate.actors.monarch_settings import Setting
from meshgate.errors import GatewayError, InvalidRequestError, MeshgateError, UnreadableResult
from meshgate.serialization.pickling import Pickled, dumps
from meshgate.serialization.unpickling import MakeProxy, ReadingRules, RemoteException, loads, loads_exception
from meshgate.session.detached import ReadMarks, Returns, Takeover
from meshgate.session.dialing import Dialer, UrlDialer
from meshgate.session.dispatch import Dispatcher
from meshgate.session.errors.failures import dependency_failure, from_failure
from meshgate.session.errors.faults import uninterrupted
from meshgate.session.errors.unread import UnreadFailures
from meshgate.session.futures import FutureProxy
from meshgate.session.inbox import Inbox
from meshgate.session.objects import ObjectTable
from meshgate.session.output.log_files import LogFiles
from meshgate.session.output.printer import OutputPrinter
from meshgate.session.pending_calls import PendingAck, PendingCall, PendingCalls, PendingValue
from meshgate.session.settings import ClientSettings
from meshgate.session.transport.connection_thread import ConnectionThread
from meshgate_wire import Fragments, Header, MessageReceived, Sendable, Statistics
from meshgate_wire.fields import first_problem
from meshgate_wire.messages import (
    Adopted,
    Argument,
    CancelCall,
    Configure,
    ConfigureMonarch,
    Detach,
    EndSession,
    Failure,
    Fetch,
    OpenChannel,
    PortMessage,
    Read,
    Resume,
    Returned,
    Sync,
    stream_of,
)


class ResultReader:
    """The session's ``Reader``. Meshes and ports in a result become the proxies that ``make_proxy`` makes.

    ``rules()`` says what a result may do here. ``shared_environment``: as for ``from_failure``.
    """

    def __init__(self, make_proxy: MakeProxy, rules: Callable[[], ReadingRules], shared_environment: str = "") -> None:
        self._make_proxy = make_proxy
        self._rules = rules
        self._shared_environment = shared_environment

    def value(self, buffer: Fragments, objects: Adopted, endpoint: str) -> Any:
        try:
            return loads(buffer, objects=objects.objects, make_proxy=self._make_proxy, rules=self._rules())
        except UnreadableResult as error:
            raise UnreadableResult(f"{endpoint}: {error}", module=error.module, endpoint=endpoint) from error

    def raised(self, buffer: Fragments, objects: Adopted) -> RemoteException:
        """What an endpoint raised, or an actor sent as an exception."""
        return loads_exception(buffer, objects=objects.objects, make_proxy=self._make_proxy, rules=self._rules())

    def error(self, failure: Failure, buffers: Sequence[Fragments], endpoint: str) -> Exception:
        raised = [self.raised(buffer, Adopted()) for buffer in buffers]
        return from_failure(failure, raised, endpoint=endpoint, shared_environment=self._shared_environment)


log = logging.getLogger("meshgate.session")

CONTROL_STREAM = 0
MARK_DELAY = 0.02  # seconds from when something was read to when the gateway learns of it
DRAIN_TIMEOUT = 0.5  # seconds that close() gives to what was posted before: a flood of calls would take minutes
_THIS_PYTHON = "{}.{}.".format(*platform.python_version_tuple()[:2])


class RemoteReference:
    """Base class of proxies. In an argument, a reference to the remote object travels in place of the proxy."""

    def _as_argument(self, session: ClientSession) -> Argument:
        """The reference, for a call of ``session``. Raises InvalidRequestError if the object is another session's."""
        raise NotImplementedError


class ClientSession:
    """A session with the gateway that ``dialer`` reaches. It connects in the background.

    ``make_proxy`` makes proxies of the meshes and ports that endpoints return. With ``session_id`` it takes over a
    session that exists, of a job whose meshes have ``mesh_sizes`` hosts.
    """

    def __init__(
        self,
        dialer: Dialer,
        settings: ClientSettings,
        make_proxy: MakeProxy,
        *,
        session_id: str | None = None,
        mesh_sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.settings = settings
        self.session_id = session_id or secrets.token_hex(16)
        self.objects = ObjectTable()
        self.detached = ""
        """The name under which another process can take over the session; empty if none can."""
        self.takeover = Takeover(self.objects, mesh_sizes or {}) if session_id is not None else None
        """What this client has found, if it has taken over the session."""
        self.calls = PendingCalls(self._describe_outage, self._follow_caller)
        self.unread = UnreadFailures()
        """Reports failed calls of the program that it does not read."""
        data_only = settings.results == "data"
        local = isinstance(dialer, UrlDialer) and dialer.on_this_machine
        environment = sys.prefix if local else ""
        self.reader = ResultReader(make_proxy, lambda: ReadingRules(self.same_python, data_only), environment)
        self.code_version: str | None = None
        """Digest of the code version that new processes run; set by the job's sync."""
        self.code_paths: tuple[str, ...] = ()
        """Directories of that version to put first on ``sys.path``."""
        self.attached: dict[type, Any] = {}
        """What other parts of this package keep until the session is closed, by its type. A proxy among it would keep
        the session alive for ever."""
        self.closed_cleanly = False
        """After ``close``: whether the gateway has confirmed that the session's processes are gone."""
        self._close_callbacks: list[Callable[[], object]] = []
        self._closed = False
        self._closing = threading.RLock()  # a signal handler may close what its thread is closing
        files = LogFiles(settings.log_dir, self._name_of_procs) if settings.log_dir is not None else None
        printer = OutputPrinter(files, quiet=not settings.output)
        self._dispatcher = Dispatcher(self.objects, self.calls, self.reader, self._consume, self.release, printer)
        self._in_notebook = "ipykernel" in sys.modules
        self._marks: ReadMarks | None = None  # of a detached session
        self._returned: PendingAck | None = None  # settled once what was on its way to this client is kept
        self._kept_inboxes: dict[str, Inbox] = {}  # of named channels
        self.named_values: dict[int, object] = {}  # kept values with a name, by object: actors may return references
        self._waited_for: set[Inbox] = set()
        takes_over = self.takeover is not None
        self._connection = ConnectionThread(dialer, settings, self._dispatcher, self.session_id, takes_over=takes_over)
        if self.takeover is not None:
            self._dispatcher.takeover = self.takeover
            self._mark_what_is_read()
        self._connection.set_manual_credit(CONTROL_STREAM)  # output keeps its credit until it is printed
        self._connection.start()
        if not settings.output and files is None:
            self.post(Configure(stream_output=False), stream=CONTROL_STREAM)

    def wait_connected(self) -> None:
        """Waits for the first connection, for up to ``settings.connect_timeout`` seconds. Raises ``GatewayError``."""
        self._connection.established.get()

    # --- requests

    def post(self, header: Header, buffers: Sequence[Sendable] = (), *, stream: int, waits: bool = True) -> None:
        """Sends a request that has no reply. Raises the error that ended the session, and InvalidRequestError if the
        request is too large. ``waits``: for space in the queue, which the use of a future may not do."""
        self._follow_caller()
        try:
            self._connection.post(header, buffers, stream=stream, waits=waits)
        except InvalidRequestError:
            self.objects.remove(getattr(header, "object", 0))  # what it would have created
            raise

    def request(
        self,
        call: PendingCall,
        make_header: Callable[[int], Header],
        buffers: Sequence[Sendable] = (),
        *,
        stream: int,
        even_if_failed: bool = False,
        last: bool = False,
    ) -> None:
        """Sends a request whose reply settles ``call``; ``make_header`` takes the call's number.

        If the target has failed or was stopped, fails ``call`` and sends nothing. Once ``close`` has begun, raises
        GatewayError for any request but the ``last``.
        """
        objects = self.objects
        if objects.any_failed and not even_if_failed and objects.failure_of(call.target) is not None:
            call.fail(dependency_failure(self.objects, call.target, call.endpoint))
            return
        if self._in_notebook and not isinstance(call, PendingAck):  # a variable explorer reads ``mesh.initialized``
            self._dispatcher.follow_caller()
        number = self.calls.add(call)
        if self._marks is not None and not isinstance(call, PendingAck):
            self._marks.watch_call(number, call.futures())
        try:
            call.header = make_header(number)
            self._connection.post(call.header, buffers, stream=stream, last=last)
        except BaseException as error:
            self.calls.pop(number)
            if isinstance(error, ValidationError):
                raise InvalidRequestError(f"{call.endpoint} was not sent: {first_problem(error)}") from None
            raise

    def cancel(self, call: PendingCall) -> None:
        """Asks the gateway to cancel ``call``, behind which this is sent. Never blocks: Ctrl-C must return while there
        is no connection and no space for more calls, too."""
        self._connection.post(CancelCall(cancelled=call.number), stream=stream_of(call.target), waits=False)

    def _describe_outage(self) -> str:
        return self._connection.describe_outage()

    def _follow_caller(self) -> None:
        """In a notebook, output and lines about the connection appear under the cell that calls or waits."""
        if self._in_notebook:
            self._dispatcher.follow_caller()

    def require_usable(self, number: int, endpoint: str) -> None:
        """Raises the reason why object ``number`` cannot be called, if there is one."""
        if self.objects.failure_of(number) is not None:
            raise dependency_failure(self.objects, number, endpoint)()

    def pickle(self, value: object) -> Pickled:
        return dumps(value, self.resolve, self.worker_python)

    def worker_python(self) -> str:
        """The workers' version of Python. Blocks until the gateway has reported it."""
        if self._connection.peer is None:
            self._connection.established.get()
        assert self._connection.peer is not None
        return self._connection.peer.python

    def resolve(self, value: object) -> Argument | None:
        """The reference that replaces a proxy or a port in an argument; None for anything else."""
        return value._as_argument(self) if isinstance(value, RemoteReference) else None

    def open_inbox(self, number: int, name: str = "", header: OpenChannel | None = None) -> Inbox:
        """The inbox for the messages of channel ``number``, which ``header`` opens unless it exists. One with a name
        lives as long as the session; a channel without one is closed when the inbox is dropped."""
        if name in self._kept_inboxes:
            raise ValueError(f"this session has a channel {name!r}; choose another name")
        inbox = Inbox(
            self._connection.consume,
            self._message_delivered,
            call_soon=self._connection.call_soon,
            waited_for=self._waited_for,
        )
        self._dispatcher.inboxes[number] = inbox
        self._connection.set_manual_credit(stream_of(number))
        if header is not None:
            self.post(header, stream=stream_of(number))
        if name:  # last: if Ctrl-C has interrupted the post, the name is not taken
            self._kept_inboxes[name] = inbox
        else:
            inbox.consume_when_dropped()
            weakref.finalize(inbox, self.release, number).atexit = False
        return inbox

    # --- objects

    def release(self, number: int, *, at_once: bool = False) -> None:
        """Releases object ``number``, which the program does not refer to any more. ``at_once``: nor does an actor's
        reference keep it. For finalizers: takes no lock, never blocks."""
        remote = self.objects.get(number)
        if self.objects.remove(number):
            self._connection.release(number, remote.streams if remote is not None else (), at_once=at_once)

    def post_released(self) -> None:
        """Lets the gateway know of what was released before what is posted from now on."""
        self._connection.post_released()

    def unreference(self, number: int) -> None:
        """Releases mesh ``number`` if it has failed or was stopped; otherwise once that happens.

        For finalizers, as ``release``.
        """
        if self.objects.unreference(number):
            self.release(number)

    def mark_stopped(self, number: int, reason: str) -> None:
        """Notes that the user has stopped ``number``, and with it everything made from it."""
        for unreferenced in self.objects.stop(number, reason):
            self.release(unreferenced)

    def _name_of_procs(self, procs: int) -> str:
        remote = self.objects.get(procs)
        return remote.name if remote is not None else ""

    def show_output(self, procs: int, shown: bool, window: float | None = None) -> None:
        """Shows or hides what the proc mesh ``procs`` prints. In each ``window`` of seconds, similar lines are counted
        and shown once."""
        hidden = self._dispatcher.hidden_procs
        (hidden.discard if shown else hidden.add)(procs)
        self._dispatcher.aggregator.set_window(procs, window)

    def configure_monarch(self, settings: Mapping[str, Setting]) -> FutureProxy[dict[str, Setting]]:
        """Applies ``settings`` in place of those of earlier calls. The value: all that are in effect in the engine."""
        call = PendingValue(0, "monarch.config")
        wanted = dict(settings)
        self.request(call, lambda number: ConfigureMonarch(call=number, settings=wanted), stream=CONTROL_STREAM)
        return call.future

    # --- detached sessions

    def detach(self, name: str) -> FutureProxy[Any]:
        """Keeps the session running when this process leaves, for its lease, so that another can take it over.

        The future settles once the gateway has noted it, and keeps the result of every call made before whose future
        was not settled: results that were on their way here have been sent back. Of a stream that still runs, only the
        results are kept that the gateway gets after that.
        """
        return self.start_detaching(name)[1]

    def start_detaching(self, name: str) -> tuple[FutureProxy[Any], FutureProxy[Any]]:
        """As ``detach``. The first future settles once the gateway has noted it, the second is that of ``detach``."""
        before, first = self.detached, self._marks is None
        self.detached = name  # before the gateway answers
        try:
            ack = self._post_detach(name, self._watch_returns() if first else None)
        except BaseException:  # Ctrl-C, too: the next attempt is the first
            self.detached = before
            if first:
                self._forget_returns()
            raise
        returned = self._returned
        return ack.future, ack.future if returned is None or returned.future.done() else returned.future

    def _post_detach(self, name: str, acknowledged: Callable[[int], object] | None = None) -> PendingAck:
        ack = PendingAck(0, "detach", acknowledged=acknowledged)
        self.request(ack, lambda call: Detach(call=call, name=name), stream=CONTROL_STREAM, even_if_failed=True)
        return ack

    def _watch_returns(self) -> Callable[[int], object]:
        """Prepares the first ``Detach``. Returns the callback for when the gateway has noted it."""
        self._returned = PendingAck(0, "detach")
        self.calls.add(self._returned)
        returns = self._dispatcher.returns = Returns(self.calls, self._post_returned, self._all_returned)
        marks = self._mark_what_is_read()
        for number, call in self.calls.items():
            if not isinstance(call, PendingAck):
                marks.watch_call(number, call.futures())
        return returns.noted

    def _forget_returns(self) -> None:
        if self._returned is not None:
            self.calls.pop(self._returned.number)
        self.unread.ignored = False
        self._returned = self._marks = self._dispatcher.marks = self._dispatcher.returns = None

    def _post_returned(self, header: Returned, buffers: Sequence[Fragments]) -> None:
        try:
            self._connection.post(header, buffers, stream=CONTROL_STREAM)
        except InvalidRequestError as error:
            text = f"a result of {header.request.endpoint} is not kept for the next program: {error}"
            self._dispatcher.connection_notice(text, final=True)

    def _all_returned(self, sent: bool) -> None:
        assert self._returned is not None
        self._dispatcher.returns = None
        if not sent:
            if self.calls.pop(self._returned.number) is not None:  # else the session has ended
                self._returned.done_received()
            return
        last = Detach(call=self._returned.number, name=self.detached)
        with contextlib.suppress(MeshgateError):  # the session has ended, and with it this call
            self._connection.post(last, stream=CONTROL_STREAM)

    def _mark_what_is_read(self) -> ReadMarks:
        self.unread.ignored = True  # the next holder may read them
        marks = ReadMarks(lambda: self._connection.post_later(MARK_DELAY, marks.take, stream=CONTROL_STREAM))
        self._marks = self._dispatcher.marks = marks
        return marks

    def _message_delivered(self, message: MessageReceived, future: FutureProxy[Any]) -> None:
        header = message.header
        if self._marks is not None and isinstance(header, PortMessage) and header.number:
            self._marks.watch_message(header.port, header.number, future)

    def resume_output(self, *, replay: bool) -> None:
        """After a takeover: receives output and channels from now on. ``replay``: all the output that is kept."""
        self.post(Resume(replay=replay), stream=CONTROL_STREAM)

    def restore_call(self, number: int, call: PendingCall) -> None:
        """A call of an earlier holder. Its result is fetched when the program first uses a future of it."""
        assert self._marks is not None
        call.canceller = self
        self.calls.restore(number, call)
        self._marks.watch_call(number, call.futures())
        fetched = False

        def fetch(_: object) -> None:
            nonlocal fetched
            if not fetched:  # one message is enough for all futures, and a second one does no harm
                self.post(Fetch(calls=(number,)), stream=CONTROL_STREAM, waits=False)
                fetched = True

        for future in call.futures():
            future.start_with(fetch)

    def leave(self, timeout: float | None = None) -> None:
        """Leaves a detached session, which goes on: returns once the gateway has everything that was posted."""
        if self._closed:
            return
        deadline = time.monotonic() + (self.settings.close_timeout if timeout is None else timeout)
        try:
            self._closed = True
            for callback in self._close_callbacks:
                callback()
            if self._connection.error is None:
                self._hand_over(deadline)
        finally:
            self.abandon()

    def _hand_over(self, deadline: float) -> None:
        try:
            self._connection.drained().get(max(0.0, deadline - time.monotonic()))
            if self._marks is not None:
                self._post_marks(self._marks, deadline)
            self.detach(self.detached).get(max(0.0, deadline - time.monotonic()))
        except (GatewayError, TimeoutError) as error:
            log.warning(
                "left session %r without a confirmation that %s has received everything: %s",
                *(self.detached, self._connection.dialer, error),
            )

    def _post_marks(self, marks: ReadMarks, deadline: float) -> None:
        taken: FutureProxy[Read | None] = FutureProxy()

        def take() -> None:  # on the connection thread, which also takes what is due
            read = marks.take()
            taken.settle(lambda: read)

        self._connection.call_soon(take)
        if (read := taken.get(max(0.0, deadline - time.monotonic()))) is not None:
            self.post(read, stream=CONTROL_STREAM)

    def handle_faults(self, mesh: int) -> None:
        """Faults of the mesh ``mesh`` no longer reach ``unhandled_fault_hook``: the caller reports them itself."""
        self._dispatcher.handled_faults.add(mesh)

    # --- callbacks

    def before_close(self, callback: Callable[[], object]) -> None:
        """Calls ``callback`` when the session is closed."""
        self._close_callbacks.append(callback)

    def on_sync(self, callback: Callable[[Sync, Sequence[Fragments]], None]) -> None:
        """Calls ``callback`` with each message of the gateway about code, on the connection thread."""
        self._dispatcher.on_sync = callback

    def _consume(self, message: MessageReceived) -> None:
        self._connection.consume(message)

    # --- status

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
        """The error that ended the session; None while it lasts."""
        return self._connection.error

    @property
    def connected(self) -> bool:
        return self._connection.connected

    def statistics(self) -> Statistics:
        return self._connection.statistics()

    # --- the end

    def close(self, timeout: float | None = None) -> None:
        """Ends the session: the gateway stops its processes. Waits for that for up to ``settings.close_timeout``.

        Open futures fail, and so do calls that other threads make meanwhile. What was posted before has
        ``DRAIN_TIMEOUT`` to leave. Closing twice does nothing; while another thread closes, this waits for it.
        """
        timeout = max(0.0, self.settings.close_timeout if timeout is None else timeout)
        with uninterrupted():
            alone = self._closing.acquire(timeout=timeout)
            try:
                if not self._closed:
                    self._close(timeout)
                elif not alone:  # the other thread may be a daemon, which dies with the program
                    self._drain_and_end(timeout)
            finally:
                if alone:
                    self._closing.release()

    def _close(self, timeout: float) -> None:
        # Ctrl-C ends the step that it interrupts: the processes may not outlive the program because of it.
        try:
            self._closed = True
            for callback in self._close_callbacks:
                callback()
        finally:
            # A job without hosts has nothing for the gateway to stop, which often ends with it.
            waits = self._connection.connected and not self._dispatcher.job_lost
            self._drain_and_end(timeout if waits else min(timeout, 1.0))

    def _drain_and_end(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        try:
            self._connection.refuse_posts()
            with contextlib.suppress(MeshgateError, TimeoutError):
                # EndSession overtakes messages of other streams, and the engine drops what arrives after it.
                self._connection.drained().get(min(timeout, DRAIN_TIMEOUT))
        finally:
            self._end_session(deadline)

    def _end_session(self, deadline: float) -> None:
        ack = PendingAck(0, "end of the session")
        try:
            self.request(ack, lambda call: EndSession(call=call), stream=CONTROL_STREAM, even_if_failed=True, last=True)
            error = ack.future.exception(max(0.0, deadline - time.monotonic()))
            self.closed_cleanly = error is None
            if error is not None:
                log.debug("the session was not closed cleanly; the gateway ends it after its lease: %s", error)
        except MeshgateError as error:
            log.debug("nothing to close: %s", error)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Drops the connection without ending the session, which the gateway does after its lease."""
        self._closed = True
        self.attached.clear()
        self.unread.watching = False
        self._connection.close(timeout=3.0)
        self.unread.close(timeout=1.0)
        self._dispatcher.close(timeout=1.0)  # also where nothing but a line about the connection was printed

    def validate_state(self) -> None:
        """Asserts the invariants of the connection and of the open futures. For tests, while no call is under way."""
        self._connection.validate_state()
        for call in self.calls:
            for future in call.futures():
                future.validate_state()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "connected" if self._connection.connected else "connecting"
        return f"<{type(self).__name__} of {self._connection.dialer}, {state}>"
