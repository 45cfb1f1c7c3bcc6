"""Moves what a session has to say into a transport, and no more than the transport can take.

What is in the transport's buffer cannot be overtaken, so the pump keeps that buffer shallow: a small message that
comes up during a large transfer waits for ``high_water`` bytes and a chunk, not for the transfer. The pump
also sends acknowledgements that no other traffic carries. No I/O and no clock of its own: both are the transport's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .limits import KIB
from .session import Session

__all__ = ["Pump", "Timer", "Transport"]

ACK_DELAY = 0.05
TURN = 512 * KIB


class Timer(Protocol):
    def cancel(self) -> object: ...


class Transport(Protocol):
    """What the pump needs of a websocket and a loop."""

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Sends ``pieces``, joined, as one binary message.

        Never blocks, and takes over what it cannot send yet. A dead connection is told by its end, not here.
        """

    def buffered(self) -> int:
        """Bytes written that the operating system has not taken."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        """Calls ``callback`` from the loop after ``delay`` seconds."""


class Pump:
    """For one connection: between ``session.connection_made()`` and ``close()``.

    Call ``flush`` (at once) or ``flush_soon`` (with whatever else comes up in this turn of the loop, in one
    message) after ``session.send``, ``session.consume`` and ``session.receive_data``; ``writable`` when the
    transport's buffer has drained after it held more than ``high_water`` bytes. ``flushed`` is called after each
    flush that a timer made: the owner does not see those, and less may wait now.
    """

    __slots__ = (
        "_ack_delay", "_ack_timer", "_closed", "_flushed", "_flushing", "_high_water", "_session", "_soon",
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
        self._soon: Timer | None = None
        self._flushing = False
        self._closed = False

    def flush(self) -> None:
        """Writes until the session has nothing to send now or more than ``high_water`` bytes are in the transport.

        Where the peer takes it all at once it goes on in the next turn of the loop after ``TURN`` bytes: other
        things are due as well.
        """
        if self._flushing or self._closed:
            return  # write() may tell that the transport is writable: the loop below goes on
        self._flushing = True
        written = 0
        try:
            while self._transport.buffered() <= self._high_water:
                if written >= TURN:
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
        """``flush`` in the next turn of the loop."""
        if self._soon is None and not self._closed:
            self._soon = self._transport.call_later(0, self._flush_now)

    def writable(self) -> None:
        """The transport's buffer is below its own low water mark."""
        self.flush()

    def close(self) -> None:
        """Cancels the timers; nothing is written from here on."""
        self._closed = True
        for timer in (self._ack_timer, self._soon):
            if timer is not None:
                timer.cancel()
        self._ack_timer = self._soon = None

    def _flush_now(self) -> None:
        self._soon = None
        self.flush()
        self._flushed()

    def _acknowledge(self) -> None:
        # The timer is not cancelled when an acknowledgement travels with other traffic, which is the usual
        # case: there is one timer in 50 ms, not one a message.
        self._ack_timer = None
        self._session.acknowledge()
        self.flush()
        self._flushed()
