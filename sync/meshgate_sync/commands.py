"""What a relay asks of the program around it: the only way its decisions reach the world.

Each command that does something says which method of ``Relay`` tells the outcome. Commands are carried out in order;
those about the store (Begin, Keep, Load, Finish, Describe, Forget) one after the other.

Imports nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass

from .frames import Message, Offer

__all__ = [
    "Ask", "Begin", "Command", "Connect", "Describe", "Disconnect", "Finish", "Forget", "Keep", "Link", "Load",
    "Report", "ReportTrouble", "Reserve", "Send",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Link:
    """One end of a connection: to the parent ``peer`` (``up``), or from the child ``peer``."""

    peer: str
    up: bool


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a connection to a parent: ``connected``, or ``lost``."""

    peer: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close it. ``lost`` need not be called."""

    link: Link


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message: ``sent`` when a piece has left, or ``lost``."""

    link: Link
    message: Message


@dataclass(frozen=True, slots=True)
class Begin:
    """See what the store lacks of a version, its inline pieces taken in: ``begun``, ``base_unknown`` or ``failed``."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Keep:
    """Put a piece into the store: ``failed`` when that does not work."""

    digest: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class Load:
    """Read pieces for a child, at most about ``limit`` bytes of them: ``loaded``."""

    child: str
    root: bytes
    digests: tuple[bytes, ...]
    limit: int


@dataclass(frozen=True, slots=True)
class Finish:
    """All pieces are kept: make the version ready to run: ``finished``, ``damaged`` or ``failed``."""

    root: bytes
    base: bytes
    replaces: bytes


@dataclass(frozen=True, slots=True)
class Forget:
    """A version is no longer of use."""

    root: bytes


@dataclass(frozen=True, slots=True)
class Reserve:
    """Processes are about to be started from a version: keep it for them, and have a spare copy of it before the next
    one comes. ``failed`` when that cannot be noted."""

    root: bytes


@dataclass(frozen=True, slots=True)
class Describe:
    """Tell a version whole, for a child that does not hold its base: ``described``."""

    child: str
    root: bytes


@dataclass(frozen=True, slots=True)
class Ask:
    """At the gateway: get pieces from the laptop: ``supplied``, one by one."""

    root: bytes
    digests: tuple[bytes, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """At the gateway: these hosts are ready, or cannot be."""

    root: bytes
    ready: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ReportTrouble:
    """At the gateway: what each of these hosts cannot reach and why, or "" when that is over."""

    hosts: tuple[tuple[str, str], ...]


Command = (
    Connect
    | Disconnect
    | Send
    | Begin
    | Keep
    | Load
    | Finish
    | Forget
    | Describe
    | Ask
    | Report
    | ReportTrouble
    | Reserve
)
