"""The wire protocol: messages, framing and resumable sessions.

Sans-IO: bytes in, events and bytes out. Nothing here opens a socket, reads a clock or imports other parts of meshgate.
"""

from __future__ import annotations

from .errors import (
    LimitExceeded,
    MessageTooLarge,
    ProtocolError,
    SessionEnded,
    SessionLost,
    VersionMismatch,
    WireError,
)
from .framing.fragments import Buffer, Fragments, FragmentsFile, Sendable
from .framing.frames import Hello, PeerLimits
from .handshake import PROTOCOL_VERSION, SOFTWARE_VERSION, Role
from .limits import Limits
from .messages import Header
from .session import Established, Event, MessageReceived, Session, State, Statistics
from .websocket import Pump, Timer, Transport

__all__ = [
    "Buffer",
    "Established",
    "Event",
    "Fragments",
    "FragmentsFile",
    "Header",
    "Hello",
    "LimitExceeded",
    "Limits",
    "MessageReceived",
    "MessageTooLarge",
    "PeerLimits",
    "ProtocolError",
    "PROTOCOL_VERSION",
    "Pump",
    "Role",
    "Sendable",
    "Session",
    "SessionEnded",
    "SessionLost",
    "SOFTWARE_VERSION",
    "State",
    "Statistics",
    "Timer",
    "Transport",
    "VersionMismatch",
    "WireError",
]
