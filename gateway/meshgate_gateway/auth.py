"""Who may come in. Every request but a health check is asked for its credentials, on loopback too.

What identifies a caller is behind one small protocol, so that a cluster's own identities can be added beside the
job's token. No implementation may log or return a credential.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from pydantic import SecretStr

from meshgate_gateway.http import Request, Response

__all__ = ["Authenticator", "Identity", "Refusal", "TokenAuthenticator", "bearer_token"]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who calls. A session belongs to the identity that began it."""

    name: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not, as one line for the caller.

    ``status``: UNAUTHORIZED where nobody is known by these credentials, FORBIDDEN where the caller is known but may
    not do this, SERVICE_UNAVAILABLE where nobody can tell at present, so that the caller asks again.
    """

    reason: str
    status: HTTPStatus = HTTPStatus.UNAUTHORIZED

    def answer(self) -> Response:
        headers = {
            HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"},
            HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": "1"},
        }
        return Response.error(self.status, self.reason, headers=headers.get(self.status))


class Authenticator(Protocol):
    """Tells who sends a request."""

    async def check(self, request: Request) -> Identity | Refusal: ...


class TokenAuthenticator:
    """The job's token: who holds it may do everything."""

    def __init__(self, token: SecretStr) -> None:
        self._digest = _digest(token.get_secret_value())

    async def check(self, request: Request) -> Identity | Refusal:
        presented = bearer_token(request)
        if presented is None:
            return Refusal("no token was presented: set MESHGATE_TOKEN to the token of this gateway")
        # Digests are compared, in constant time, so that not even the token's length shows.
        if not hmac.compare_digest(_digest(presented), self._digest):
            return Refusal("the token is not the one of this gateway: set MESHGATE_TOKEN to that")
        return Identity("job")


def bearer_token(request: Request) -> str | None:
    """The token of ``Authorization: Bearer``, None where there is none."""
    scheme, _, token = (request.header("Authorization") or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
