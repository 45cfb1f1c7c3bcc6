"""The connection thread of one session: it has an event loop and sends, receives and reconnects.

Callers on any thread post messages with ``Connection.post``, which never waits for the network. A cut is not an
error: the thread reconnects, with back-off and full jitter, and the wire session retransmits what the gateway has
not received. The session ends when the gateway refuses it for good, when the dialer knows that the gateway is gone,
when the lease expires, or when the user closes it; the listener is then notified once, with the reason.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from websockets.frames import CloseCode

from meshgate.errors import GatewayError, GatewayFault, GatewayLostError, MeshgateError, VersionMismatchError
from meshgate.session.dialing import Dialer
from meshgate.session.futures import FutureProxy
from meshgate.session.settings import ClientSettings
from meshgate.session.transport.gateway_connection import GatewayConnection
from meshgate.session.transport.reconnect import Reconnector
from meshgate.session.transport.send_queue import SendQueue
from meshgate_wire import (
    Established,
    Header,
    Hello,
    MessageReceived,
    Pump,
    Role,
    Sendable,
    Session,
    SessionLost,
    State,
    Statistics,
    VersionMismatch,
    WireError,
)
from meshgate_wire.messages import Release, stream_of

log = logging.getLogger("meshgate.session.connection")

UPDATE_INTERVAL = 1.0  # seconds between two updates of the line


class Outage:
    """What the user sees of a time without a connection, or with ones that are cut before anything has passed on them,
    as by a proxy that refuses the size of what is sent. All but ``describe`` is called on the event loop.

    Calls wait meanwhile, and nothing is lost, so a short outage is not worth a line. After ``quiet`` seconds one line
    says since when, why, and that calls wait; on a terminal and in a notebook it is updated in place. Another line says
    when the connection is back. Both are logged as well, before any message of the new connection is delivered.

    ``why`` returns the reason of the latest failure, ``gone`` why the gateway will never answer again, if that is
    certain: then calls do not wait for long. ``show(text, final)`` shows a line, which takes the place of the last one
    unless that was ``final``.
    """

    def __init__(
        self,
        gateway: object,
        quiet: float,
        why: Callable[[], str],
        gone: Callable[[], str | None],
        show: Callable[[str, bool], None],
    ) -> None:
        self._gateway, self._quiet, self._why, self._gone, self._show = gateway, quiet, why, gone, show
        self._loop: asyncio.AbstractEventLoop
        self._since: tuple[float, str] | None = None  # on the loop's clock, and the time of day
        self._connected = False
        self._cuts = 0  # connections on which nothing has passed; one may be chance
        self._before = False  # whether something has passed
        self._shown = False
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """There is no connection. An outage that has not ended continues."""
        if self._since is None:
            self._loop = asyncio.get_running_loop()
            self._since = self._loop.time(), time.strftime("%H:%M:%S")
        self._cuts += self._connected
        self._connected = False
        if self._timer is None and not self._closing:
            quiet = self._since[0] + self._quiet - self._loop.time()
            self._timer = self._loop.call_later(max(0.0, quiet), self._report)

    def connected(self) -> None:
        """The session is connected. The outage ends once something has passed, or the connection has lasted."""
        self._connected = True
        if self._cuts < 2:
            self._stop_timer()

    def end(self) -> None:
        """The connection works."""
        if self._since is not None and self._shown:
            lasted = f"after {self._loop.time() - self._since[0]:.0f} s"
            again = f"again {lasted}; nothing was lost" if self._before else lasted
            text = f"connected to {self._gateway} {again}"
            log.info("%s", text)
            self._show(text, True)
        self._before = True
        self._clear()

    def mute(self) -> None:
        """The program closes the session, so calls do not wait any more. No line is shown from now on but the last one
        of an outage that was shown before."""
        self._closing = True
        self._stop_timer()

    def close(self) -> None:
        """The session has ended."""
        if self._shown and (text := self.describe()):
            self._show(text, True)
            self._clear()
        else:
            self.end()

    def describe(self) -> str:
        """For people, how long there has been no connection, and why; empty while there is one. From any thread."""
        since, cuts = self._since, self._cuts
        if since is None or (self._connected and cuts < 2):
            return ""
        lasted = f"{self._gateway} for {self._loop.time() - since[0]:.0f} s, since {since[1]}"
        if cuts < 2:
            return f"no connection to {lasted}: {self._why()}"
        return f"nothing has passed to or from {lasted}: the last {cuts} connections were cut at once; {self._why()}"

    def _report(self) -> None:
        gone = self._gone()
        before = self._before or self._cuts
        waiting = "calls wait, and nothing is lost" if before else "calls wait for the first connection"
        outlook = waiting if gone is None else f"it is gone: {gone}"
        text = f"{self.describe()}; {outlook}"
        if not self._shown:
            log.info("%s", text)
        self._shown = True
        self._show(text, False)
        self._timer = self._loop.call_later(UPDATE_INTERVAL, self._report)

    def _clear(self) -> None:
        self._stop_timer()
        self._since, self._cuts = None, 0
        self._connected = self._shown = False

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


CLOSING_PATIENCE = 2.0  # seconds that a session which is being closed waits for a gateway that is gone
_STABLE_AFTER = 1.0  # seconds; a connection that receives no message and is cut sooner counts as a failed attempt
_WAKE_UP_WITHIN = 5.0  # seconds from when something is posted until the loop is woken; far more than a thread needs


class _NotWoken(AssertionError):
    """What was posted waits, and the loop does not know. It holds for a moment whenever something is posted."""


class Listener(Protocol):
    """Receives the events of a connection thread, on that thread. It must not block."""

    def message_received(self, message: MessageReceived) -> None:
        """The gateway has sent a message. Each is delivered exactly once."""

    def connection_notice(self, text: str, final: bool) -> None:
        """A line for the user about the connection. Another takes its place unless it is ``final``."""

    def session_ended(self, error: MeshgateError) -> None:
        """The session has ended. No event follows."""

    def forked(self, error: MeshgateError) -> None:
        """This is the child of a fork: the session stays with the parent, and any lock may be held for ever."""


class ConnectionThread:
    """A wire session and the thread that keeps it connected.

    ``post``, ``consume``, ``release``, ``drained`` and ``close`` may be called from any thread.
    """

    def __init__(
        self,
        dialer: Dialer,
        settings: ClientSettings,
        listener: Listener,
        session_id: str,
        *,
        takes_over: bool = False,
    ) -> None:
        self.dialer = dialer
        self.established: FutureProxy[None] = FutureProxy()
        self._settings = settings
        self._listener = listener
        self._session = Session(Role.CLIENT, views=True)
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="meshgate-connection", daemon=True)
        # Shared with callers:
        self._queue = SendQueue(
            settings.queue_limit, self._session.limits.small_message, self._session, consumer=self._thread
        )
        self._consumed: deque[MessageReceived] = deque()
        self._released: deque[tuple[int, Collection[int], bool]] = deque()
        self._woken = False  # whether a wake-up of the loop is under way
        # Used by the loop alone:
        self._reconnector = Reconnector(dialer, settings, session_id, self, self._session.limits, takes_over=takes_over)
        reconnector = self._reconnector
        self._outage = Outage(
            dialer, settings.quiet, reconnector.why, lambda: reconnector.gone, listener.connection_notice
        )
        self._connection: GatewayConnection | None = None
        self._pump: Pump | None = None
        self._passed_before: tuple[int, int] | None = None  # on this connection, once established, until more passes
        self._task: asyncio.Task[None] | None = None
        self._fatal: MeshgateError | None = None
        _running.add(self)

    def start(self) -> None:
        """Starts to connect. ``established`` settles when the gateway has answered, and fails if it never will."""
        self._loop = new_event_loop()
        self._thread.start()

    # --- the callers' side ------------------------------------------------------------------------------

    def post(
        self,
        header: Header,
        buffers: Sequence[Sendable] = (),
        *,
        stream: int,
        last: bool = False,
        waits: bool = True,
    ) -> None:
        """Queues a message. The messages of one stream arrive in the order in which they are posted.

        If it ``waits``, blocks while the send queue is over ``settings.queue_limit``, except in a signal handler or a
        finalizer that interrupts a post of its own thread. Raises the error that ended the session, and
        InvalidRequestError if the message is too large for the gateway.
        """
        self._queue.put(header, buffers, stream, last=last, waits=waits)
        self._wake()

    def refuse_posts(self) -> None:
        """From now on, raises GatewayError in every caller that posts another message than the ``last`` one.

        While the gateway is gone, the session then ends within ``CLOSING_PATIENCE``.
        """
        self._queue.refuse(self._closed_error())
        self.call_soon(self._begin_closing)

    def consume(self, message: MessageReceived) -> None:
        """Returns the credit of ``message``, of a stream with manual credit, so that the gateway may send more."""
        if message.held:
            self._consumed.append(message)
            self._wake()

    def release(self, number: int, streams: Collection[int] = (), *, at_once: bool = False) -> None:
        """Releases object ``number``. Takes no lock: finalizers call it, at any point of any thread.

        ``streams``: those besides the object's own that had messages which name it, if the gateway may release it only
        when it has handled them. A message may overtake those of another stream. ``at_once``: kept values go although
        actors have references to them.
        """
        self._released.append((number, streams, at_once))
        self._wake()

    def post_released(self) -> None:
        """Queues what was released so far before all that is posted from now on. Never blocks: a Ctrl-C would lose what
        has been taken."""
        for header, stream in self._take_released(len(self._released)):
            self.post(header, stream=stream, waits=False)

    def _take_released(self, most: int) -> Iterator[tuple[Release, int]]:
        """The messages that release the first ``most`` objects, with their streams. Thread-safe."""
        for _ in range(most):
            try:
                number, named_on, at_once = self._released.popleft()
            except IndexError:  # another thread has taken them
                return
            self._session.automatic(stream_of(number))  # nothing takes the messages of a channel that is released
            streams = {stream_of(number), *named_on}
            header = Release(objects=(number,), parts=len(streams), at_once=at_once)
            yield from ((header, stream) for stream in streams)

    def post_later(self, delay: float, make: Callable[[], Header | None], *, stream: int) -> None:
        """Sends what ``make`` returns, if anything, on the loop in ``delay`` seconds. For finalizers: takes no lock."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._loop.call_later, delay, self._send_made, make, stream)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Calls ``function`` on the loop, unless the session has ended. For finalizers: takes no lock."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def _send_made(self, make: Callable[[], Header | None], stream: int) -> None:
        if (header := make()) is not None and self._session.state is not State.FAILED:
            self._session.send(header, stream=stream)
            self._flush()

    def drained(self) -> FutureProxy[None]:
        """Settles once everything posted so far has been sent. Until then, streams may overtake each other."""
        future = self._queue.drained()
        self._wake()
        return future

    def set_manual_credit(self, stream: int) -> None:
        """Messages of ``stream`` keep their credit until ``consume``. To be called before the first can arrive."""
        self._session.manual(stream)

    @property
    def error(self) -> MeshgateError | None:
        """The error that ended the session; None while it lasts."""
        return self._queue.error

    @property
    def connected(self) -> bool:
        """Whether a connection is established now. If not, nothing is lost, but requests take longer."""
        return self._session.state is State.ESTABLISHED

    def describe_outage(self) -> str:
        """For people, how long there has been no connection, and why; empty while there is one."""
        return self._outage.describe()

    @property
    def peer(self) -> Hello | None:
        """The gateway's greeting, once ``established``."""
        return self._session.peer

    def statistics(self) -> Statistics:
        return self._session.statistics()

    def close(self, timeout: float) -> None:
        """Ends the thread and waits up to ``timeout`` seconds for that. Does nothing if it has ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the thread is ending
            self._loop.call_soon_threadsafe(self._cancel)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def validate_state(self) -> None:
        """Asserts what holds between any two turns of the loop. For tests."""
        validated: concurrent.futures.Future[None] = concurrent.futures.Future()
        deadline = time.monotonic() + _WAKE_UP_WITHIN

        def validate() -> None:
            try:
                self._validate()
                self._validate_wake_up()
                validated.set_result(None)
            except _NotWoken as error:
                if time.monotonic() < deadline:  # a thread may have posted, and be about to wake the loop
                    self._loop.call_later(0.01, validate)
                else:
                    validated.set_exception(error)
            except AssertionError as error:
                validated.set_exception(error)

        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop is closed: the thread is ending
                self._loop.call_soon_threadsafe(validate)
            while self._thread.is_alive():  # a loop that is about to close accepts what it will not run
                concurrent.futures.wait([validated], timeout=0.05)
                if validated.done():
                    validated.result()
                    return
        assert self.error is not None, "the connection thread has ended without a reason"
        assert self._connection is None
        assert self.established.done()
        self._queue.validate_state(update_due=False)

    def _validate(self) -> None:
        self._session.validate_state()
        self._queue.validate_state(update_due=True)
        assert (self._connection is None) == (self._pump is None)
        assert (self._connection is None) <= (self._session.state in (State.DETACHED, State.FAILED))
        assert (self._session.state is State.DETACHED) <= (self._connection is None)

    def _validate_wake_up(self) -> None:
        """Raises _NotWoken if something waits for a turn of the loop that nothing has asked for."""
        if not self._woken and (self._released or self._consumed):
            raise _NotWoken("nothing will send what was released or consumed")
        try:
            self._queue.validate_state(update_due=self._woken)
        except AssertionError as error:
            raise _NotWoken(*error.args) from error

    def _wake(self) -> None:
        """Makes the loop look at what was posted. One wake-up serves everything posted until the loop runs."""
        if self._woken:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._take_posted)
        except RuntimeError:
            if self.error is None:
                raise
        except BaseException:  # a Ctrl-C must not leave _woken set with no wake-up under way
            self._loop.call_soon_threadsafe(self._take_posted)
            raise

    # --- the loop's side: sending and receiving ---------------------------------------------------------

    def _take_posted(self) -> None:
        self._woken = False
        released = len(self._released)  # every message about these objects was posted before now
        try:
            for message, stream in self._queue.take():
                self._session.send(message, stream=stream)
        except WireError:
            return  # the session has failed, and the listener is notified of that
        if released:
            for header, stream in self._take_released(released):
                self._session.send(header, stream=stream)
        while self._consumed:
            self._session.consume(self._consumed.popleft())
        self._flush()

    def _flush(self) -> None:
        if self._pump is not None:
            self._pump.flush()
        self._queue.update()

    def connection_opened(self, connection: GatewayConnection) -> None:
        self._detach()  # from a connection whose handshake succeeded too late
        self._connection = connection
        self._pump = Pump(self._session, connection, flushed=self._queue.update)
        timeout = self._reconnector.attempt_timeout
        self._loop.call_later(timeout, self._check_established, connection, timeout)
        self._session.connection_made()
        self._flush()

    def connection_data(self, connection: GatewayConnection, data: bytes) -> None:
        if connection is not self._connection:
            return
        try:
            events = self._session.receive_data(data)
        except WireError as error:
            self._refuse(connection, error)
            return
        if self._passed_before is not None and self._passed_before != self._passed():
            self._end_outage()
        for event in events:
            if isinstance(event, MessageReceived):
                self._reconnector.attempts = 0
                self._listener.message_received(event)
            elif isinstance(event, Established):
                self._loop.call_later(_STABLE_AFTER, self._check_stable, connection)
                self._reconnector.established()
                self._outage.connected()
                self._passed_before = self._passed()
                self.established.settle(lambda: None)
        self._flush()

    def connection_writable(self, connection: GatewayConnection) -> None:
        if connection is self._connection:
            self._flush()

    def _check_stable(self, connection: GatewayConnection) -> None:
        if connection is self._connection:
            self._reconnector.attempts = 0
            self._end_outage()

    def _passed(self) -> tuple[int, int]:
        """How many frames each side has received of the other so far, as far as this side knows."""
        statistics = self._session.statistics()
        return statistics.frames_acknowledged, statistics.frames_received

    def _end_outage(self) -> None:
        self._passed_before = None
        self._outage.end()

    def _check_established(self, connection: GatewayConnection, timeout: float) -> None:
        if connection is self._connection and self._session.state is State.OPENING:
            failure = f"connected, but the session did not answer within {timeout:g} s"
            self._reconnector.timed_out(failure)
            connection.abort(failure)

    def _refuse(self, connection: GatewayConnection, error: WireError) -> None:
        """Closes a connection that sent invalid data. The session survives if ``error`` is resumable."""
        if isinstance(error, VersionMismatch):
            self._fatal = VersionMismatchError(f"{self.dialer}: {error}")
        elif isinstance(error, SessionLost):
            self._fatal = GatewayLostError(f"{self.dialer}: {error}")
        elif not error.resumable:
            self._fatal = GatewayFault(f"{self.dialer} violated the protocol: {error}. Please report this.")
        connection.refuse(CloseCode.PROTOCOL_ERROR, str(error))

    # --- the loop's side: connecting and reconnecting ---------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
            self._loop.run_until_complete(cancel_all_tasks())  # such as a connection's keepalive
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    async def _serve(self) -> None:
        self._task = asyncio.current_task()
        error: MeshgateError
        try:
            await self._stay_connected()
        except MeshgateError as reason:
            error = reason
        except asyncio.CancelledError:
            error = self._closed_error()
        except Exception as fault:
            log.exception("internal error in the connection to %s", self.dialer)
            error = GatewayFault(f"internal error in the connection to {self.dialer}: {fault!r}. Please report this.")
        self._end(error)

    def _closed_error(self) -> MeshgateError:
        return GatewayError(f"this program has closed its session with {self.dialer}")

    def _end(self, error: MeshgateError) -> None:
        self._detach()
        self._outage.close()
        self._queue.close(error)
        self.established.fail(error)
        self._listener.session_ended(error)
        _running.discard(self)

    def _begin_closing(self) -> None:
        self._outage.mute()
        self._loop.call_later(CLOSING_PATIENCE, self._stop_closing)

    def _stop_closing(self) -> None:
        """All that is left to send is the end of the session. A gateway that is gone does not need it; for another one,
        the caller decides how long to wait."""
        if not self.connected and self._reconnector.gone is not None:
            self._cancel()
        else:
            self._loop.call_later(CLOSING_PATIENCE, self._stop_closing)

    async def _stay_connected(self) -> None:
        while True:
            self._outage.begin()
            connection = await self._reconnector.connect()
            try:
                await connection.wait_lost()
            except asyncio.CancelledError:
                self._detach()
                await _close(connection)
                raise
            if self._fatal is not None:
                raise self._fatal
            self._reconnector.last_failure = connection.close_description()
            self._detach()
            log.debug("connection to %s lost: %s", self.dialer, self._reconnector.last_failure)

    def _detach(self) -> None:
        if self._pump is not None:
            self._pump.close()
        self._connection = self._pump = self._passed_before = None
        self._session.connection_lost()

    def _cancel(self) -> None:
        self._reconnector.stop()
        if self._task is not None:
            self._task.cancel()

    # --- fork -------------------------------------------------------------------------------------------

    def _after_fork(self) -> None:
        """In the child of a fork the connection thread does not run, so nothing may wait for it."""
        error = GatewayError(
            "this process was forked from one that is connected to a gateway; the connection stays with the parent. "
            "Connect again here, or start the process with the 'spawn' method."
        )
        self._queue.close_after_fork(error)
        self._listener.forked(error)


async def _close(connection: GatewayConnection) -> None:
    try:
        await connection.close()
    except Exception as error:  # noqa: BLE001 - the session is over in any case
        log.debug("closing the connection: %s", error)


def new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # noqa: PLC0415 - does not exist for Windows; saves a fifth of each round trip
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def cancel_all_tasks() -> None:
    """Cancels the other tasks of the running loop and waits for them."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_running: weakref.WeakSet[ConnectionThread] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for thread in list(_running):
        thread._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
