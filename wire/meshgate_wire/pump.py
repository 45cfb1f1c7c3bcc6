"""Writes a session's data to a transport, no faster than the transport can send it.

Data in the transport's buffer cannot be overtaken, so the pump keeps that buffer small: a small message that is sent
during a large transfer waits for ``high_water`` bytes and a chunk, not for the transfer. The pump also sends
acknowledgements if no other traffic carries them. It has no I/O and no clock of its own; the transport provides both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .limits import KIB
from .session import Session

ACK_DELAY = 0.05
FLUSH_BYTES = 512 * KIB


class Timer(Protocol):
    def cancel(self) -> object: ...


class Transport(Protocol):
    """What the pump needs from a websocket and an event loop."""

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Sends ``pieces``, joined, as one binary message.

        Never blocks; buffers what cannot be sent yet. Does not report a broken connection.
        """

    def buffered(self) -> int:
        """The number of written bytes that the operating system has not accepted yet."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        """Calls ``callback`` on the event loop after ``delay`` seconds."""


class Pump:
    """Used for one connection, between ``session.connection_made()`` and ``close()``.

    After ``session.send``, ``session.consume`` and ``session.receive_data``, call ``flush`` to write immediately, or
    ``flush_soon`` to write in the next iteration of the event loop, in one message with whatever else is sent before.
    Call ``writable`` when the transport's buffer has drained after it held more than ``high_water`` bytes. ``flushed``
    is called after each flush by a timer, since the queue may be shorter then.
    """

    __slots__ = (
        "_ack_delay", "_ack_timer", "_closed", "_flush_timer", "_flushed", "_flushing", "_high_water", "_session",
        "_transport",
    )  # fmt: skip

    def __init__(
        self,
        session: Session,
        transport: Transport,
        *,
        flushed: Callable[[], None] = lambda: None,
        high_water: int = 256 * KIB,
        ack_delay: float = ACK_DELAY,
    ) -> None:
        self._session = session
        self._transport = transport
        self._flushed = flushed
        self._high_water = high_water
        self._ack_delay = ack_delay
        self._ack_timer: Timer | None = None
        self._flush_timer: Timer | None = None
        self._flushing = False
        self._closed = False

    def flush(self) -> None:
        """Writes until the session has no data to send or the transport holds more than ``high_water`` bytes.

        After ``FLUSH_BYTES`` it continues in the next iteration of the event loop, to let other callbacks run.
        """
        if self._flushing or self._closed:
            return  # write() may call writable(); the loop below continues anyway
        self._flushing = True
        written = 0
        try:
            while self._transport.buffered() <= self._high_water:
                if written >= FLUSH_BYTES:
                    self.flush_soon()
                    break
                pieces = self._session.data_to_send()
                if not pieces:
                    break
                self._transport.write(pieces)
                written += sum(map(len, pieces))
        finally:
            self._flushing = False
        if self._ack_timer is None and self._session.ack_due:
            self._ack_timer = self._transport.call_later(self._ack_delay, self._acknowledge)

    def flush_soon(self) -> None:
        """Calls ``flush`` in the next iteration of the event loop."""
        if self._flush_timer is None and not self._closed:
            self._flush_timer = self._transport.call_later(0, self._flush_now)

    def writable(self) -> None:
        """The transport's buffer has fallen below its low-water mark."""
        self.flush()

    def close(self) -> None:
        """Cancels the timers; nothing is written afterwards."""
        self._closed = True
        for timer in (self._ack_timer, self._flush_timer):
            if timer is not None:
                timer.cancel()
        self._ack_timer = self._flush_timer = None

    def _flush_now(self) -> None:
        self._flush_timer = None
        self.flush()
        self._flushed()

    def _acknowledge(self) -> None:
        # The timer is not cancelled when other traffic carries the acknowledgement, as it usually does, so that there
        # is one timer per 50 ms rather than one per message.
        self._ack_timer = None
        self._session.acknowledge()
        self.flush()
        self._flushed()
