"""The way through a provisioning gateway to the gateways of jobs.

A job's gateway checks every request itself. It is checked here as well, by the same rule, so that a stranger cannot
learn which jobs there are, nor have connections held open: whoever does not open the job is told the same whether
there is one or not. Nothing is asked of the cluster without a token, and only so much at a time with one.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
import socket
import time
from collections import OrderedDict
from http import HTTPStatus

import structlog
from pydantic import SecretStr

from meshgate_gateway.auth import Identity, TokenAuthenticator, bearer_token
from meshgate_gateway.conversation import relay
from meshgate_gateway.http import Request, Response
from meshgate_gateway.kubernetes_auth import KubernetesAuthenticator, KubernetesUsers
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import KubernetesError, NotFound
from meshgate_kubernetes.gateway_pod import find_gateway
from meshgate_kubernetes.names import Names

__all__ = ["JobRelays"]

log = structlog.get_logger()

MAX_RELAYS = 512
MAX_CHECKS = 16
REMEMBERED = 1024
REMEMBER_FOR = 10.0
"""Seconds for which whoever opened a job is not checked again: connections that are cut come back at once."""


class JobRelays:
    """Passes requests on to the gateways of jobs, for whoever opens them."""

    def __init__(self, api: Api, users: KubernetesUsers) -> None:
        self._api, self._users = api, users
        self._open: set[asyncio.Task[None]] = set()
        self._checks = 0
        self._known: OrderedDict[bytes, float] = OrderedDict()

    async def answer(
        self, namespace: str, name: str, rest: str, request: Request, connection: socket.socket
    ) -> Response | None:
        """The answer, or None when the connection was taken over to be relayed to ``rest`` of the job's gateway."""
        refused = await self._refusal(namespace, name, request)
        if refused is not None:
            return refused
        if len(self._open) >= MAX_RELAYS:
            return _busy(f"{MAX_RELAYS} connections to jobs pass through this gateway already")
        try:
            pod = await asyncio.to_thread(find_gateway, self._api, name, namespace)
        except KubernetesError as error:
            return Response.error(HTTPStatus.BAD_GATEWAY, str(error))
        if pod is None:
            reason = f"no gateway of a job {name!r} is ready in namespace {namespace!r}"
            return Response.error(HTTPStatus.BAD_GATEWAY, reason)
        task = asyncio.create_task(relay(connection.dup(), request, rest, pod.host, pod.port))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return None

    async def close(self) -> None:
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _refusal(self, namespace: str, name: str, request: Request) -> Response | None:
        """What to tell whoever does not open the job; None for who does."""
        token = bearer_token(request)
        if token is None:
            return _not_opened(namespace, name, "no token was presented")
        key = hashlib.sha256(f"{namespace}/{name} {token}".encode("utf-8", "surrogateescape")).digest()
        if self._known.get(key, 0.0) > time.monotonic():
            return None
        if self._checks >= MAX_CHECKS:
            return _busy("too many callers are being checked at the moment")
        self._checks += 1
        try:
            refused = await self._check(namespace, name, request)
        finally:
            self._checks -= 1
        if refused is None:
            self._known[key] = time.monotonic() + REMEMBER_FOR
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return refused

    async def _check(self, namespace: str, name: str, request: Request) -> Response | None:
        try:
            token = await asyncio.to_thread(self._token_of, namespace, name)
        except KubernetesError as error:
            log.warning("the token of a job could not be read", job=name, namespace=namespace, reason=str(error))
            return _busy("the cluster cannot be asked at the moment who opens its jobs")
        authenticator = KubernetesAuthenticator(TokenAuthenticator(token), self._users, namespace)
        verdict = await authenticator.check(request)
        if isinstance(verdict, Identity):
            return None
        log.warning("refused", job=name, namespace=namespace, reason=verdict.reason)
        if verdict.status is HTTPStatus.UNAUTHORIZED:
            return _not_opened(namespace, name, verdict.reason)
        return verdict.answer()

    def _token_of(self, namespace: str, name: str) -> SecretStr:
        """The token of the job; where there is no such job, one that nobody has."""
        try:
            secret = self._api.get("Secret", Names(name).secret, namespace)
            return SecretStr(base64.b64decode(secret["data"]["token"]).decode())
        except (NotFound, KeyError, ValueError):
            return SecretStr(secrets.token_urlsafe(32))


def _not_opened(namespace: str, name: str, why: str) -> Response:
    """``why`` must say nothing that depends on whether there is such a job."""
    reason = f"no job {name!r} in namespace {namespace!r} is opened by this, or it has ended: {why}"
    return Response.error(HTTPStatus.UNAUTHORIZED, reason, headers={"WWW-Authenticate": "Bearer"})


def _busy(reason: str) -> Response:
    return Response.error(HTTPStatus.SERVICE_UNAVAILABLE, reason, headers={"Retry-After": "1"})
