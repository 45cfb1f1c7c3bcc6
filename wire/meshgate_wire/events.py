"""What a session reports to its owner: the events that ``receive_data`` returns, its state and its statistics."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from .framing.fragments import Fragments
from .framing.frames import Hello
from .messages import Header


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


@dataclass(frozen=True, slots=True)
class Established:
    """The peer's Hello was received. ``resumed``: an earlier connection of this session was established too."""

    peer: Hello
    resumed: bool


@dataclass(slots=True, eq=False)
class MessageReceived:
    """A complete message. ``held`` is the credit that its stream lacks until ``Session.consume``."""

    header: Header
    buffers: tuple[Fragments, ...]
    stream: int
    nbytes: int  # on the wire: header, lengths and buffers
    held: int = 0
    refused: str = ""  # why this side did not keep its buffers


Event: TypeAlias = "Established | MessageReceived"
