"""The events that ``Session.receive_data`` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .framing.fragments import Fragments
from .framing.frames import Hello
from .messages import Header


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
