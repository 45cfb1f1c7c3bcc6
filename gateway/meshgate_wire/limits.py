"""How much one side accepts, keeps and sends at a time.

The limits on what a side accepts travel in its Hello and hold for the whole session. Each has a least value
(``LEAST``) that every peer may count on, so that a client need not wait for the gateway's Hello before it
sends its first small messages. The rest are a side's own affair.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["KIB", "LEAST", "LEAST_CHUNK", "LEAST_WINDOW", "MIB", "Limits"]

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

LEAST_WINDOW = 256 * KIB
LEAST_CHUNK = KIB  # a frame that is not the last of its message carries at least this

# The most that a peer may send in one go before it has read this side's Hello.
LEAST = {
    "window": LEAST_WINDOW,
    "max_websocket_message": 512 * KIB,
    "max_frame": 64 * KIB,
    "max_header": 64 * KIB,
    "max_buffers": 8 * KIB,
    "max_message": 64 * KIB,
    "max_partial_messages": 1,
    "max_partial_bytes": 64 * KIB,
}
MOST_WINDOW = 2**31 - 1  # a grant is a u32


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes. Raises ``ValueError`` where they contradict each other or undercut ``LEAST``."""

    # What this side accepts, told to the peer:
    window: int = 8 * MIB  # per stream: sent and not yet granted again
    max_websocket_message: int = 4 * MIB
    max_frame: int = MIB  # the payload of one frame
    max_header: int = MIB  # the JSON of one message
    max_buffers: int = 64 * KIB  # buffers beside one header
    max_message: int = 4 * GIB  # header and buffers of one message
    max_partial_messages: int = 64  # messages that have begun and not ended, over all streams
    max_partial_bytes: int = 8 * GIB  # their announced sizes, added up

    # What this side does, its own affair:
    chunk: int = 256 * KIB  # payload of one frame of a large message
    small_message: int = 64 * KIB  # up to here a message is one frame, copied when it is queued
    max_unacknowledged: int = 64 * MIB  # sending pauses while more than this awaits acknowledgement
    ack_after: int = 256 * KIB  # received bytes after which an acknowledgement is sent at once
    max_tracked_streams: int = 256 * KIB  # streams with a window that is not wholly open

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"Limits.{name} is {getattr(self, name)}, every peer may count on {least}")
        if self.window > MOST_WINDOW:
            raise ValueError(f"Limits.window is {self.window}, the most is {MOST_WINDOW}")
        if self.max_websocket_message < self.max_frame + KIB:
            raise ValueError(f"Limits.max_websocket_message must exceed max_frame ({self.max_frame}) by {KIB}")
        if self.max_partial_bytes < self.max_message:
            raise ValueError("Limits.max_partial_bytes must hold one message of max_message")
        if not LEAST_CHUNK <= self.chunk <= MIB * 64:
            raise ValueError(f"Limits.chunk is {self.chunk}, it must be at least {LEAST_CHUNK} and at most 64 MiB")
        if not 0 <= self.small_message <= LEAST_WINDOW // 4:
            # A message that goes as one frame needs credit for all of it, and a receiver may keep back a
            # quarter of the window before it grants again.
            raise ValueError(f"Limits.small_message is {self.small_message}, the most is {LEAST_WINDOW // 4}")
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"Limits.{field.name} is negative")
