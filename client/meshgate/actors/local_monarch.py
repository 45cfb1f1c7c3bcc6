"""Keeps Monarch's functions on the driver from starting a Monarch of the laptop's own while a session is open.

``this_host()``, ``this_proc()``, ``context()``, ``get_or_spawn_controller()`` and ``Channel.open()`` of
``monarch.actor`` start one when they are first called outside an actor. What they return cannot reach the job, so the
program would hang or run on the laptop. A program that wants both calls ``monarch.actor.context()`` before it opens a
session.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from meshgate.errors import InvalidRequestError

__all__ = ["refuse_local_monarch"]

_REFUSED = (
    "this_host(), this_proc(), context(), Channel and get_or_spawn_controller() of monarch.actor would start a Monarch "
    "on this machine, which cannot reach the job. Import Channel and get_or_spawn_controller from meshgate, and take "
    "hosts from job.state(). To run Monarch on this machine as well, call monarch.actor.context() before the first "
    "job.state()"
)
_guarded = False


def refuse_local_monarch(session_open: Callable[[], bool]) -> None:
    """Makes these functions raise ``InvalidRequestError`` while ``session_open()``. Does nothing without torchmonarch.

    A Monarch that runs in this process already stays usable.
    """
    global _guarded  # noqa: PLW0603 - Monarch's client is one per process too
    lazy: Any = getattr(sys.modules.get("monarch._src.actor.actor_mesh"), "_client_context", None)
    if lazy is None or _guarded:
        return
    start = lazy._init

    def start_unless_refused() -> Any:
        if session_open():
            raise InvalidRequestError(_REFUSED)
        return start()

    lazy._init = start_unless_refused
    _guarded = True
