"""Forwards connections through a provisioning gateway to the gateways of jobs.

A job's gateway authenticates every request itself. The proxy authenticates it first, by the same rule, so that a
caller without access cannot find out which jobs exist or hold connections open: its error is the same whether the job
exists or not. Without a token the proxy asks the cluster nothing; with one, the number of concurrent checks is limited.
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

from meshgate_gateway.http.auth import Identity, TokenAuthenticator, audit, bearer_token, origin_of
from meshgate_gateway.http.kubernetes_auth import KubernetesAuthenticator, KubernetesUsers
from meshgate_gateway.http.messages import Request, Response
from meshgate_gateway.http.text_websocket import proxy_bytes
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import KubernetesError, NotFound
from meshgate_kubernetes.jobs.lifecycle import find_gateway
from meshgate_kubernetes.manifests.names import Names

log = structlog.get_logger()

MAX_CONNECTIONS = 512
MAX_CHECKS = 16
CACHE_SIZE = 1024
CACHE_TTL = 10.0
"""Seconds for which a successful check is reused, because a cut connection is dialled again at once."""


class JobProxy:
    """Forwards authenticated requests to the gateways of jobs."""

    def __init__(self, api: Api, users: KubernetesUsers) -> None:
        self._api, self._users = api, users
        self._connections: set[asyncio.Task[None]] = set()
        self._checks = 0
        self._authenticated: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # caller, end of validity

    async def respond(
        self, namespace: str, name: str, path: str, request: Request, connection: socket.socket
    ) -> Response | None:
        """The response, or None if the connection is now forwarded to ``path`` of the job's gateway."""
        origin = origin_of(request, connection)
        caller = await self._authenticate(namespace, name, request)
        if isinstance(caller, Response):
            refused = str(caller.body.get("error", ""))
            audit("forward", origin, caller=None, refused=refused, job=name, namespace=namespace)
            return caller
        if len(self._connections) >= MAX_CONNECTIONS:
            return _busy(f"this gateway is at its limit of {MAX_CONNECTIONS} forwarded connections: retry later")
        try:
            pod = await asyncio.to_thread(find_gateway, self._api, name, namespace)
        except KubernetesError as error:
            return Response.error(HTTPStatus.BAD_GATEWAY, str(error))
        if pod is None:
            reason = f"the gateway of job {name!r} in namespace {namespace!r} is not ready"
            return Response.error(HTTPStatus.BAD_GATEWAY, reason)
        audit("forward", origin, caller=caller, job=name, namespace=namespace)
        task = asyncio.create_task(proxy_bytes(connection.dup(), request, path, pod.host, pod.port))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        return None

    async def close(self) -> None:
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _authenticate(self, namespace: str, name: str, request: Request) -> Response | str:
        """The error response for a caller without access to the job; the name of a caller with access."""
        token = bearer_token(request)
        if token is None:
            return _no_access(namespace, name, "no token was presented")
        key = hashlib.sha256(f"{namespace}/{name} {token}".encode("utf-8", "surrogateescape")).digest()
        caller, valid_until = self._authenticated.get(key, ("", 0.0))
        if valid_until > time.monotonic():
            return caller
        if self._checks >= MAX_CHECKS:
            return _busy("too many requests are being authenticated: retry later")
        self._checks += 1
        try:
            result = await self._check(namespace, name, request)
        finally:
            self._checks -= 1
        if isinstance(result, str):
            self._authenticated[key] = result, time.monotonic() + CACHE_TTL
            while len(self._authenticated) > CACHE_SIZE:
                self._authenticated.popitem(last=False)
        return result

    async def _check(self, namespace: str, name: str, request: Request) -> Response | str:
        try:
            token = await asyncio.to_thread(self._read_token, namespace, name)
        except KubernetesError as error:
            log.warning("cannot read a job's token", job=name, namespace=namespace, reason=str(error))
            return _busy("the API server cannot authenticate callers now: retry later")
        authenticator = KubernetesAuthenticator(TokenAuthenticator(token), self._users, namespace)
        result = await authenticator.authenticate(request)
        if isinstance(result, Identity):
            return result.name
        if result.status is HTTPStatus.UNAUTHORIZED:
            return _no_access(namespace, name, result.reason)
        return result.response()

    def _read_token(self, namespace: str, name: str) -> SecretStr:
        """The job's token; a random one if the job does not exist, so that both cases take the same path."""
        try:
            secret = self._api.get("Secret", Names(name).secret, namespace)
            return SecretStr(base64.b64decode(secret["data"]["token"]).decode())
        except (NotFound, KeyError, ValueError):
            return SecretStr(secrets.token_urlsafe(32))


def _no_access(namespace: str, name: str, reason: str) -> Response:
    """``reason`` must not reveal whether the job exists."""
    error = f"no job {name!r} in namespace {namespace!r} accepts these credentials (it may have ended): {reason}"
    return Response.error(HTTPStatus.UNAUTHORIZED, error, headers={"WWW-Authenticate": "Bearer"})


def _busy(reason: str) -> Response:
    return Response.error(HTTPStatus.SERVICE_UNAVAILABLE, reason, headers={"Retry-After": "1"})
