"""Between a relay and the program that runs it: the relay's commands, the only way its decisions take effect, and the
times that it keeps.

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


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Every interval and timeout of a relay, in seconds.

    ``LivenessAllowance`` extends those by which a parent is judged while this host is busy."""

    heartbeat_interval: float = 0.5
    """A parent that has sent a child nothing for so long sends a Heartbeat."""
    busy_heartbeat_interval: float = 0.05
    """The same while it owes the child pieces, and during ``alert_duration``."""
    stripe_silence_timeout: float = 0.25
    """Starts with the last message of a parent that owes pieces of a stripe; its pieces are requested elsewhere."""
    connect_timeout: float = 0.15
    """Starts with the dial of a parent of a stripe; its pieces are requested elsewhere."""
    backup_timeout: float = 0.2
    """Starts with the last message of the control parent, during an alert; acknowledgements go to the next one too."""
    alert_silence_timeout: float = 0.8
    """Starts with the last message of the control parent, during an alert; its connection is closed."""
    alert_duration: float = 5.0
    """Starts when a version is announced; for so long heartbeats are frequent and silence is noticed early."""
    silence_timeout: float = 2.0
    """Starts with the last message of any parent; its connection is closed."""
    stall_timeout: float = 1.5
    """Starts with the last piece of a parent that owes pieces; they are requested elsewhere."""
    starved_timeout: float = 60.0
    """The same for a parent that waits for pieces itself: no other parent has them either."""
    lag_timeout: float = 0.5
    """If one parent needs so much longer than twice the next slowest, half of its pieces are requested elsewhere."""
    retry_delay: float = 0.5
    """Starts when all parents of a route have failed; then the route starts again from its first parent."""
    suspect_timeout: float = 10.0
    """Starts when a parent fails; until it ends the parent is skipped."""
    ack_gather_timeout: float = 0.002
    """Starts with a report to the parent; later acknowledgements are gathered and reported together when it ends."""
    write_timeout: float = 10.0
    """Starts with the last piece that a child took while more are on their way to it; its connection is closed."""
