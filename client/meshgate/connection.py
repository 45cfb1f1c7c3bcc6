"""The connection of one session: a thread with an event loop that sends, receives, and redials after every cut.

Callers on any thread hand it messages with :meth:`Connection.post`, which never waits for the network. A cut is not
an error: the connection redials, with back-off and full jitter, and the session replays what the gateway has not
got. It ends when the gateway refuses for good, when the dialer knows that the gateway is gone, when the lease is
over, or when the user closes it; then, and once, the handler is told why.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from websockets.frames import CloseCode

from meshgate.dialing import Dialer
from meshgate.errors import (
    GatewayError,
    GatewayFault,
    GatewayLostError,
    MeshgateError,
    VersionMismatchError,
)
from meshgate.future import FutureProxy
from meshgate.link import Link
from meshgate.redialling import Redialler
from meshgate.settings import ClientSettings
from meshgate_wire import (
    Established,
    Header,
    Hello,
    MessageReceived,
    MessageTooLarge,
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

__all__ = ["Connection", "Handler"]

log = logging.getLogger("meshgate.connection")

_WHOLE_MESSAGE = 300  # bytes that a message has besides its buffers, about
_STABLE = 1.0  # seconds; a connection that brings nothing and is cut sooner counts as a failed attempt


class Handler(Protocol):
    """What a connection tells. All calls come from its own thread and must not block."""

    def received(self, message: MessageReceived) -> None:
        """A message of the gateway, each exactly once."""

    def unsendable(self, header: Header, error: MessageTooLarge) -> None:
        """A posted message was not sent, since the gateway would refuse it; the session goes on."""

    def over(self, error: MeshgateError) -> None:
        """The session is over. Nothing follows."""

    def forked(self, error: MeshgateError) -> None:
        """This is the child of a fork: the session stays with the parent, and no lock can be trusted."""


class Connection:
    """A session with a gateway. ``post``, ``consume`` and ``close`` may be called from any thread."""

    def __init__(self, dialer: Dialer, settings: ClientSettings, handler: Handler, session_id: str) -> None:
        self.dialer = dialer
        self.session_id = session_id
        self.established: FutureProxy[None] = FutureProxy()
        self.error: MeshgateError | None = None
        self._settings = settings
        self._handler = handler
        self._session = Session(Role.CLIENT, manual_streams=None, views=True)
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="meshgate-connection", daemon=True)
        self._redialler = Redialler(dialer, settings, session_id, self, self._session.limits)
        # Shared with callers: what they posted, and whether the loop has been woken for it.
        self._posted: deque[tuple[Header, Sequence[Sendable], int, int]] = deque()
        self._consumed: deque[MessageReceived] = deque()
        self._released: deque[int] = deque()
        self._draining: deque[FutureProxy[None]] = deque()
        self._posting = threading.Lock()
        self._posted_bytes = 0
        self._woken = False
        self._posted_small = 0  # of these, in messages that are not held up by large ones
        self._room: threading.Event
        self._small_room: threading.Event
        self._open_doors()
        # Of the loop alone:
        self._link: Link | None = None
        self._pump: Pump | None = None
        self._task: asyncio.Task[None] | None = None
        self._fatal: MeshgateError | None = None
        _alive.add(self)

    def start(self) -> None:
        """Begins to connect. ``established`` settles when the gateway has answered, or never will."""
        self._loop = _new_event_loop()
        self._thread.start()

    # --- the callers' side ------------------------------------------------------------------------------

    def post(self, header: Header, buffers: Sequence[Sendable] = (), *, stream: int) -> None:
        """Queues a message; messages of one stream arrive in the order in which they are posted.

        Blocks only while more than ``settings.queue_limit`` bytes wait to be sent; a small message waits for small
        ones alone. Raises what ended the session.
        """
        nbytes = _WHOLE_MESSAGE + sum(map(_nbytes, buffers))
        small = nbytes <= self._session.limits.small_message
        room = self._small_room if small else self._room
        if not room.is_set() and threading.current_thread() is not self._thread:
            room.wait()
        if self.error is not None:
            raise self.why_over()
        with self._posting:
            self._posted.append((header, buffers, stream, nbytes))
            self._posted_bytes += nbytes
            self._posted_small += nbytes if small else 0
            self._close_doors()
        self._wake()

    def consume(self, message: MessageReceived) -> None:
        """The user has taken ``message`` of a manual stream; the gateway may send more of it."""
        if message.held:
            self._consumed.append(message)
            self._wake()

    def release(self, number: int) -> None:
        """The user holds object ``number`` no longer. Takes no lock: finalizers call it, at any point of any thread."""
        self._released.append(number)
        self._wake()

    def drained(self) -> FutureProxy[None]:
        """Settles once all that was posted so far has been sent; streams overtake each other until then."""
        future: FutureProxy[None] = FutureProxy()
        if self.error is not None:
            future.fail(self.why_over())
        else:
            self._draining.append(future)
            self._wake()
        return future

    def manual(self, stream: int) -> None:
        """Messages of ``stream`` keep their credit until ``consume``. To be called before any can arrive."""
        self._session.manual(stream)

    def automatic(self, stream: int) -> None:
        """Takes ``manual`` back."""
        self._session.automatic(stream)

    def why_over(self) -> MeshgateError:
        """The error that ended the session, fresh for each who raises it."""
        assert self.error is not None
        return copy.copy(self.error)

    @property
    def connected(self) -> bool:
        """Whether there is a connection at this moment. Without one nothing is lost; it only takes longer."""
        return self._session.state is State.ESTABLISHED

    @property
    def peer(self) -> Hello | None:
        """What the gateway said of itself, once ``established``."""
        return self._session.peer

    def statistics(self) -> Statistics:
        return self._session.statistics()

    def close(self, timeout: float) -> None:
        """Ends the connection, waiting ``timeout`` seconds at most for the thread. Harmless when it is over."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the thread is at its end
            self._loop.call_soon_threadsafe(self._begin_close)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _wake(self) -> None:
        """Has the loop look at what was posted. One wake-up serves everything posted until the loop gets there."""
        if self._woken:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._take_posted)
        except RuntimeError:
            if self.error is None:
                raise
        except BaseException:  # a Ctrl-C in between must not leave _woken set with nobody woken
            self._loop.call_soon_threadsafe(self._take_posted)
            raise

    # --- the loop's side: sending and receiving ---------------------------------------------------------

    def _open_doors(self) -> None:
        self._room, self._small_room = threading.Event(), threading.Event()
        self._room.set()
        self._small_room.set()

    def _close_doors(self) -> None:
        """Who posts more is to wait, where too much waits already."""
        limit = self._settings.queue_limit
        if self._posted_bytes + self._session.queued_bytes > limit:
            self._room.clear()
            if self._posted_small + self._session.queued_small_bytes > limit:
                self._small_room.clear()

    def _take_posted(self) -> None:
        self._woken = False
        released = len(self._released)  # by now: whatever was posted of these objects was posted before
        taken = taken_small = 0
        while self._posted:
            header, buffers, stream, nbytes = self._posted.popleft()
            taken += nbytes
            taken_small += nbytes if nbytes <= self._session.limits.small_message else 0
            try:
                self._session.send(header, buffers, stream=stream)
            except MessageTooLarge as error:
                self._handler.unsendable(header, error)
            except WireError:
                return  # the session has failed, and whoever waits is being told
        for _ in range(released):
            number = self._released.popleft()
            self._session.send(Release(objects=(number,)), stream=stream_of(number))
        while self._consumed:
            self._session.consume(self._consumed.popleft())
        with self._posting:
            self._posted_bytes -= taken
            self._posted_small -= taken_small
        self._flush()

    def _flush(self) -> None:
        if self._pump is not None:
            self._pump.flush()
        self._regulate()

    def _regulate(self) -> None:
        """Lets those go on who wait for what has been sent, and has others wait."""
        limit = self._settings.queue_limit
        waiting = self._posted_bytes + self._session.queued_bytes
        while self._draining and not waiting:
            self._draining.popleft().settle(lambda: None)
        self._close_doors()
        if waiting <= limit and not self._room.is_set():
            self._room.set()
        if not self._small_room.is_set() and self._posted_small + self._session.queued_small_bytes <= limit:
            self._small_room.set()

    def link_open(self, link: Link) -> None:
        self._detach()  # from one whose handshake succeeded too late
        self._link = link
        self._pump = Pump(self._session, link, flushed=self._regulate)
        self._redialler.failure = ""
        self._loop.call_later(self._settings.attempt_timeout, self._check_established, link)
        self._session.connection_made()
        self._pump.flush()

    def link_data(self, link: Link, data: bytes) -> None:
        if link is not self._link:
            return
        try:
            events = self._session.receive_data(data)
        except WireError as error:
            self._misunderstood(link, error)
            return
        for event in events:
            if isinstance(event, MessageReceived):
                self._redialler.progressed()
                self._handler.received(event)
            elif isinstance(event, Established):
                self._loop.call_later(_STABLE, self._check_stable, link)
                self._redialler.resuming = True
                self.established.settle(lambda: None)
        self._flush()

    def link_writable(self, link: Link) -> None:
        if link is self._link:
            self._flush()

    def _check_stable(self, link: Link) -> None:
        if link is self._link:
            self._redialler.progressed()

    def _check_established(self, link: Link) -> None:
        if link is self._link and self._session.state is State.OPENING:
            self._redialler.failure = (
                f"connected, but the session did not answer in {self._settings.attempt_timeout:g} s"
            )
            link.abandon()

    def _misunderstood(self, link: Link, error: WireError) -> None:
        if isinstance(error, VersionMismatch):
            self._fatal = VersionMismatchError(f"{self.dialer}: {error}")
        elif isinstance(error, SessionLost):
            self._fatal = GatewayLostError(f"{self.dialer}: {error}")
        elif not error.resumable:
            self._fatal = GatewayFault(f"{self.dialer} broke the protocol: {error}. Please report this.")
        self._redialler.failure = str(error)
        link.refuse(CloseCode.PROTOCOL_ERROR, str(error))

    # --- the loop's side: connecting and reconnecting ---------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
            self._loop.run_until_complete(_end_all_tasks())
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
            error = GatewayError(f"this program has closed its session with {self.dialer}")
        except Exception as fault:
            log.exception("the connection to %s failed inside", self.dialer)
            error = GatewayFault(f"the connection to {self.dialer} failed inside: {fault!r}. Please report this.")
        self._end(error)

    def _end(self, error: MeshgateError) -> None:
        self.error = error
        self._posted.clear()
        self._room.set()
        self._small_room.set()
        self.established.fail(error)
        while self._draining:
            self._draining.popleft().fail(error)
        self._handler.over(error)
        _alive.discard(self)

    async def _stay_connected(self) -> None:
        while True:
            link = await self._redialler.connect()
            try:
                await link.wait_lost()
            except asyncio.CancelledError:
                self._detach()
                await _close(link)
                raise
            if self._fatal is not None:
                raise self._fatal
            self._redialler.failure = self._redialler.failure or _why_lost(link)
            self._detach()
            log.debug("connection to %s lost: %s", self.dialer, self._redialler.failure)

    def _detach(self) -> None:
        if self._pump is not None:
            self._pump.close()
        self._link = self._pump = None
        self._session.connection_lost()

    def _begin_close(self) -> None:
        self._redialler.stop()
        if self._task is not None:
            self._task.cancel()

    # --- fork -------------------------------------------------------------------------------------------

    def _forked(self) -> None:
        """In the child of a fork the thread does not run: nothing may wait for it."""
        self.error = GatewayError(
            "this process was forked from one that is connected to a gateway; the connection stays with the parent. "
            "Connect again here, or start the process with the 'spawn' method."
        )
        self._open_doors()
        self._posting = threading.Lock()
        self._handler.forked(self.error)


async def _end_all_tasks() -> None:
    """Lets what is left, such as a link's keepalive, end in order."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def _close(link: Link) -> None:
    """Closes in an orderly way; a second cancellation, or an error, leaves it to the operating system."""
    try:
        await link.close()
    except Exception as error:  # noqa: BLE001 - the session is over in any case
        log.debug("closing the connection: %s", error)


def _why_lost(link: Link) -> str:
    if link.close_code is not None and link.close_reason:
        return f"{link.close_reason} (code {link.close_code})"
    return str(getattr(link, "connection_exc", None) or "the connection was cut")  # websockets tells it from 17 on


def _nbytes(buffer: Sendable) -> int:
    if isinstance(buffer, (list, tuple)):
        return sum(map(_nbytes, buffer))
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)  # type: ignore[arg-type]


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # noqa: PLC0415 - not a dependency; a fifth off each round trip where it is there
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


_alive: weakref.WeakSet[Connection] = weakref.WeakSet()


def _after_fork() -> None:
    for connection in list(_alive):
        connection._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
