"""The state and the statistics of a session."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class State(IntEnum):
    DETACHED = 0  # no connection
    OPENING = 1  # connected, but the peer's Hello has not been received
    ESTABLISHED = 2
    ENDED = 3  # this connection violated the protocol; a new one can continue the session
    FAILED = 4  # the session has ended


@dataclass(frozen=True, slots=True)
class Statistics:
    connections: int
    frames_sent: int  # without replays
    frames_acknowledged: int  # of the sent ones
    frames_replayed: int
    frames_received: int
    frames_dropped: int  # duplicates
    messages_sent: int
    messages_received: int
    queued_bytes: int
    unacknowledged_bytes: int
    unacknowledged_frames: int
    unfinished_messages: int
    unfinished_bytes: int  # received so far
    streams_sending: int
    streams_receiving: int
