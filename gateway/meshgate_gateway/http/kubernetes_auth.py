"""Authentication of Kubernetes identities, in addition to the gateway's token.

A session runs code in the job's pods. Kubernetes has a permission for that, ``create pods/exec``, so the gateway
requires it in the job's namespace: a caller that may ``kubectl exec`` into the workers may also use them through the
gateway, and permissions are kept in one place. TokenReview identifies the caller, SubjectAccessReview checks the
permission.

Both need the cluster role ``system:auth-delegator`` for the gateway's service account, which only an administrator can
grant. Without it the gateway accepts its token alone.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from meshgate_gateway.http.auth import Denied, Identity, TokenAuthenticator, bearer_token, digest_of
from meshgate_gateway.http.messages import Request
from meshgate_gateway.logs import EventLog
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Forbidden, KubernetesError

log = EventLog()

_SERVICE_ACCOUNT = re.compile(r"system:serviceaccount:([^:]+):([^:]+)")
CACHE_SIZE = 1024
CACHE_TTL = 10.0
"""Seconds that a token review is reused. A revoked token stays valid for as long."""


@dataclass(frozen=True, slots=True)
class KubernetesUser:
    """A Kubernetes identity, as returned by a token review."""

    name: str
    groups: tuple[str, ...]
    review: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _CachedReview:
    user: KubernetesUser | Denied
    expires: float


class KubernetesUsers:
    """Identifies the users of tokens and checks their permissions."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._cache: OrderedDict[bytes, _CachedReview] = OrderedDict()

    async def identify(self, token: str) -> KubernetesUser | Denied:
        digest = digest_of(token)
        cached = self._cache.get(digest)
        if cached is not None and cached.expires > time.monotonic():
            return cached.user
        try:
            found = await asyncio.to_thread(self._review, token)
        except KubernetesError as error:
            log.warning("token review failed", reason=str(error))
            return _unverified(
                f"the token is not the gateway's, and the API server cannot verify it as a cluster token now: {error}"
            )
        self._cache[digest] = _CachedReview(found, time.monotonic() + CACHE_TTL)
        while len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
        return found

    async def check_permission(
        self, user: KubernetesUser, attributes: Mapping[str, str], purpose: str
    ) -> Denied | None:
        """None if the user has the permission of these resourceAttributes; ``purpose`` says what needs it."""
        try:
            allowed = await asyncio.to_thread(self._api.is_user_allowed, user.review, attributes)
        except Forbidden as error:
            reason = f"this gateway lacks the permission to check what {user.name} may do: {_how_to_bind(error)}"
            return Denied(reason, HTTPStatus.FORBIDDEN)
        except KubernetesError as error:
            log.warning("access review failed", user=user.name, reason=str(error))
            return _unverified(f"the API server cannot check what {user.name} may do now: {error}")
        if allowed:
            return None
        resource = "/".join(filter(None, (attributes["resource"], attributes.get("subresource"))))
        resource += f".{attributes['group']}" if attributes.get("group") else ""
        namespace = attributes["namespace"]
        denied = f"{user.name} may not {attributes['verb']} {resource} in namespace {namespace!r}"
        return Denied(f"{denied}, which {purpose} requires", HTTPStatus.FORBIDDEN)

    def _review(self, token: str) -> KubernetesUser | Denied:
        try:
            user = self._api.review_token(token)
        except Forbidden as error:
            return Denied(
                "the token is not the gateway's, and this gateway lacks the permission to verify cluster tokens: set "
                f"MESHGATE_TOKEN to the gateway's token, or {_how_to_bind(error)}"
            )
        if user is None:
            return Denied(
                "the token is neither the gateway's nor a valid token of this cluster (it may have expired): "
                "set MESHGATE_TOKEN to a valid one"
            )
        return KubernetesUser(str(user.get("username", "")), tuple(user.get("groups") or ()), user)


def _how_to_bind(error: Forbidden) -> str:
    advice = "ask an administrator to bind its service account to the cluster role system:auth-delegator"
    if not (account := _SERVICE_ACCOUNT.fullmatch(error.user)):
        return advice
    namespace, name = account.groups()
    return (
        f"{advice}: kubectl create clusterrolebinding {namespace}-{name}-reviews --clusterrole=system:auth-delegator "
        f"--serviceaccount={namespace}:{name}"
    )


def _unverified(reason: str) -> Denied:
    """The API server may be unavailable only for a moment, so a reconnecting client must retry."""
    return Denied(reason, HTTPStatus.SERVICE_UNAVAILABLE)


class KubernetesAuthenticator:
    """An Authenticator that accepts the gateway's token or a Kubernetes identity with the permission."""

    def __init__(self, token: TokenAuthenticator, users: KubernetesUsers, namespace: str) -> None:
        self._token, self._users = token, users
        self._attributes = {"verb": "create", "resource": "pods", "subresource": "exec", "namespace": namespace}

    async def authenticate(self, request: Request) -> Identity | Denied:
        result = await self._token.authenticate(request)
        presented = bearer_token(request)
        if isinstance(result, Identity) or presented is None:
            return result
        user = await self._users.identify(presented)
        if isinstance(user, Denied):
            return user
        denied = await self._users.check_permission(user, self._attributes, "running code in the job's pods")
        return denied or Identity(f"kubernetes:{user.name}")
