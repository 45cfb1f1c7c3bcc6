"""The engine's side of the websocket to the client, and the wire session that outlives one connection after another.

The server has read and authenticated the HTTP request of a socket that it accepted. Its bytes are replayed here into
the sans-IO protocol of ``websockets``, which answers the handshake, pings and the closing handshake. Data bypasses
that protocol: it goes from the socket's callback to the session without a queue or task in between.

A takeover replaces the wire session: the next holder of a detached session begins a new one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Protocol, cast

from websockets.frames import DATA_OPCODES, CloseCode, Frame, Opcode, apply_mask  # type: ignore[attr-defined]  # in C
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from meshgate_gateway.engine.detached.holders import Applicant, Refusal
from meshgate_gateway.engine.engine_metrics import EngineMetrics
from meshgate_gateway.engine.interfaces import CONTROL_STREAM
from meshgate_wire import Header, MessageReceived, Pump, Role, Session, WireError
from meshgate_wire.proof import PROOF_HEADER, Prover
from meshgate_wire.websocket import FrameReader, binary_header

log = logging.getLogger(__name__)

IDLE_TIMEOUT = 60.0  # seconds; the client pings every 15
MAX_MESSAGE = 8 * 2**20
JOIN_LIMIT = 16 * 1024  # bytes; joining the pieces of a smaller message costs less than sending them separately


class Admitter(Protocol):
    """What decides whether a client may connect. All calls come from the event loop."""

    def claim(self, applicant: Applicant) -> Refusal | None:
        """Whether the client may connect. Of those that want to be the holder, the order of these calls decides."""

    def admit(self, applicant: Applicant) -> Refusal | None:
        """Makes the client the holder of the session, unless it may not connect."""

    def connection_refused(self) -> object:
        """A connection is over that was never opened."""


class ClientConnection(asyncio.Protocol):
    """One connection, also the transport of the wire's ``Pump``.

    One that takes over a session is opened when its first message arrives: a process that was killed while it attached
    must not take the session from the process after it, whose connection may have been faster. ``proof_key``, unless it
    is empty, proves the response to the handshake to be that of ``gateway``. ``run``: that whose secret has opened it.
    """

    def __init__(
        self,
        admission: Admitter,
        receiver: ClientLink,
        head: bytes,
        gateway: str = "",
        proof_key: str = "",
        run: str = "",
    ) -> None:
        self._admission, self._receiver, self._head, self.run = admission, receiver, head, run
        self._gateway, self._proof_key = gateway, proof_key
        self._loop = loop = asyncio.get_running_loop()
        self._traffic = receiver.traffic
        self._protocol = ServerProtocol(max_size=MAX_MESSAGE)
        self._reader = FrameReader(MAX_MESSAGE, apply_mask)
        self._fragments = bytearray()  # of a message; the library limits its size
        self._transport: asyncio.Transport | None = None
        self._applicant: Applicant | None = None  # while the connection is not open
        self._open = False
        self._reason = "the connection was closed without a reason"
        self._last_received = loop.time()
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def silence(self) -> float:
        """Seconds since data last arrived."""
        return self._loop.time() - self._last_received

    # --- the transport of the wire's pump ---------------------------------------------------------------

    def write(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Sends one binary message."""
        if self._protocol.state is not State.OPEN or self._transport is None:
            return
        size = sum(map(len, pieces))
        self._traffic.bytes_sent += size
        if self._traffic.timer is None:
            self._traffic.changed()
        if size < JOIN_LIMIT:
            self._transport.write(b"".join((binary_header(size), *pieces)))
        else:
            self._transport.writelines((binary_header(size), *pieces))

    def buffered(self) -> int:
        """How many bytes the kernel has not accepted yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(delay, callback)

    def close(self, code: CloseCode, reason: str) -> None:
        """Closes the connection with a reason for the peer. ``connection_closed`` follows."""
        self._reason = reason
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code, reason[:120])
            self._flush()
        if self._transport is not None:
            self._transport.close()

    # --- asyncio.Protocol -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not instances of it
        transport = self._transport
        transport.set_write_buffer_limits(high=256 * 1024, low=64 * 1024)
        self._receive_protocol_data(self._head)
        self._idle_timer = self._loop.call_later(IDLE_TIMEOUT, self._check_idle)

    def data_received(self, data: bytes) -> None:
        self._last_received = self._loop.time()
        self._traffic.bytes_received += len(data)
        if self._traffic.timer is None:
            self._traffic.changed()
        for frame, is_protocol_data in self._reader.feed(data):
            message = self._receive_protocol_data(frame) if is_protocol_data else frame
            if message is not None and self._protocol.state is State.OPEN and (self._open or self._opened()):
                self._receiver.connection_data(self, message)

    def _receive_protocol_data(self, data: bytes) -> bytes | None:
        """Handles everything except messages in one frame: the handshake, control frames, fragments and errors. Returns
        the message of which ``data`` is the last fragment."""
        message = None
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Request):
                self._protocol.send_response(self._proven(self._respond(event)))
                self._flush()
                if self._applicant is None:
                    self._admission.connection_refused()
                elif not self._applicant.takes_over:
                    self._opened()
            elif isinstance(event, Frame) and event.opcode in DATA_OPCODES:
                if event.opcode is Opcode.TEXT:
                    self.close(CloseCode.UNSUPPORTED_DATA, "text messages are not supported")
                    return None
                self._fragments += event.data  # the client sends whole messages; a proxy may fragment them
                if event.fin:
                    message, self._fragments = bytes(self._fragments), bytearray()
        self._flush()
        return message

    def _respond(self, request: Request) -> Response:
        response = self._protocol.accept(request)
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            return response
        applicant = Applicant.of(request.headers)
        refusal = self._admission.claim(applicant)
        if refusal is None:
            self._applicant = applicant
            return response
        body = {"error": refusal.reason, "kind": refusal.kind, "reason": refusal.reason, "output": ""}
        return self._protocol.reject(HTTPStatus.GONE, json.dumps(body))

    def _proven(self, response: Response) -> Response:
        if self._proof_key:
            proof = Prover(self._proof_key).prove(self._gateway, response.status_code, bytes(response.body or b""))
            response.headers[PROOF_HEADER] = proof
        return response

    def _opened(self) -> bool:
        """Opens the connection, unless another process has taken over the session since the handshake."""
        applicant, self._applicant = self._applicant, None
        if applicant is None:
            return False
        refusal = self._admission.admit(applicant)
        if refusal is not None:
            self._admission.connection_refused()
            self.close(CloseCode.GOING_AWAY, refusal.reason)
            return False
        self._open = True
        self._receiver.connection_opened(self)
        return True

    def _flush(self) -> None:
        assert self._transport is not None
        for chunk in self._protocol.data_to_send():
            if chunk:
                self._transport.write(chunk)
            else:
                self._transport.close()

    def resume_writing(self) -> None:
        if self._open:
            self._receiver.connection_writable(self)

    def eof_received(self) -> None:
        # So does a gateway that forwards end. By a port-forward, its client gets this a second before the end itself.
        self.close(CloseCode.GOING_AWAY, "the connection to the client has ended")
        self._protocol.receive_eof()

    def connection_lost(self, error: Exception | None) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if error is not None:
            self._reason = str(error)
        elif self._protocol.handshake_exc is not None:
            self._reason = str(self._protocol.handshake_exc)
        if self._open:
            self._open = False
            self._receiver.connection_closed(self, self._reason)
        elif self._applicant is not None:
            self._admission.connection_refused()

    def _check_idle(self) -> None:
        idle = self.silence
        if idle >= IDLE_TIMEOUT and self._transport is not None:
            self._reason = f"no data received for {idle:.0f} s"
            self._transport.abort()
            return
        self._idle_timer = self._loop.call_later(IDLE_TIMEOUT - idle, self._check_idle)


class ClientLink:
    """What the engine sends to the client and receives from it. All methods run on the event loop.

    ``received``, which the engine sets, is called with each message, ``connection_changed`` with whether a client is
    connected, and ``violated`` with the reason if no connection can resume the session. While ``limiting``, which the
    engine sets too, ``flushed`` is called when less may wait to be sent than before. Once the session is detached,
    ``keep`` is asked whether it sends a message itself.
    ``refuse`` says whether the content of a large message is dropped (``wire.Session``).
    ``silence`` is for how many seconds the client had been silent when its last connection ended, and ``run`` is that
    whose secret has opened the last one.
    """

    def __init__(
        self,
        traffic: EngineMetrics,
        *,
        connection_changed: Callable[[bool], object],
        flushed: Callable[[], None],
        violated: Callable[[str], object],
        refuse: Callable[[int, int], str],
    ) -> None:
        self._refuse = refuse
        self.session = Session(Role.GATEWAY, refuse=refuse)
        self.traffic = traffic
        self.silence = 0.0
        self.run = ""
        self.received: Callable[[MessageReceived], object]
        self.keep: Callable[[Header, Sequence[Any], int], bool] | None = None
        self.limiting = False
        self._connection_changed = connection_changed
        self._flushed, self._violated = flushed, violated
        self._loop = asyncio.get_running_loop()
        self._connection: ClientConnection | None = None
        self._pump: Pump | None = None
        self._flush: asyncio.Handle | None = None  # the next one, if it is scheduled

    def connected(self) -> bool:
        return self._connection is not None

    def queued(self) -> int:
        """The bytes that wait to be sent."""
        return self.session.queued_bytes

    def queued_on(self, stream: int) -> int:
        """The bytes of one stream that wait to be sent."""
        return self.session.queued_on(stream)

    def send(self, header: Header, buffers: Sequence[Any] = (), *, stream: int = CONTROL_STREAM) -> None:
        """Sends a message to the client, in order within its stream."""
        if self.keep is None or not self.keep(header, buffers, stream):
            self.session.send(header, buffers, stream=stream)
            self.flush_soon()

    def post(self, header: Header, buffers: Sequence[Any] = (), *, stream: int = CONTROL_STREAM) -> None:
        """Sends a message past ``keep``."""
        self.session.send(header, buffers, stream=stream)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Sends everything that becomes ready in this turn of the event loop as one websocket message."""
        if self._flush is None:
            self._flush = self._loop.call_soon(self.flush)

    def flush(self) -> None:
        if self._flush is not None:
            self._flush.cancel()  # which does nothing if this is it
            self._flush = None
        if self._pump is not None:
            self._pump.flush()
        if self.limiting:
            self._flushed()

    def replace_session(self) -> None:
        """Ends the wire session with the previous holder, and begins one with the next."""
        self._close("another process has taken over this session")
        self.session = Session(Role.GATEWAY, refuse=self._refuse)

    # --- what connections report

    def connection_opened(self, connection: ClientConnection) -> None:
        if self.session.failure is not None:
            connection.close(CloseCode.PROTOCOL_ERROR, str(self.session.failure))
            return
        self._close("another connection has taken over this session")
        self._connection, self.run = connection, connection.run
        self.session.connection_made()
        self._pump = Pump(self.session, connection, flushed=self._drained)
        self._pump.flush()
        self._connection_changed(True)

    def connection_data(self, connection: ClientConnection, data: bytes | bytearray | memoryview) -> None:
        if connection is not self._connection:
            return
        try:
            events = self.session.receive_data(data)
        except WireError as error:
            log.warning("closing the connection: %s", error)
            connection.close(CloseCode.PROTOCOL_ERROR, str(error))
            self._disconnected()
            if not error.resumable:
                self._violated(f"the client violated the protocol: {error}")
            return
        for event in events:
            if isinstance(event, MessageReceived):
                self.received(event)
        self.flush_soon()

    def connection_writable(self, connection: ClientConnection) -> None:
        if connection is self._connection and self._pump is not None:
            self._pump.flush()
            self._drained()

    def _drained(self) -> None:
        if self.limiting:
            self._flushed()

    def connection_closed(self, connection: ClientConnection, reason: str) -> None:
        if connection is self._connection:
            log.debug("connection closed: %s", reason)
            self._disconnected()

    def _close(self, reason: str) -> None:
        if self._connection is not None:
            self._connection.close(CloseCode.GOING_AWAY, reason)
            self._disconnected()

    def _disconnected(self) -> None:
        if self._pump is not None:
            self._pump.close()
        if self._connection is not None:
            self.silence = self._connection.silence
        self._connection = self._pump = None
        self.session.connection_lost()
        self._connection_changed(False)


async def serve_connection(
    admission: Admitter, receiver: ClientLink, accepted: socket.socket, head: bytes, **facts: str
) -> ClientConnection:
    """Serves the websocket on the socket ``accepted``, whose first bytes, the HTTP request, are ``head``. ``facts``:
    ClientConnection's ``gateway`` and ``proof_key``, so that the client knows whose response it gets, and ``run``."""
    _, connection = await asyncio.get_running_loop().connect_accepted_socket(
        lambda: ClientConnection(admission, receiver, head, **facts), accepted
    )
    return connection
