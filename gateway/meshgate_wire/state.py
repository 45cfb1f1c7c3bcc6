"""What a session says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["State", "Statistics"]


class State(IntEnum):
    DETACHED = 0  # no connection
    OPENING = 1  # connected, the peer's Hello has not come
    ESTABLISHED = 2
    ENDED = 3  # this connection has broken the protocol; a new one may continue
    FAILED = 4  # the session is over


@dataclass(frozen=True, slots=True)
class Statistics:
    connections: int
    frames_sent: int  # distinct ones
    frames_acknowledged: int  # of those
    frames_replayed: int
    frames_received: int
    frames_dropped: int  # received again
    messages_sent: int
    messages_received: int
    queued_bytes: int
    unacknowledged_bytes: int
    unacknowledged_frames: int
    unfinished_messages: int
    unfinished_bytes: int  # as far as they have come
    streams_sending: int
    streams_receiving: int
