"""Forwards connections through a provisioning gateway to the gateways of jobs.

The proxy asks ``Access`` about each caller, and forwards its request with the job's token and the caller's name, which
the job's gateway writes to its own audit log. The job's token itself, and the secret of a run, open nothing here: who
has them may have lost access meanwhile. A connection that stays open is checked again at intervals, and closed when its
caller has lost access. To callers that may not create jobs there the error is the same whether the job exists or not.
Without a token the proxy asks the cluster nothing; with one, the number of concurrent checks is limited.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias

from pydantic import SecretStr

from meshgate_gateway.http.auth import (
    Denied,
    action_of,
    audit,
    bearer_token,
    busy,
    credentials_for,
    origin_of,
)
from meshgate_gateway.http.forwarding import proxy_bytes
from meshgate_gateway.http.messages import Request, Response
from meshgate_gateway.logs import EventLog
from meshgate_gateway.provisioning.access import USE, Access, Caller, owner_name
from meshgate_gateway.provisioning.refusals import at_limit
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import KubernetesError, NotFound
from meshgate_kubernetes.jobs.lifecycle import find_gateway
from meshgate_kubernetes.manifests.names import Names

log = EventLog()

MAX_CONNECTIONS = 512
MAX_CHECKS = 16
CACHE_SIZE = 1024
CACHE_TTL = 10.0
"""Seconds for which a successful check is reused, because a cut connection is dialled again at once."""
CHECK_INTERVAL = 15.0
"""Seconds between the checks of an open connection. With both caches, a caller loses access within 35 s."""


Audit: TypeAlias = Callable[..., None]


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A caller with access to a job, and the job's token."""

    caller: Caller
    token: SecretStr


@dataclass(frozen=True, slots=True)
class _Refused:
    """Why a caller has no access now, and its name if that is known."""

    denied: Denied
    caller: str | None = None


class JobProxy:
    """Forwards authenticated requests to the gateways of jobs."""

    def __init__(self, api: Api, access: Access) -> None:
        self._api, self._access = api, access
        self._connections: set[asyncio.Task[None]] = set()
        self._watching: set[asyncio.Task[None]] = set()
        self._checks = 0
        # The callers with access, by the job's Secret, as it is now, and by what the caller presented; and until
        # when. A job that was deleted and created again has another Secret.
        self._authenticated: OrderedDict[bytes, tuple[Caller, float]] = OrderedDict()

    async def respond(
        self, namespace: str, name: str, path: str, request: Request, connection: socket.socket
    ) -> Response | None:
        """The response, or None if the connection is now forwarded to ``path`` of the job's gateway."""
        origin = origin_of(request, connection)
        verb = action_of(path, request.method)
        audited = partial(audit, "forward", origin, verb=verb, job=name, namespace=namespace)
        admitted = await self._authenticate(namespace, name, request)
        if isinstance(admitted, _Refused):
            audited(caller=admitted.caller, refused=admitted.denied.reason)
            gone = admitted.denied.status is HTTPStatus.NOT_FOUND and verb == "session"
            return _gone(admitted.denied.reason) if gone else admitted.denied.response()
        caller = owner_name(admitted.caller)
        if verb == "submit run" and (refused := self._access.why_not_submit(admitted.caller)):
            audited(caller=caller, refused=refused)
            return Response.error(HTTPStatus.CONFLICT, refused)
        if len(self._connections) >= MAX_CONNECTIONS:
            return at_limit(MAX_CONNECTIONS).response()
        try:
            pod = await asyncio.to_thread(find_gateway, self._api, name, namespace)
        except KubernetesError as error:
            return Response.error(HTTPStatus.BAD_GATEWAY, str(error))
        if pod is None:
            reason = f"the gateway of job {name!r} in namespace {namespace!r} is not ready"
            return Response.error(HTTPStatus.BAD_GATEWAY, reason)
        audited(caller=caller)
        credentials = credentials_for(request, caller, admitted.token)
        copying = asyncio.create_task(proxy_bytes(connection.dup(), request, path, pod.host, pod.port, credentials))
        watching = asyncio.create_task(self._watch(copying, namespace, name, request, audited))
        for tasks, task in ((self._connections, copying), (self._watching, watching)):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return None

    async def close(self) -> None:
        tasks = [*self._watching, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(
        self, copying: asyncio.Task[None], namespace: str, name: str, request: Request, audited: Audit
    ) -> None:
        """Ends ``copying`` when the caller has lost access to the job. It keeps it while the API server is away."""
        try:
            while not (await asyncio.wait([copying], timeout=CHECK_INTERVAL))[0]:
                found = await self._authenticate(namespace, name, request)
                if isinstance(found, _Refused) and found.denied.status is not HTTPStatus.SERVICE_UNAVAILABLE:
                    audited(caller=found.caller, refused=f"the open connection is closed: {found.denied.reason}")
                    return
        finally:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)

    async def _authenticate(self, namespace: str, name: str, request: Request) -> _Admitted | _Refused:
        token = bearer_token(request)
        if token is None:
            return _Refused(_no_access(namespace, name, "no token was presented"))
        if self._checks >= MAX_CHECKS:
            return _Refused(busy("too many requests are being authenticated: retry later"))
        self._checks += 1
        try:
            secret = await asyncio.to_thread(self._read_secret, namespace, name)
            caller = await self._check(namespace, name, request, token, secret)
        except KubernetesError as error:
            log.warning("cannot authenticate the caller of a job", job=name, namespace=namespace, reason=str(error))
            return _Refused(busy("the API server cannot authenticate callers now: retry later"))
        finally:
            self._checks -= 1
        if isinstance(caller, _Refused):
            return caller
        try:
            return _Admitted(caller, SecretStr(base64.b64decode(secret["data"]["token"]).decode()))
        except (KeyError, ValueError):
            reason = f"job {name!r} in namespace {namespace!r} has no token now: retry later"
            return _Refused(busy(reason), owner_name(caller))

    async def _check(
        self, namespace: str, name: str, request: Request, token: str, secret: dict[str, Any]
    ) -> Caller | _Refused:
        """The caller, if it has access. Raises KubernetesError."""
        version = [secret.get("metadata", {}).get(each, "") for each in ("uid", "resourceVersion")]
        key = hashlib.sha256(f"{namespace}/{name} {version} {token}".encode("utf-8", "surrogateescape")).digest()
        known = self._authenticated.get(key)
        if secret and known is not None and known[1] > time.monotonic():
            return known[0]
        caller = await self._access.identify(request)
        if isinstance(caller, Denied):
            unknown = caller.status is HTTPStatus.UNAUTHORIZED
            return _Refused(_no_access(namespace, name, caller.reason) if unknown else caller)
        try:
            denied = await self._access.why_not(caller, name, namespace, USE)
        except NotFound as missing:
            denied = Denied(str(missing), HTTPStatus.NOT_FOUND)
        if denied is not None:
            return _Refused(denied, owner_name(caller))
        if secret:
            self._authenticated[key] = caller, time.monotonic() + CACHE_TTL
            while len(self._authenticated) > CACHE_SIZE:
                self._authenticated.popitem(last=False)
        return caller

    def _read_secret(self, namespace: str, name: str) -> dict[str, Any]:
        """The Secret with the job's token; empty if there is none, so that both cases take the same path."""
        try:
            return self._api.get("Secret", Names(name).secret, namespace)
        except NotFound:
            return {}


def _no_access(namespace: str, name: str, reason: str) -> Denied:
    """``reason`` must not reveal whether the job exists."""
    return Denied(f"no job {name!r} in namespace {namespace!r} accepts these credentials (it may have ended): {reason}")


def _gone(reason: str) -> Response:
    """Ends the session of a client that still has one."""
    return Response.error(HTTPStatus.GONE, reason, kind="unknown", reason=reason)
