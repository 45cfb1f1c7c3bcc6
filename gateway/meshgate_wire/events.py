"""What ``Session.receive_data`` tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .fragments import Fragments
from .frames import Hello
from .messages import Header

__all__ = ["Established", "Event", "MessageReceived"]


@dataclass(frozen=True, slots=True)
class Established:
    """The peer's Hello has come and the session goes on. ``resumed``: an earlier connection had come this far."""

    peer: Hello
    resumed: bool


@dataclass(slots=True, eq=False)
class MessageReceived:
    """A whole message. ``held`` is the credit it keeps from its stream until ``Session.consume``."""

    header: Header
    buffers: tuple[Fragments, ...]
    stream: int
    nbytes: int  # as it travelled: header, lengths and buffers
    held: int = 0


Event: TypeAlias = "Established | MessageReceived"
