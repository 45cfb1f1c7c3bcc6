"""Creates jobs for callers without permissions of their own, within the operator's policy.

A caller opens a websocket at ``/v1/jobs``, sends one request and receives progress until the result. Requests below
``/v1/jobs/<namespace>/<name>`` are forwarded unread to that job's gateway.
"""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeAlias

from pydantic import ValidationError

from meshgate_gateway.http.auth import Action, Denied, Identity, Origin, TokenAuthenticator, audit, bearer_token
from meshgate_gateway.http.kubernetes_auth import KubernetesUser, KubernetesUsers
from meshgate_gateway.http.messages import Request, Response
from meshgate_gateway.http.text_websocket import TextWebSocket
from meshgate_gateway.provisioning.conversations import Conversations
from meshgate_gateway.provisioning.job_proxy import JobProxy
from meshgate_gateway.provisioning.pending_jobs import PendingJobs
from meshgate_gateway.provisioning.policy import Policy, apply_policy, counted_namespaces, exceeded_quota, violations
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import KubernetesError, NotFound
from meshgate_kubernetes.jobs import lifecycle, objects
from meshgate_kubernetes.jobs.lifecycle import RunningJob
from meshgate_kubernetes.jobs.provisioning_messages import (
    EndJob,
    FindJob,
    JobEnded,
    JobUp,
    ProvisioningReply,
    ProvisioningRequest,
    RequestRejected,
    StartJob,
    encode_reply,
    parse_request,
    rejection,
)
from meshgate_kubernetes.manifests.spec import JobSpec
from meshgate_kubernetes.status.readiness import ProgressListener

JOB_PATH = re.compile(r"/v1/jobs/([a-z0-9-]{1,63})/([a-z0-9-]{1,63})(/v1/.*)")


@dataclass(frozen=True, slots=True)
class TokenHolder:
    """A caller with the gateway's own token: its permissions are not checked, but the policy applies."""


Caller: TypeAlias = KubernetesUser | TokenHolder


def owner_name(caller: Caller) -> str:
    """The owner recorded in a job. No name of a Kubernetes identity can equal that of the token."""
    return "token" if isinstance(caller, TokenHolder) else f"kubernetes:{caller.name}"


class Provisioner:
    """Handles the requests below ``/v1/jobs``."""

    def __init__(self, api: Api, policy: Policy, token: TokenAuthenticator, users: KubernetesUsers) -> None:
        self._api, self._policy, self._token, self._users = api, policy, token, users
        self._conversations: Conversations[Caller] = Conversations(self._authenticate, self._converse)
        self._proxy = JobProxy(api, users)
        self._pending = PendingJobs(partial(lifecycle.end, api))

    async def respond(self, path: str, request: Request, connection: socket.socket) -> Response | None:
        """The response, or None if the connection was taken over. Raises MalformedRequest."""
        if job := JOB_PATH.fullmatch(path):
            response = await self._proxy.respond(job[1], job[2], job[3], request, connection)
            return None if response is None else replace(response, for_job=True)
        return await self._conversations.open(path, request, connection)

    async def close(self) -> None:
        await self._conversations.close()
        await self._proxy.close()
        await self._pending.close()

    # --- authentication and permissions -------------------------------------------------------------------

    async def _authenticate(self, request: Request) -> Caller | Denied:
        result = await self._token.authenticate(request)
        presented = bearer_token(request)
        if isinstance(result, Identity):
            return TokenHolder()
        return result if presented is None else await self._users.identify(presented)

    async def _why_not_create(self, caller: Caller, namespace: str) -> str | None:
        """Why the caller may not create jobs in the namespace; None if the policy or its own permissions allow it."""
        if isinstance(caller, TokenHolder):
            return None
        names = (caller.name, *caller.groups)
        if any(fnmatchcase(name, pattern) for name in names for pattern in self._policy.callers):
            return None
        return await self._missing_permission(caller, "create", "statefulsets", namespace)

    async def _why_not_access(self, caller: Caller, request: FindJob | EndJob) -> str | None:
        """Why the caller may not use or end the job; None for its owner and callers with their own permissions.

        The policy alone gives no access to the jobs of others.
        """
        if isinstance(caller, TokenHolder):
            return None
        try:
            owner = await asyncio.to_thread(lifecycle.read_owner, self._api, request.name, request.namespace)
        except NotFound:  # reported only to callers that could have created or used the job
            if await self._why_not_create(caller, request.namespace) is None:
                raise
            owner = ""
        if owner_name(caller) == owner:
            return None
        if isinstance(request, FindJob):
            return await self._missing_permission(caller, "get", "secrets", request.namespace)
        return await self._missing_permission(caller, "delete", "statefulsets", request.namespace)

    async def _missing_permission(self, caller: KubernetesUser, verb: str, resource: str, namespace: str) -> str | None:
        group = {"group": "apps"} if resource == "statefulsets" else {}
        attributes = {"verb": verb, "resource": resource, "namespace": namespace, **group}
        denied = await self._users.check_permission(caller, attributes, "this request")
        return denied.reason if denied is not None else None

    # --- requests -----------------------------------------------------------------------------------------

    async def _converse(self, connection: TextWebSocket, caller: Caller, origin: Origin) -> None:
        text = await connection.receive()
        if text is None:
            return
        try:
            request = parse_request(text)
            reply = await self._handle(request, caller, connection, origin)
        except (ValidationError, KubernetesError) as error:
            reply = rejection(error)
        if reply is not None:
            await connection.send(encode_reply(reply))

    async def _handle(
        self, request: ProvisioningRequest, caller: Caller, connection: TextWebSocket, origin: Origin
    ) -> ProvisioningReply | None:
        """The final reply, or None if it has been sent already."""
        if isinstance(request, StartJob):
            refused = await self._why_not_start(caller, request)
        else:
            refused = await self._why_not_access(caller, request)
        _audit(request, origin, owner_name(caller), refused)
        if refused is not None:
            return RequestRejected(reason=refused)
        if isinstance(request, StartJob):
            await self._start_job(request, caller, connection)
            return None
        if isinstance(request, FindJob):
            return JobUp(job=await asyncio.to_thread(lifecycle.find, self._api, request.name, request.namespace))
        ending = asyncio.to_thread(objects.delete, self._api, request.name, request.namespace)
        await connection.answer_pings_during(ending)
        return JobEnded()

    async def _why_not_start(self, caller: Caller, request: StartJob) -> str | None:
        if reason := await self._why_not_create(caller, request.job.namespace):
            return reason
        problems = violations(self._policy, request.job)
        return f"the policy of this gateway does not allow this job: {'; '.join(problems)}" if problems else None

    async def _start_job(self, request: StartJob, caller: Caller, connection: TextWebSocket) -> None:
        spec = apply_policy(self._policy, request.job)
        owner = owner_name(caller)
        start = partial(self._start_blocking, spec, request.timeout, owner)
        await self._pending.get_or_start((owner, spec.model_dump_json()), start).follow(connection)

    def _start_blocking(
        self, spec: JobSpec, timeout: float | None, owner: str, listener: ProgressListener
    ) -> RunningJob:
        spec = lifecycle.resolve(self._api, spec)
        pods = sum(mesh.replicas for mesh in spec.meshes)
        if pods > self._policy.max_replicas:  # the selector matches more pods than the policy allows
            raise PolicyViolation(f"{pods} pods exceed the policy's limit of {self._policy.max_replicas}")
        self._require_quota(spec, owner)

        def on_new(job: RunningJob) -> None:  # again: another job of the caller may have been created meanwhile
            self._require_quota(spec, owner)

        return lifecycle.start(self._api, spec, listener, timeout=timeout, owner=owner, on_new=on_new)

    def _require_quota(self, spec: JobSpec, owner: str) -> None:
        """Raises PolicyViolation if the caller's jobs, with this one, exceed the limits per caller."""
        namespaces = counted_namespaces(self._policy, spec.namespace)
        jobs = [job for namespace in namespaces for job in lifecycle.list_jobs(self._api, namespace)]
        if reason := exceeded_quota(self._policy, spec, owner, jobs):
            raise PolicyViolation(f"the policy of this gateway does not allow this job: {reason}")


def _audit(request: ProvisioningRequest, origin: Origin, caller: str, refused: str | None) -> None:
    job = request.job if isinstance(request, StartJob) else request
    actions: dict[type, Action] = {StartJob: "start job", FindJob: "find job", EndJob: "end job"}
    audit(actions[type(request)], origin, caller=caller, refused=refused, job=job.name, namespace=job.namespace)


class PolicyViolation(KubernetesError):
    """The operator's policy does not allow the job."""
