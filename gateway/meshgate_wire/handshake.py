"""What the two sides say first on a connection, and whether they may go on from there.

A Hello says which protocol and which session's worth of frames a side knows. Two sides go on only if they
speak the same protocol, are a client and a gateway, and remember the same session.
"""

from __future__ import annotations

from enum import Enum

from .errors import ProtocolError, SessionLost, VersionMismatch
from .frames import Hello, PeerLimits, decode_hello, encode_hello
from .limits import Limits
from .retransmission import Unacknowledged
from .version import PROTOCOL_VERSION, PYTHON_VERSION

__all__ = ["Role", "greet", "read_greeting"]


class Role(str, Enum):
    CLIENT = "client"
    GATEWAY = "gateway"

    @property
    def other(self) -> Role:
        return Role.GATEWAY if self is Role.CLIENT else Role.CLIENT


def greet(role: Role, software: str, limits: Limits, received: int) -> bytes:
    """Our Hello, as a websocket message."""
    return encode_hello(
        Hello(
            protocol=PROTOCOL_VERSION,
            role=role.value,
            software=software,
            python=PYTHON_VERSION,
            received=received,
            limits=PeerLimits.of(limits),
        )
    )


def read_greeting(data: bytes, role: Role, software: str, sent: Unacknowledged, before: Hello | None) -> Hello:
    """The peer's Hello, one that this side can go on with.

    ``sent`` is what this side has told the peer so far, ``before`` the Hello of the last connection. Raises
    ``VersionMismatch``, ``SessionLost``, ``ProtocolError``.
    """
    hello = decode_hello(data, protocol=PROTOCOL_VERSION)
    if not isinstance(hello, Hello):
        theirs, their_software, their_role = hello
        raise VersionMismatch(
            ours=PROTOCOL_VERSION, our_software=software, our_role=role.value,
            theirs=theirs, their_software=their_software, their_role=their_role,
        )  # fmt: skip
    if hello.role == role.value:
        raise ProtocolError(f"both sides say that they are the {hello.role}: a client talks to a gateway")
    if hello.received < sent.acknowledged:
        raise SessionLost(
            f"the {hello.role} has lost this session: it had received frame {sent.acknowledged} of ours and now "
            f"knows of {hello.received}: start a new session"
        )
    if hello.received > sent.last:
        raise SessionLost(
            f"the {role.value} has lost the session that the {hello.role} resumes: that has received frame "
            f"{hello.received} of ours, we have sent {sent.last}: start a new session"
        )
    if before is not None and hello.limits != before.limits:
        raise ProtocolError(f"the {hello.role} changed its limits within the session: start a new one to change them")
    return hello
