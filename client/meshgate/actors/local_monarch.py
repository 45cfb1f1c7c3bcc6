"""Keeps Monarch's functions on the driver from starting a Monarch of the laptop's own while a session is open.

``this_host()``, ``this_proc()``, ``context()``, ``get_or_spawn_controller()`` and ``Channel.open()`` of
``monarch.actor`` start one when they are first called outside an actor, and so do RDMA buffers and functions marked
with ``@monarch.remote``. What they return cannot reach the job, so the program would hang or run on the laptop. A
program that wants both calls ``monarch.actor.context()`` before it opens a session.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from meshgate.errors import InvalidRequestError
from meshgate.monarch_classes import monarch_api
from meshgate.shapes.shape import Extent, Point

_NO_MONARCH = "would start a Monarch on this machine, which cannot reach the job."
_BOTH = "To run Monarch on this machine as well, call monarch.actor.context() before the first job.state()"
_REFUSED = (
    "this_host(), this_proc(), context(), Channel and get_or_spawn_controller() of monarch.actor, and functions marked "
    f"with @monarch.remote, {_NO_MONARCH} Import Channel and get_or_spawn_controller from meshgate, take hosts from "
    f"job.state(), and run torch in actors. {_BOTH}"
)
_REFUSED_RDMA = (
    f"an RDMABuffer or RDMAAction of the program {_NO_MONARCH} Create it in an endpoint, from memory of the actor. The "
    "endpoint can return a buffer, which the program passes to other actors; procs.put() brings data of the program's "
    f"own to them. {_BOTH}"
)
_REFUSED_TENSORS = (
    "functions marked with @monarch.remote, fetch_shard(), inspect() and show() need distributed tensors, which do not "
    "work through a gateway, because each torch operation is a message: run torch in an actor, and return from its "
    "endpoint what they would fetch. Or submit the program to the job, and use meshgate.native_hosts() in it"
)
_guarded = False
_allowed = False


def allow_local_monarch() -> None:
    """From now on nothing is refused: this program runs beside the workers, which its Monarch can reach."""
    global _allowed  # noqa: PLW0603 - Monarch's client is one per process too
    _allowed = True


def refuse_local_monarch(session_open: Callable[[], bool]) -> None:
    """Makes these functions raise ``InvalidRequestError`` while ``session_open()``. Does nothing without torchmonarch.

    A Monarch that runs in this process already stays usable, except for its distributed tensors without an active mesh.
    """
    _refuse_tensors(session_open)
    global _guarded  # noqa: PLW0603 - Monarch's client is one per process too
    lazy: Any = getattr(sys.modules.get("monarch._src.actor.actor_mesh"), "_client_context", None)
    if lazy is None or _guarded:
        return
    start = lazy._init

    def start_unless_refused() -> Any:
        if session_open() and not _allowed:
            raise InvalidRequestError(_REFUSED_RDMA if _called_by("monarch._src.rdma.rdma") else _REFUSED)
        return start()

    lazy._init = start_unless_refused
    _guarded = True


def _called_by(module: str) -> bool:
    """Whether the call of Monarch's that is under way passed through ``module``."""
    frame: Any = sys._getframe(1)
    while frame is not None and (name := frame.f_globals.get("__name__", "")).startswith(("monarch.", __name__)):
        if name == module:
            return True
        frame = frame.f_back
    return False


def _refuse_tensors(session_open: Callable[[], bool]) -> None:
    """Without an active mesh, Monarch's own errors ask for one, or are an ``AssertionError`` without a text.

    Programs import the functions before they open a session. A later import keeps these errors.
    """
    checker: Any = getattr(sys.modules.get("monarch.common.tensor"), "InputChecker", None)
    check = getattr(checker, "check_mesh_stream_local", None)
    if check is None or check.__module__ == __name__:
        return

    def check_unless_refused(self: Any, ambient_mesh: Any, stream: Any) -> Any:
        if (
            ambient_mesh is None
            and session_open()
            and not _allowed
            and not any(hasattr(each, "mesh") for each in self.tensors)
        ):
            raise InvalidRequestError(_REFUSED_TENSORS)
        return check(self, ambient_mesh, stream)

    checker.check_mesh_stream_local = check_unless_refused


def equal_from_both_sides() -> None:
    """Extends the comparison of Monarch's ``Point`` and ``Extent``, which find every other object unequal.

    Does nothing if nothing has imported ``monarch.actor``, or if it was called before.
    """
    for name, ours in (("Point", Point), ("Extent", Extent)):
        theirs: Any = monarch_api().get(name)
        if theirs is not None and not isinstance(theirs.__eq__, _Equal):
            theirs.__eq__ = _Equal(theirs.__eq__, ours)


class _Equal:
    """The ``__eq__`` of Monarch's class: ``original``, except for objects of ``ours``."""

    def __init__(self, original: Any, ours: type) -> None:
        self._original, self._ours = original, ours

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        return lambda other: other == instance if isinstance(other, self._ours) else self._original(instance, other)
