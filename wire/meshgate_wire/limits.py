"""How much one side accepts, keeps and sends at a time.

The limits on what a side accepts are part of its Hello and apply to the whole session. Each has a minimum
(``MIN_LIMITS``) that every peer may rely on, so that a client can send its first small messages without waiting for the
gateway's Hello. The other limits are local to a side.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

MIN_WINDOW = 256 * KIB
MIN_CHUNK = KIB  # a frame that is not the last of its message carries at least this

# What a peer may send before it has received this side's Hello.
MIN_LIMITS = {
    "window": MIN_WINDOW,
    "max_websocket_message": 512 * KIB,
    "max_frame": 64 * KIB,
    "max_header": 64 * KIB,
    "max_buffers": 8 * KIB,
    "max_message": 64 * KIB,
    "max_partial_messages": 1,
    "max_partial_bytes": 64 * KIB,
}
MAX_WINDOW = 2**31 - 1  # a grant is a u32


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes. Raises ``ValueError`` if they contradict each other or are below ``MIN_LIMITS``."""

    # What this side accepts; sent to the peer:
    window: int = 8 * MIB  # per stream: bytes that are sent and not granted again
    max_websocket_message: int = 4 * MIB
    max_frame: int = MIB  # the payload of one frame
    max_header: int = MIB  # the JSON of one message
    max_buffers: int = 64 * KIB  # the number of buffers of one message
    max_message: int = 4 * GIB  # header and buffers of one message
    max_partial_messages: int = 64  # messages received in part, over all streams
    max_partial_bytes: int = 8 * GIB  # the sum of their announced sizes

    # What this side does; local:
    chunk: int = 256 * KIB  # payload of one frame of a large message
    small_message: int = 64 * KIB  # up to this size a message is one frame, copied when it is queued
    max_unacknowledged: int = 64 * MIB  # sending pauses while more than this is unacknowledged
    ack_after: int = 256 * KIB  # received bytes after which an acknowledgement is sent immediately
    max_tracked_streams: int = 256 * KIB  # streams whose window is not fully open

    def __post_init__(self) -> None:
        for name, minimum in MIN_LIMITS.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"Limits.{name} is {getattr(self, name)}, but every peer relies on at least {minimum}")
        if self.window > MAX_WINDOW:
            raise ValueError(f"Limits.window is {self.window}, but must be at most {MAX_WINDOW}")
        if self.max_websocket_message < self.max_frame + KIB:
            raise ValueError(f"Limits.max_websocket_message must exceed max_frame ({self.max_frame}) by {KIB}")
        if self.max_partial_bytes < self.max_message:
            raise ValueError("Limits.max_partial_bytes must be at least Limits.max_message")
        if not MIN_CHUNK <= self.chunk <= MIB * 64:
            raise ValueError(f"Limits.chunk is {self.chunk}, but must be at least {MIN_CHUNK} and at most 64 MiB")
        if not 0 <= self.small_message <= MIN_WINDOW // 4:
            # A message in one frame needs credit for all of it, and a receiver may withhold a quarter of the window
            # before it sends a grant.
            raise ValueError(f"Limits.small_message is {self.small_message}, but must be at most {MIN_WINDOW // 4}")
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"Limits.{field.name} must not be negative")
