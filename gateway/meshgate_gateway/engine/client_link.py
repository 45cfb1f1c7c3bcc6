"""The wire session with the client, over one connection after another.

The session outlives its connections. A takeover replaces it: the next holder of a detached session begins a new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from websockets.frames import CloseCode

from meshgate_gateway.engine.client_connection import ClientConnection, Traffic
from meshgate_gateway.engine.interfaces import CONTROL_STREAM
from meshgate_wire import MessageReceived, Pump, Role, Session, WireError
from meshgate_wire.messages import Header

log = logging.getLogger(__name__)


class ClientLink:
    """What the engine sends to the client and receives from it. All methods run on the event loop.

    ``received``, which the engine sets, is called with each message, ``connection_changed`` with whether a client is
    connected, ``flushed`` when less may wait to be sent than before, and ``violated`` with the reason if no connection
    can resume the session.
    ``refuse`` says whether the content of a large message is dropped (``wire.Session``).
    ``silence`` is for how many seconds the client had been silent when its last connection ended.
    """

    def __init__(
        self,
        traffic: Traffic,
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
        self.received: Callable[[MessageReceived], object]
        self._connection_changed = connection_changed
        self._flushed, self._violated = flushed, violated
        self._loop = asyncio.get_running_loop()
        self._connection: ClientConnection | None = None
        self._pump: Pump | None = None
        self._flush_scheduled = False

    def connected(self) -> bool:
        return self._connection is not None

    def queued(self) -> int:
        """The bytes that wait to be sent."""
        return self.session.queued_bytes

    def queued_on(self, stream: int) -> int:
        """The bytes of one stream that wait to be sent."""
        return self.session.queued_on(stream)

    def send(self, header: Header, buffers: Sequence[Any] = (), *, stream: int = CONTROL_STREAM) -> None:
        self.session.send(header, buffers, stream=stream)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Sends everything that becomes ready in this turn of the event loop as one websocket message."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self._flush_scheduled = False
        if self._pump is not None:
            self._pump.flush()
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
        self._connection = connection
        self.session.connection_made()
        self._pump = Pump(self.session, connection, flushed=self._flushed)
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
            self._pump.writable()
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
