"""Every interval and timeout of a relay, in one place.

Imports nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """All in seconds. ``LivenessAllowance`` extends those by which a parent is judged while this host is busy."""

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
