"""Lets in, beside whoever holds the job's token, a Kubernetes identity that may do the deed.

A session runs code in the job's pods. Kubernetes has a right for just that, ``create pods/exec``, so this is what a
caller must have in the job's namespace: whoever could ``kubectl exec`` into the workers may use them through the
gateway, nobody else, and no rights have to be kept in two places. Who the caller is, TokenReview says; what the
caller may, SubjectAccessReview.

The gateway's own account needs ``system:auth-delegator`` for both, which only an administrator can give; without it
the job's token remains the one way in.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

import structlog

from meshgate_gateway.auth import Identity, Refusal, TokenAuthenticator, bearer_token
from meshgate_gateway.http import Request
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import Forbidden, KubernetesError

__all__ = ["KubernetesAuthenticator"]

log = structlog.get_logger()

REMEMBERED = 1024
REMEMBER_FOR = 10.0
"""Seconds. A right that is withdrawn is withdrawn here as late; a stranger costs the API server one review in them."""

Verdict: TypeAlias = "Identity | Refusal"


@dataclass(frozen=True, slots=True)
class _Remembered:
    verdict: Verdict
    until: float


class KubernetesAuthenticator:
    """An Authenticator: first the token, then the cluster's own identities."""

    def __init__(self, token: TokenAuthenticator, api: Api, namespace: str) -> None:
        self._token, self._api, self._namespace = token, api, namespace
        self._remembered: OrderedDict[bytes, _Remembered] = OrderedDict()

    async def check(self, request: Request) -> Identity | Refusal:
        verdict = await self._token.check(request)
        presented = bearer_token(request)
        if isinstance(verdict, Identity) or presented is None:
            return verdict
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        known = self._remembered.get(digest)
        if known is not None and known.until > time.monotonic():
            return known.verdict
        try:
            verdict = await asyncio.to_thread(self._review, presented)
        except KubernetesError as error:
            log.warning("an identity could not be verified", reason=str(error))
            return Refusal(f"the token is not the job's, and the cluster cannot be asked whose it is: {error}")
        self._remembered[digest] = _Remembered(verdict, time.monotonic() + REMEMBER_FOR)
        while len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)
        return verdict

    def _review(self, token: str) -> Verdict:
        try:
            user = self._api.user_of_token(token)
        except Forbidden:
            return Refusal(
                "the token is not the job's, and this gateway may not verify Kubernetes identities: set MESHGATE_TOKEN "
                "to the job's token, or have the gateway's service account bound to system:auth-delegator"
            )
        if user is None:
            return Refusal("the token is neither the job's nor one of this cluster's (or it has expired)")
        name = str(user.get("username", ""))
        deed = {"verb": "create", "resource": "pods", "subresource": "exec", "namespace": self._namespace}
        if self._api.user_may(user, deed):
            return Identity(f"kubernetes:{name}")
        return Refusal(
            f"{name} may not create pods/exec in namespace {self._namespace!r}, which running code in its pods takes",
            forbidden=True,
        )
