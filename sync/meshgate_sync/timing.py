"""How long a relay waits for what: for parents to speak and to deliver, and for acknowledgements to gather.

Imports nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Timing"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds.

    A parent says something every ``heartbeat``, while it owes something every ``pulse``. One that has said nothing
    for ``hush`` while it owed pieces is asked no longer for those of a stripe, nor is one to which a connection has
    taken ``dial``. While the one that announces versions has said nothing for ``doubt``, acknowledgements go to the
    next as well; it is taken for dead after ``alert`` of silence within ``alert_for`` of an announcement, any parent
    after ``silence``.
    One that talks and owes pieces but has sent none for ``stall`` is left; one that waits itself (for a slow laptop,
    say) only after ``patience``, for there is nothing to be had elsewhere. A lane that would take ``lag`` longer than
    the others is split. A route that has failed to its end is begun anew after ``retry``; a host that failed is
    avoided for ``suspicion``. Acknowledgements are gathered for ``gather``.
    """

    heartbeat: float = 0.5
    pulse: float = 0.05
    hush: float = 0.25
    dial: float = 0.15
    doubt: float = 0.2
    alert: float = 0.8
    alert_for: float = 5.0
    silence: float = 2.0
    stall: float = 1.5
    patience: float = 60.0
    lag: float = 0.5
    retry: float = 0.5
    suspicion: float = 10.0
    gather: float = 0.002
