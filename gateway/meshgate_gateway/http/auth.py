"""Authentication of requests, and the audit log of what was allowed and refused.

Every request except a health check needs credentials, on loopback too. Implementations of ``Authenticator`` accept the
gateway's token or Kubernetes identities. None may log or return a credential.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import socket
from collections import Counter
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Literal, Protocol, TypeAlias
from urllib.parse import quote, unquote

from pydantic import SecretStr

from meshgate_gateway.http.messages import CALLER_HEADER, IDENTITY_HEADER, PROOF_KEY_HEADER, Request, Response
from meshgate_gateway.logs import EventLog
from meshgate_wire.proof import NONCE_HEADER, Prover

log = EventLog()

Action: TypeAlias = Literal[
    "session",
    "describe job",
    "list sessions",
    "end session",
    "read status",
    "read output",
    "read metrics",
    "list runs",
    "submit run",
    "stop run",
    "start job",
    "find job",
    "list jobs",
    "scale job",
    "end job",
    "forward",
]
READING: dict[str, Action] = {
    "/v1/job": "describe job",
    "/v1/hosts": "describe job",
    "/v1/sessions": "list sessions",
    "/v1/status": "read status",
    "/v1/output": "read output",
    "/metrics": "read metrics",
}
"""What a request for each of these paths does."""
RUNS_PATH = "/v1/runs"
END_PATH = re.compile(r"/v1/sessions/([0-9a-f]{32})/end")
OF_RUNS: frozenset[Action] = frozenset({"session", "describe job", "list sessions", "read status", "read output"})
"""What a submitted program may do with the secret of its run."""

Outcome: TypeAlias = Literal["allowed", "refused"]

audited: Counter[tuple[Action, Outcome]] = Counter()
"""How many events of each kind this process has logged."""
MAX_CLAIM = 200  # characters
_PROOF_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Identity:
    """The authenticated caller. A session belongs to the identity that started it.

    ``end_user``: for whom a provisioning gateway, which has the job's token, forwards the request. Everyone whom it
    lets use the job shares the job's sessions. ``run``: the run that has presented its own secret; the rest is then
    who submitted it.
    """

    name: str
    end_user: str = ""
    run: str = ""

    @property
    def caller(self) -> str:
        """The name in the audit log."""
        who = self.end_user or self.name
        return f"{who} (run {self.run})" if self.run else who


@dataclass(frozen=True, slots=True)
class Denied:
    """A failed authentication, with the reason as one line for the caller.

    ``status``: UNAUTHORIZED for unknown credentials, FORBIDDEN for a caller without permission, SERVICE_UNAVAILABLE if
    the credentials cannot be checked now, so that the caller retries.
    """

    reason: str
    status: HTTPStatus = HTTPStatus.UNAUTHORIZED

    def response(self) -> Response:
        headers = {
            HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"},
            HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": "1"},
        }
        return Response.error(self.status, self.reason, headers=headers.get(self.status))


def busy(reason: str) -> Denied:
    """The client tries again."""
    return Denied(reason, HTTPStatus.SERVICE_UNAVAILABLE)


class Authenticator(Protocol):
    """Identifies the sender of a request."""

    async def authenticate(self, request: Request) -> Identity | Denied: ...


JOB_IDENTITY = "job"
"""The name of everyone who presents the token of the job's gateway."""


class TokenAuthenticator:
    """Accepts the gateway's token, which permits everything."""

    def __init__(self, token: SecretStr) -> None:
        self._digest = digest_of(token.get_secret_value())

    async def authenticate(self, request: Request) -> Identity | Denied:
        presented = bearer_token(request)
        if presented is None:
            return Denied("no token was presented: set MESHGATE_TOKEN to the token of this gateway")
        # Comparing digests in constant time does not even reveal the length of the token.
        if not hmac.compare_digest(digest_of(presented), self._digest):
            return Denied("the presented token is not the token of this gateway: set MESHGATE_TOKEN to that")
        return Identity(JOB_IDENTITY, unquote(request.header(CALLER_HEADER) or ""))


class GatewaysAuthenticator:
    """Accepts the gateways in front of the engines by their key, and the callers that they have identified."""

    def __init__(self, key: SecretStr) -> None:
        self._key = TokenAuthenticator(key)

    async def authenticate(self, request: Request) -> Identity | Denied:
        result = await self._key.authenticate(request)
        name = unquote(request.header(IDENTITY_HEADER) or "")
        if isinstance(result, Identity) and name:
            return replace(result, name=name)
        return Denied("this server accepts only what a gateway of its job forwards: connect to the gateway")


def bearer_token(request: Request) -> str | None:
    """The token of ``Authorization: Bearer``; None if absent."""
    scheme, _, token = (request.header("Authorization") or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def prover_of(request: Request) -> Prover | None:
    """What proves the response to ``request`` to its sender; None if the sender does not ask for a proof. Raises
    MalformedRequest."""
    key = request.header(PROOF_KEY_HEADER)
    if key is not None and _PROOF_KEY.fullmatch(key):
        return Prover(key)
    return Prover.of_request(request.header(NONCE_HEADER), bearer_token(request))


def credentials_for(request: Request, caller: str, token: SecretStr, *, identity: str = "") -> dict[str, str]:
    """The headers with which a provisioning gateway forwards the ``request`` of ``caller`` to the gateway of the job
    with this ``token``, or that gateway the request of an ``identity`` to its engines, whose key is then the ``token``.
    The response is proven to the caller by what the caller itself presented."""
    headers = headers_for(caller, token.get_secret_value())
    if identity:
        headers[IDENTITY_HEADER] = quote(identity, safe=":@/")
    prover = prover_of(request)
    return headers if prover is None else headers | {PROOF_KEY_HEADER: prover.key}


def headers_for(caller: str, token: str) -> dict[str, str]:
    """The headers with which a provisioning gateway asks the gateway of the job with this ``token``, for ``caller``."""
    return {"Authorization": f"Bearer {token}", CALLER_HEADER: quote(caller, safe=":@/")}


def digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


# The audit log: one event for each session, job and refusal, with the caller and its address.
#
# ``caller`` is the authenticated identity; null if there is none. ``address`` is the peer of the connection: behind an
# ingress that is the ingress, and ``forwarded_for`` is what it, or the caller, claims in ``X-Forwarded-For``.


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


def action_of(path: str, method: str) -> Action:
    """What a request for a path of a job's gateway does."""
    if path == RUNS_PATH or path.startswith(f"{RUNS_PATH}/"):
        return "list runs" if method != "POST" else "submit run" if path == RUNS_PATH else "stop run"
    return "end session" if END_PATH.fullmatch(path) else READING.get(path, "session")


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
