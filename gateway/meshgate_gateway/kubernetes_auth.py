"""Lets in, beside whoever holds the gateway's token, Kubernetes identities that may do the deed.

A session runs code in the job's pods. Kubernetes has a right for just that, ``create pods/exec``, so this is what a
caller must have in the job's namespace: whoever could ``kubectl exec`` into the workers may use them through the
gateway, nobody else, and no rights have to be kept in two places. Who the caller is, TokenReview says; what the
caller may, SubjectAccessReview.

The gateway's own account needs ``system:auth-delegator`` for both, which only an administrator can give; without it
the gateway's token remains the one way in.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import structlog

from meshgate_gateway.auth import Identity, Refusal, TokenAuthenticator, bearer_token
from meshgate_gateway.http import Request
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import Forbidden, KubernetesError

__all__ = ["KubernetesAuthenticator", "KubernetesUser", "KubernetesUsers"]

log = structlog.get_logger()

_SERVICE_ACCOUNT = re.compile(r"system:serviceaccount:([^:]+):([^:]+)")
REMEMBERED = 1024
REMEMBER_FOR = 10.0
"""Seconds. A right that is withdrawn is withdrawn here as late; a stranger costs the API server one review in them."""


@dataclass(frozen=True, slots=True)
class KubernetesUser:
    """An identity of the cluster, as a token review has told it."""

    name: str
    groups: tuple[str, ...]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Remembered:
    user: KubernetesUser | Refusal
    until: float


class KubernetesUsers:
    """Tells whose a token is, and what its owner may do."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._remembered: OrderedDict[bytes, _Remembered] = OrderedDict()

    async def user(self, token: str) -> KubernetesUser | Refusal:
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        known = self._remembered.get(digest)
        if known is not None and known.until > time.monotonic():
            return known.user
        try:
            found = await asyncio.to_thread(self._review, token)
        except KubernetesError as error:
            log.warning("an identity could not be verified", reason=str(error))
            return _cannot_tell(f"the token is not the gateway's, and the cluster cannot be asked whose it is: {error}")
        self._remembered[digest] = _Remembered(found, time.monotonic() + REMEMBER_FOR)
        while len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)
        return found

    async def refusal(self, user: KubernetesUser, deed: Mapping[str, str], why: str) -> Refusal | None:
        """None when the user may do ``deed`` (resourceAttributes); ``why`` says what the right is for."""
        try:
            allowed = await asyncio.to_thread(self._api.user_may, user.facts, deed)
        except Forbidden as error:
            told = f"this gateway may not ask what {user.name} may do: {_how_to_bind(error)}"
            return Refusal(told, HTTPStatus.FORBIDDEN)
        except KubernetesError as error:
            log.warning("a right could not be verified", user=user.name, reason=str(error))
            return _cannot_tell(f"the cluster cannot be asked what {user.name} may do: {error}")
        if allowed:
            return None
        resource = "/".join(filter(None, (deed["resource"], deed.get("subresource"))))
        resource += f".{deed['group']}" if deed.get("group") else ""
        namespace = deed["namespace"]
        told = f"{user.name} may not {deed['verb']} {resource} in namespace {namespace!r}, which {why} takes"
        return Refusal(told, HTTPStatus.FORBIDDEN)

    def _review(self, token: str) -> KubernetesUser | Refusal:
        try:
            user = self._api.user_of_token(token)
        except Forbidden as error:
            return Refusal(
                "the token is not the gateway's, and this gateway may not verify Kubernetes identities: set "
                f"MESHGATE_TOKEN to its token, or {_how_to_bind(error)}"
            )
        if user is None:
            return Refusal("the token is neither the gateway's nor one of this cluster's (or it has expired)")
        return KubernetesUser(str(user.get("username", "")), tuple(user.get("groups") or ()), user)


def _how_to_bind(error: Forbidden) -> str:
    told = "have an administrator bind its service account to the cluster role system:auth-delegator"
    if not (account := _SERVICE_ACCOUNT.fullmatch(error.user)):
        return told
    namespace, name = account.groups()
    return (
        f"{told}: kubectl create clusterrolebinding {namespace}-{name}-reviews --clusterrole=system:auth-delegator "
        f"--serviceaccount={namespace}:{name}"
    )


def _cannot_tell(reason: str) -> Refusal:
    """The API server is away, perhaps for a moment: a client that redials must not be sent off for good."""
    return Refusal(reason, HTTPStatus.SERVICE_UNAVAILABLE)


class KubernetesAuthenticator:
    """An Authenticator: first the token, then the cluster's own identities."""

    def __init__(self, token: TokenAuthenticator, users: KubernetesUsers, namespace: str) -> None:
        self._token, self._users = token, users
        self._deed = {"verb": "create", "resource": "pods", "subresource": "exec", "namespace": namespace}

    async def check(self, request: Request) -> Identity | Refusal:
        verdict = await self._token.check(request)
        presented = bearer_token(request)
        if isinstance(verdict, Identity) or presented is None:
            return verdict
        user = await self._users.user(presented)
        if isinstance(user, Refusal):
            return user
        refused = await self._users.refusal(user, self._deed, "running code in its pods")
        return refused or Identity(f"kubernetes:{user.name}")
