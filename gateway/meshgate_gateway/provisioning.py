"""Provisions jobs for callers without rights of their own, within the operator's policy, and relays to their gateways.

A caller speaks to it over a websocket at ``/v1/jobs``: one question, then what happens until it is answered. Below
``/v1/jobs/<namespace>/<name>`` the job's own gateway is reached by whoever opens the job; what passes there is not
looked into.
"""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from http import HTTPStatus
from typing import TypeAlias

import structlog
from pydantic import ValidationError

from meshgate_gateway.auth import Identity, Refusal, TokenAuthenticator, bearer_token
from meshgate_gateway.conversation import Conversation
from meshgate_gateway.http import MalformedRequest, Request, Response
from meshgate_gateway.job_relays import JobRelays
from meshgate_gateway.kubernetes_auth import KubernetesUser, KubernetesUsers
from meshgate_gateway.making import Makings
from meshgate_gateway.policy import Policy, as_made_for_others, violations
from meshgate_kubernetes import jobs
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import KubernetesError, NotFound
from meshgate_kubernetes.readiness import Listener
from meshgate_kubernetes.requests import Answer, Ask, End, Ended, Find, Refused, Start, Up, read_ask, refused
from meshgate_kubernetes.spec import JobSpec

__all__ = ["Provisioner"]

log = structlog.get_logger()

JOB_PATH = re.compile(r"/v1/jobs/([a-z0-9-]{1,63})/([a-z0-9-]{1,63})(/v1/.*)")


@dataclass(frozen=True, slots=True)
class TokenHolder:
    """Whoever presents the gateway's own token: nobody's rights are asked for, the policy still holds."""


Caller: TypeAlias = KubernetesUser | TokenHolder


def owner_name(caller: Caller) -> str:
    """Who is written down as the owner of a job: no identity of the cluster has a name that gives the token's."""
    return "token" if isinstance(caller, TokenHolder) else f"kubernetes:{caller.name}"


class Provisioner:
    """Answers what is below ``/v1/jobs``."""

    def __init__(self, api: Api, policy: Policy, token: TokenAuthenticator, users: KubernetesUsers) -> None:
        self._api, self._policy, self._token, self._users = api, policy, token, users
        self._loop = asyncio.get_running_loop()
        self._under_way: set[asyncio.Task[None]] = set()
        self._relays = JobRelays(api, users)
        self._makings = Makings(partial(jobs.end, api))

    async def answer(self, path: str, request: Request, connection: socket.socket) -> Response | None:
        """The answer, or None when the connection was taken over. Raises MalformedRequest."""
        if job := JOB_PATH.fullmatch(path):
            return await self._relays.answer(job[1], job[2], job[3], request, connection)
        if path != "/v1/jobs":
            return Response.error(HTTPStatus.NOT_FOUND, "this gateway serves /v1/jobs and /v1/jobs/<namespace>/<name>")
        if not request.is_websocket:
            raise MalformedRequest(HTTPStatus.BAD_REQUEST, "jobs are asked for over a websocket: no Upgrade header")
        caller = await self._caller(request)
        if isinstance(caller, Refusal):
            log.warning("refused", path=path, reason=caller.reason)
            return caller.answer()
        self._start(self._converse(Conversation(connection.dup(), request.head), caller))
        return None

    async def close(self) -> None:
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._relays.close()
        await self._makings.close()

    # --- who asks -----------------------------------------------------------------------------------------

    async def _caller(self, request: Request) -> Caller | Refusal:
        verdict = await self._token.check(request)
        presented = bearer_token(request)
        if isinstance(verdict, Identity):
            return TokenHolder()
        return verdict if presented is None else await self._users.user(presented)

    async def _may_not_make(self, caller: Caller, namespace: str) -> str | None:
        """Why the caller may not have jobs made in the namespace, None when it may: by the policy, or by right."""
        if isinstance(caller, TokenHolder):
            return None
        names = (caller.name, *caller.groups)
        if any(fnmatchcase(n, p) for n in names for p in self._policy.callers):
            return None
        return await self._has_no_right(caller, "create", "statefulsets", namespace)

    async def _may_not_have(self, caller: Caller, ask: Find | End) -> str | None:
        """Why the caller may not use or end the job, None when it may: as its owner, or by right, never by the
        policy alone."""
        if isinstance(caller, TokenHolder):
            return None
        try:
            owner = await asyncio.to_thread(jobs.owner_of, self._api, ask.name, ask.namespace)
        except NotFound:  # which is no business of those who could neither have made the job nor use it
            if await self._may_not_make(caller, ask.namespace) is None:
                raise
            owner = ""
        if owner_name(caller) == owner:
            return None
        if isinstance(ask, Find):
            return await self._has_no_right(caller, "get", "secrets", ask.namespace)
        return await self._has_no_right(caller, "delete", "statefulsets", ask.namespace)

    async def _has_no_right(self, caller: KubernetesUser, verb: str, resource: str, namespace: str) -> str | None:
        group = {"group": "apps"} if resource == "statefulsets" else {}
        deed = {"verb": verb, "resource": resource, "namespace": namespace, **group}
        refused = await self._users.refusal(caller, deed, "this")
        return refused.reason if refused is not None else None

    # --- what is asked ------------------------------------------------------------------------------------

    async def _converse(self, conversation: Conversation, caller: Caller) -> None:
        async with conversation:
            text = await conversation.receive()
            if text is None:
                return
            try:
                answer = await self._answer(read_ask(text), caller, conversation)
            except (ValidationError, KubernetesError) as error:
                answer = refused(error)
            if answer is not None:
                await conversation.send(answer.model_dump_json())

    async def _answer(self, ask: Ask, caller: Caller, conversation: Conversation) -> Answer | None:
        """The answer, or None when the caller was told already."""
        if isinstance(ask, Start):
            return await self._make(ask, caller, conversation)
        if reason := await self._may_not_have(caller, ask):
            return Refused(reason=reason)
        if isinstance(ask, Find):
            return Up(job=await asyncio.to_thread(jobs.find, self._api, ask.name, ask.namespace))
        log.info("ending a job", job=ask.name, namespace=ask.namespace, caller=owner_name(caller))
        await conversation.meanwhile(asyncio.to_thread(jobs.end_by_name, self._api, ask.name, ask.namespace))
        return Ended()

    async def _make(self, ask: Start, caller: Caller, conversation: Conversation) -> Answer | None:
        if reason := await self._may_not_make(caller, ask.job.namespace):
            return Refused(reason=reason)
        if problems := violations(self._policy, ask.job):
            return Refused(reason="the policy of this gateway does not allow it: " + "; ".join(problems))
        spec = as_made_for_others(self._policy, ask.job)
        owner = owner_name(caller)
        log.info("making a job", job=spec.name, namespace=spec.namespace, caller=owner)
        make = partial(self._make_now, spec, ask.timeout, owner)
        await self._makings.of((owner, spec.model_dump_json()), make).attend(conversation)
        return None

    def _make_now(self, spec: JobSpec, timeout: float | None, owner: str, listener: Listener) -> jobs.RunningJob:
        spec = jobs.resolve(self._api, spec)
        pods = sum(mesh.replicas for mesh in spec.meshes)
        if pods > self._policy.max_replicas:  # as many as the selector has found
            raise NotAllowed(f"{pods} pods are more than the {self._policy.max_replicas} that the policy allows")
        return jobs.start(self._api, spec, listener, timeout=timeout, owner=owner)

    def _start(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)


class NotAllowed(KubernetesError):
    """The operator's policy is against it."""
