"""Every error of the wire, named by whose fault it is.

::

    WireError
    ├── ProtocolError        the peer said something that the protocol forbids
    │   └── LimitExceeded    the peer said more than this side allows
    ├── VersionMismatch      the peer speaks another protocol version
    ├── SessionLost          one side no longer has the session that the other resumes
    ├── MessageTooLarge      our own caller wants to send what the peer would refuse
    └── SessionEnded         our own caller uses a session, or a connection, that is over

``resumable`` tells what may follow. True: only this connection is over, a new one continues the session and
nothing is lost. False: the session itself is over, since replaying would meet the same error again.
"""

from __future__ import annotations

__all__ = [
    "LimitExceeded",
    "MessageTooLarge",
    "ProtocolError",
    "SessionEnded",
    "SessionLost",
    "VersionMismatch",
    "WireError",
]


class WireError(Exception):
    """The base of all errors that this package raises about what it is given."""

    resumable = False


class ProtocolError(WireError):
    """The peer broke the protocol. The message says what came and what was expected."""

    def __init__(self, message: str, *, resumable: bool = False) -> None:
        super().__init__(message)
        self.resumable = resumable


class LimitExceeded(ProtocolError):
    """The peer sent, or announced, more than this side's limit; nothing was allocated for it."""

    def __init__(self, what: str, value: int, limit: int, *, resumable: bool = False) -> None:
        super().__init__(
            f"the peer sent {what} of {value}, the limit here is {limit}: send less, or raise the limit here",
            resumable=resumable,
        )
        self.what = what
        self.value = value
        self.limit = limit


class VersionMismatch(WireError):
    """The two sides speak different protocol versions; ``upgrade`` names the side that is behind."""

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
    """The sides do not remember the same session, so it cannot go on without losing or repeating something."""


class MessageTooLarge(WireError):
    """A message that the peer's limits forbid; it was not queued and the session goes on."""

    def __init__(self, what: str, value: int, limit: int) -> None:
        super().__init__(f"a message with {what} of {value} cannot be sent, the peer allows {limit}: send it in parts")
        self.what = what
        self.value = value
        self.limit = limit


class SessionEnded(WireError):
    """The session has failed for good, or has no connection that could be read from."""
