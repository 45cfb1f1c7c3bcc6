"""The commands of a relay to the program that runs it: the only way its decisions take effect.

Each command names the method that reports its result, of ``Relay`` or of ``Relay.versions``. Commands are executed in
order; those for the store (Prepare, StorePiece, ReadPieces, Finish, BuildFullDelta, Forget, HoldSnapshot) one after the
other.

Imports nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass

from .frames import Message, Offer


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A connection to another relay: to the parent ``peer`` if ``up``, else from the child ``peer``."""

    peer: str
    up: bool


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a connection to a parent. Result: ``connected`` or ``lost``."""

    peer: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close a connection. ``lost`` need not be called."""

    link: PeerLink


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message. Result: ``sent`` when a piece has left, or ``lost``."""

    link: PeerLink
    message: Message


@dataclass(frozen=True, slots=True)
class Prepare:
    """Store the pieces that came with an offer and list those that the store lacks. Result: ``prepared``,
    ``base_unknown`` or ``failed``, with ``attempt``."""

    offer: Offer
    attempt: int


@dataclass(frozen=True, slots=True)
class StorePiece:
    """Result: ``store_failed`` if it fails."""

    digest: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class ReadPieces:
    """Read pieces for a child, at most about ``limit`` bytes. Result: ``pieces_read``."""

    child: str
    root: bytes
    digests: tuple[bytes, ...]
    limit: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Make the snapshot of a version whose pieces are all stored. Result: ``finished``, ``damaged`` or ``failed``, with
    ``attempt``."""

    root: bytes
    attempt: int
    base: bytes
    replaces: bytes


@dataclass(frozen=True, slots=True)
class Forget:
    """A version is withdrawn."""

    root: bytes


@dataclass(frozen=True, slots=True)
class HoldSnapshot:
    """Processes are about to be started from a version: keep its snapshot unchanged for them. Result: ``hold_failed``
    if it fails."""

    root: bytes


@dataclass(frozen=True, slots=True)
class BuildFullDelta:
    """Describe a version in full, for a child that does not have its base. Result: ``full_delta_built``."""

    child: str
    root: bytes


@dataclass(frozen=True, slots=True)
class RequestPieces:
    """At the gateway: request pieces from the client. Result: ``supplied``, for each."""

    root: bytes
    digests: tuple[bytes, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReportStatus:
    """At the gateway: these hosts are ready, or cannot get the version (host, reason)."""

    root: bytes
    ready: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ReportUnreachable:
    """At the gateway: what each of these hosts cannot reach and why, or "" if it can again."""

    hosts: tuple[tuple[str, str], ...]


Command = (
    Connect
    | Disconnect
    | Send
    | Prepare
    | StorePiece
    | ReadPieces
    | Finish
    | Forget
    | HoldSnapshot
    | BuildFullDelta
    | RequestPieces
    | ReportStatus
    | ReportUnreachable
)
