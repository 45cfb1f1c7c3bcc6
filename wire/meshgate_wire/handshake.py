"""The handshake: the first message in each direction of a connection, the versions in it, and the checks on it.

A Hello has a side's protocol version and the number of the last frame that it received in this session. A connection is
established only between a client and a gateway that speak the same protocol and have the same session.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from enum import Enum

from .errors import ProtocolError, SessionLost, VersionMismatch
from .frames import Hello, PeerLimits, decode_hello, encode_hello
from .limits import Limits
from .outbox import Unacknowledged

PROTOCOL_VERSION = 3
SOFTWARE_VERSION = "0.1.0"
PYTHON_VERSION = platform.python_version()


@functools.cache
def monarch_version() -> str:
    """The version of the installed torchmonarch; empty if there is none."""
    try:
        return importlib.metadata.version("torchmonarch")
    except importlib.metadata.PackageNotFoundError:
        return ""


class Role(str, Enum):
    CLIENT = "client"
    GATEWAY = "gateway"

    @property
    def other(self) -> Role:
        return Role.GATEWAY if self is Role.CLIENT else Role.CLIENT


def make_hello(role: Role, software: str, limits: Limits, received: int) -> bytes:
    """This side's Hello, as a websocket message."""
    return encode_hello(
        Hello(
            protocol=PROTOCOL_VERSION,
            role=role.value,
            software=software,
            python=PYTHON_VERSION,
            monarch=monarch_version(),
            received=received,
            limits=PeerLimits.of(limits),
        )
    )


def accept_hello(data: bytes, role: Role, software: str, sent: Unacknowledged, previous: Hello | None) -> Hello:
    """Decodes and checks the peer's Hello.

    ``sent``: the frames that this side has sent. ``previous``: the peer's Hello on the last connection. Raises
    ``VersionMismatch``, ``SessionLost`` or ``ProtocolError``.
    """
    hello = decode_hello(data, protocol=PROTOCOL_VERSION)
    if not isinstance(hello, Hello):
        theirs, their_software, their_role = hello
        raise VersionMismatch(
            ours=PROTOCOL_VERSION, our_software=software, our_role=role.value,
            theirs=theirs, their_software=their_software, their_role=their_role,
        )  # fmt: skip
    if hello.role == role.value:
        raise ProtocolError(f"the peer is a {hello.role}, as is this side: connect a client to a gateway")
    if hello.received < sent.acknowledged:
        raise SessionLost(
            f"the {hello.role} has lost this session: it acknowledged frame {sent.acknowledged} earlier and "
            f"frame {hello.received} now; start a new session"
        )
    if hello.received > sent.last:
        raise SessionLost(
            f"the {role.value} has lost the session that the {hello.role} resumes: the {hello.role} received frame "
            f"{hello.received}, but the {role.value} has sent only {sent.last}; start a new session"
        )
    if previous is not None and hello.limits != previous.limits:
        raise ProtocolError(
            f"the {hello.role} changed its limits during the session; start a new session to change them"
        )
    return hello
