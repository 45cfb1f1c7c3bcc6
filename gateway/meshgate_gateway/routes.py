"""What the gateway answers: health to anyone, the job and its sessions to who may.

Checks go from cheap to dear, and nothing is done for a stranger: the path, the protocol version (its mismatch is
no secret, and told before a token is asked for), the credentials, then the session.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import urlsplit

import structlog

from meshgate_gateway.auth import Authenticator, Identity
from meshgate_gateway.hosts import HostProvider
from meshgate_gateway.http import MalformedRequest, Request, Response
from meshgate_gateway.keeper import Keeper, Visit
from meshgate_gateway.sessions import Gone, Refuse
from meshgate_wire.version import PROTOCOL_VERSION, PYTHON_VERSION, SOFTWARE_VERSION

__all__ = ["Routes"]

log = structlog.get_logger()

SESSION_PATH = re.compile(r"/v1/sessions/([0-9a-f]{32})")


class Provisions(Protocol):
    """Answers what is below ``/v1/jobs``, where a gateway provisions for others."""

    async def answer(self, path: str, request: Request, connection: socket.socket) -> Response | None: ...


@dataclass(slots=True)
class Routes:
    """Answers one request each. ``draining``: why nobody is let in any more, None while they are."""

    authenticator: Authenticator
    keeper: Keeper
    hosts: HostProvider
    jobs: Provisions | None = None
    draining: str | None = None

    async def answer(self, request: Request, connection: socket.socket) -> Response | None:
        """The answer, or None when the connection was handed on. Raises MalformedRequest."""
        path = urlsplit(request.path).path
        if request.method not in ("GET", "HEAD"):
            reason = f"{request.method} is not answered here: GET only"
            return Response.error(HTTPStatus.METHOD_NOT_ALLOWED, reason, headers={"Allow": "GET, HEAD"})
        if session := SESSION_PATH.fullmatch(path):
            return await self._session(session[1], request, connection)
        if self.jobs is not None and (path == "/v1/jobs" or path.startswith("/v1/jobs/")):
            return await self.jobs.answer(path, request, connection)
        if path == "/v1/job":
            identity = await self._authenticate(request)
            return identity if isinstance(identity, Response) else self._job()
        if path in ("/healthz", "/readyz"):
            return self._health(path)
        return Response.error(HTTPStatus.NOT_FOUND, "this gateway serves /v1/sessions/<id> and /v1/job")

    def _health(self, path: str) -> Response:
        if path == "/readyz" and self.draining is not None:
            return _unavailable(self.draining)
        return Response(HTTPStatus.OK, {"status": "ok", "version": SOFTWARE_VERSION})

    async def _authenticate(self, request: Request) -> Identity | Response:
        checked = await self.authenticator.check(request)
        if isinstance(checked, Identity):
            return checked
        log.warning("refused", path=request.path, reason=checked.reason)
        return checked.answer()

    def _job(self) -> Response:
        python = PYTHON_VERSION.rpartition(".")[0]
        counts = self.keeper.statistics()
        return Response(
            HTTPStatus.OK,
            {
                "meshes": dict(self.hosts.meshes()),
                "version": SOFTWARE_VERSION,
                "python": python,
                "sessions": counts.sessions,
                "connected": counts.connected,
            },
        )

    async def _session(self, session: str, request: Request, connection: socket.socket) -> Response | None:
        # All of it here, though the engine completes it: half a handshake must not begin a session.
        problem = "GET only" if request.method != "GET" else request.websocket_problem
        if problem is not None:
            raise MalformedRequest(HTTPStatus.BAD_REQUEST, f"a session is spoken to by a websocket: {problem}")
        if mismatch := _version_mismatch(request):
            return mismatch
        identity = await self._authenticate(request)
        if isinstance(identity, Response):
            return identity
        if self.draining is not None:
            return _unavailable(self.draining)
        resume = request.header("Meshgate-Resume") == "1"
        refused = await self.keeper.receive(Visit(session, identity.name, resume, request.head), connection)
        return _refusal(refused) if refused else None


def _refusal(refused: Gone | Refuse) -> Response:
    if isinstance(refused, Gone):
        told: dict[str, Any] = {"kind": refused.kind, "reason": refused.reason, "output": refused.output}
        return Response.error(HTTPStatus.GONE, f"the session is over: {refused.reason}", **told)
    if refused.forbidden:
        return Response.error(HTTPStatus.FORBIDDEN, refused.reason)
    return _unavailable(refused.reason)


def _version_mismatch(request: Request) -> Response | None:
    theirs = request.header("Meshgate-Protocol")
    if theirs == str(PROTOCOL_VERSION):
        return None
    software = request.header("Meshgate-Version")
    ours = f"this gateway speaks protocol {PROTOCOL_VERSION} (meshgate {SOFTWARE_VERSION})"
    client = f"the client {_protocol(theirs)}" + (f" (meshgate {software[:20]})" if software else "")
    newer = theirs is not None and theirs.isdecimal() and int(theirs[:9]) > PROTOCOL_VERSION
    return Response.error(
        HTTPStatus.UPGRADE_REQUIRED,
        f"{ours}, {client}: upgrade the {'gateway' if newer else 'client'}",
        protocol=PROTOCOL_VERSION,
        version=SOFTWARE_VERSION,
        headers={"Upgrade": "websocket"},
    )


def _protocol(said: str | None) -> str:
    """What a client says it speaks, fit for a message."""
    return f"speaks protocol {said[:20]}" if said else "names no protocol"


def _unavailable(reason: str) -> Response:
    return Response.error(HTTPStatus.SERVICE_UNAVAILABLE, reason, headers={"Retry-After": "1"})
