"""The audit log: one event for each session, job and refusal, with the caller and its address.

``caller`` is the authenticated identity; null if there is none. ``address`` is the peer of the connection: behind an
ingress that is the ingress, and ``forwarded_for`` is what it, or the caller, claims in ``X-Forwarded-For``.
"""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

import structlog

from meshgate_gateway.http.messages import Request

log = structlog.get_logger()

Action: TypeAlias = Literal["session", "describe job", "start job", "find job", "end job", "forward"]

Outcome: TypeAlias = Literal["allowed", "refused"]

audited: Counter[tuple[Action, Outcome]] = Counter()
"""How many events of each kind this process has logged."""
MAX_CLAIM = 200  # characters


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from."""

    address: str
    forwarded_for: str | None = None


def origin_of(request: Request, connection: socket.socket) -> Origin:
    """Raises MalformedRequest if X-Forwarded-For is repeated."""
    forwarded = request.header("X-Forwarded-For")
    return Origin(_address(connection), forwarded[:MAX_CLAIM] if forwarded else None)


def _address(connection: socket.socket) -> str:
    try:
        peer = connection.getpeername()
    except OSError as error:  # it has disconnected
        return f"unknown ({error.strerror})"
    return str(peer[0]) if peer and isinstance(peer, tuple) else "this machine"


def audit(action: Action, origin: Origin, *, caller: str | None, refused: str | None = None, **facts: object) -> None:
    """Logs that ``caller`` was allowed ``action``, or why it was ``refused``."""
    facts = {"action": action, "caller": caller, "address": origin.address} | facts
    if origin.forwarded_for is not None:
        facts["forwarded_for"] = origin.forwarded_for
    audited[action, "allowed" if refused is None else "refused"] += 1
    if refused is None:
        log.info("audit", outcome="allowed", **facts)
    else:
        log.warning("audit", outcome="refused", reason=refused, **facts)
