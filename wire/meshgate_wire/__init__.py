"""The wire protocol: messages, framing and resumable sessions.

Sans-IO: bytes in, events and bytes out. Nothing here opens a socket, reads a clock or imports other parts of meshgate.

The names below are imported when they are first used: the gateway's server needs a few of the modules only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .errors import (
        LimitExceeded,
        MessageTooLarge,
        ProtocolError,
        SessionEnded,
        SessionLost,
        VersionMismatch,
        WireError,
    )
    from .fragments import Buffer, Fragments, FragmentsFile, Sendable
    from .frames import Hello, PeerLimits
    from .handshake import PROTOCOL_VERSION, SOFTWARE_VERSION, Role
    from .limits import Limits
    from .messages import Header
    from .session import Established, Event, MessageReceived, Session, State, Statistics
    from .websocket import Pump, Timer, Transport

__all__ = [
    "Buffer", "Established", "Event", "Fragments", "FragmentsFile", "Header", "Hello", "LimitExceeded", "Limits",
    "MessageReceived", "MessageTooLarge", "PeerLimits", "ProtocolError", "PROTOCOL_VERSION", "Pump", "Role", "Sendable",
    "Session", "SessionEnded", "SessionLost", "SOFTWARE_VERSION", "State", "Statistics", "Timer", "Transport",
    "VersionMismatch", "WireError",
]  # fmt: skip

_HOMES = {
    ".errors": "LimitExceeded MessageTooLarge ProtocolError SessionEnded SessionLost VersionMismatch WireError",
    ".fragments": "Buffer Fragments FragmentsFile Sendable",
    ".frames": "Hello PeerLimits",
    ".handshake": "PROTOCOL_VERSION SOFTWARE_VERSION Role",
    ".limits": "Limits",
    ".messages": "Header",
    ".session": "Established Event MessageReceived Session State Statistics",
    ".websocket": "Pump Timer Transport",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name], __name__), name)
    return value
