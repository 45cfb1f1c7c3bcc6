"""Every error of the wire, named by the side at fault.

::

    WireError
    ├── ProtocolError        the peer violated the protocol
    │   └── LimitExceeded    the peer exceeded a limit of this side
    ├── VersionMismatch      the peer speaks another protocol version
    ├── SessionLost          one side no longer has the session that the other resumes
    ├── MessageTooLarge      the caller sent a message that exceeds a limit of the peer
    └── SessionEnded         the caller used a session or a connection that has ended

``resumable`` says what has ended. True: this connection only; a new one continues the session and nothing is lost.
False: the session, since a replay would cause the same error.
"""

from __future__ import annotations


class WireError(Exception):
    """Base of all errors of this package."""

    resumable = False


class ProtocolError(WireError):
    """The peer violated the protocol. The message says what was received and what was expected."""

    def __init__(self, message: str, *, resumable: bool = False) -> None:
        super().__init__(message)
        self.resumable = resumable


class LimitExceeded(ProtocolError):
    """The peer sent, or announced, more than a limit of this side allows; no memory was allocated for it."""

    def __init__(self, what: str, value: int, limit: int, *, resumable: bool = False) -> None:
        super().__init__(
            f"the peer sent {value} {what}, but this side's limit is {limit}: send less or raise the limit",
            resumable=resumable,
        )
        self.what = what
        self.value = value
        self.limit = limit


class VersionMismatch(WireError):
    """The sides speak different protocol versions; ``upgrade`` names the side with the older one."""

    def __init__(
        self, *, ours: int, our_software: str, our_role: str, theirs: int, their_software: str, their_role: str
    ) -> None:
        self.ours = ours
        self.theirs = theirs
        self.our_software = our_software
        self.their_software = their_software
        self.upgrade = our_role if ours < theirs else their_role
        ahead = their_software if ours < theirs else our_software
        super().__init__(
            f"the {our_role} (meshgate {our_software}) speaks protocol {ours}, "
            f"the {their_role} (meshgate {their_software}) speaks protocol {theirs}: "
            f"upgrade the {self.upgrade} to meshgate {ahead} or later"
        )


class SessionLost(WireError):
    """The sides do not have the same session, so resuming it would lose or repeat messages."""


class MessageTooLarge(WireError):
    """A message exceeds a limit of the peer. It was not queued, and the session continues."""

    def __init__(self, what: str, value: int, limit: int) -> None:
        super().__init__(f"cannot send a message with {value} {what}: the peer's limit is {limit}. Split the message")
        self.what = what
        self.value = value
        self.limit = limit


class SessionEnded(WireError):
    """The session has failed, or has no connection to receive data on."""
