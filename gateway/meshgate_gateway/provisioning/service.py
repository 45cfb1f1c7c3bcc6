"""Creates jobs for callers without permissions of their own, within the operator's policy.

A caller opens a websocket at ``/v1/jobs``, sends one request and receives progress until the result. Requests below
``/v1/jobs/<namespace>/<name>`` are forwarded unread to that job's gateway. A caller never gets the token of a job: its
own identity leads there, for as long as ``Access`` lets it.
"""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import replace
from functools import partial

from pydantic import ValidationError

from meshgate_gateway.http.auth import Action, Origin, TokenAuthenticator, audit
from meshgate_gateway.http.kubernetes_auth import KubernetesUsers
from meshgate_gateway.http.messages import Request, Response
from meshgate_gateway.http.text_websocket import TextWebSocket
from meshgate_gateway.provisioning.access import END, USE, Access, Caller, owner_name
from meshgate_gateway.provisioning.conversations import Conversations
from meshgate_gateway.provisioning.job_proxy import JobProxy
from meshgate_gateway.provisioning.pending_jobs import PendingJobs
from meshgate_gateway.provisioning.policy import (
    Policy,
    apply_policy,
    counted_namespaces,
    exceeded_quota,
    searched_namespaces,
    violations,
)
from meshgate_gateway.provisioning.refusals import job_not_allowed
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import KubernetesError, NotFound
from meshgate_kubernetes.jobs import lifecycle, objects
from meshgate_kubernetes.jobs.lifecycle import ListedJob, RunningJob
from meshgate_kubernetes.jobs.provisioning_messages import (
    EndJob,
    FindJob,
    JobEnded,
    JobsListed,
    JobUp,
    ListJobs,
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

LISTED_TOGETHER = 500
JOB_PATH = re.compile(r"/v1/jobs/([a-z0-9-]{1,63})/([a-z0-9-]{1,63})(/v1/.*)")


class Provisioner:
    """Handles the requests below ``/v1/jobs``."""

    def __init__(self, api: Api, policy: Policy, token: TokenAuthenticator, users: KubernetesUsers) -> None:
        self._api, self._policy = api, policy
        self._access = Access(api, policy, token, users)
        self._conversations: Conversations[Caller] = Conversations(self._access.identify, self._converse)
        self._proxy = JobProxy(api, self._access)
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
        try:
            refused = await self._why_not(caller, request)
        except NotFound as missing:
            _audit(request, origin, owner_name(caller), str(missing))
            raise
        _audit(request, origin, owner_name(caller), refused)
        if refused is not None:
            return RequestRejected(reason=refused)
        if isinstance(request, StartJob):
            await self._start_job(request, caller, connection)
            return None
        if isinstance(request, ListJobs):
            await self._list_jobs(request, caller, connection)
            return None
        if isinstance(request, FindJob):
            found = await asyncio.to_thread(lifecycle.find, self._api, request.name, request.namespace)
            return JobUp(job=_without_token(found))
        ending = asyncio.to_thread(objects.delete, self._api, request.name, request.namespace)
        await connection.answer_pings_during(ending)
        return JobEnded()

    async def _why_not(self, caller: Caller, request: ProvisioningRequest) -> str | None:
        """Why the request is refused; None if it is not. Raises NotFound."""
        if isinstance(request, ListJobs):  # the list has what the caller may use
            return None
        if not isinstance(request, StartJob):
            needed = USE if isinstance(request, FindJob) else END
            denied = await self._access.why_not(caller, request.name, request.namespace, needed)
            return denied.reason if denied is not None else None
        if reason := await self._access.why_not_create(caller, request.job.namespace):
            return reason
        return job_not_allowed(violations(self._policy, request.job))

    async def _list_jobs(self, request: ListJobs, caller: Caller, connection: TextWebSocket) -> None:
        searched = [request.namespace] if request.namespace is not None else searched_namespaces(self._policy)
        jobs = await connection.answer_pings_during(asyncio.to_thread(self._list_blocking, searched))
        found = await self._access.usable(caller, jobs)
        for start in range(0, max(len(found), 1), LISTED_TOGETHER):
            end = start + LISTED_TOGETHER
            await connection.send(encode_reply(JobsListed(jobs=tuple(found[start:end]), more=end < len(found))))

    def _list_blocking(self, namespaces: list[str]) -> list[ListedJob]:
        return [job for namespace in namespaces for job in lifecycle.list_jobs(self._api, namespace)]

    async def _start_job(self, request: StartJob, caller: Caller, connection: TextWebSocket) -> None:
        spec = apply_policy(self._policy, request.job)
        owner = owner_name(caller)
        start = partial(self._start_blocking, spec, request.timeout, owner, self._access.sharing_groups(caller))
        await self._pending.get_or_start((owner, spec.model_dump_json()), start).follow(connection)

    def _start_blocking(
        self, spec: JobSpec, timeout: float | None, owner: str, groups: tuple[str, ...], listener: ProgressListener
    ) -> RunningJob:
        spec = lifecycle.resolve(self._api, spec)
        pods = sum(mesh.replicas for mesh in spec.meshes)
        if pods > self._policy.max_replicas:  # the selector matches more pods than the policy allows
            raise PolicyViolation(f"{pods} pods exceed the policy's limit of {self._policy.max_replicas}")
        self._require_quota(spec, owner)

        def on_new(job: RunningJob) -> None:  # again: another job of the caller may have been created meanwhile
            self._require_quota(spec, owner)

        return _without_token(
            lifecycle.start(self._api, spec, listener, timeout=timeout, owner=owner, groups=groups, on_new=on_new)
        )

    def _require_quota(self, spec: JobSpec, owner: str) -> None:
        """Raises PolicyViolation if the caller's jobs, with this one, exceed the limits per caller."""
        jobs = self._list_blocking(counted_namespaces(self._policy, spec.namespace))
        reason = exceeded_quota(self._policy, spec, owner, jobs)
        if refused := job_not_allowed([reason] if reason else []):
            raise PolicyViolation(refused)


def _audit(request: ProvisioningRequest, origin: Origin, caller: str, refused: str | None) -> None:
    actions: dict[type, Action] = {
        StartJob: "start job",
        FindJob: "find job",
        ListJobs: "list jobs",
        EndJob: "end job",
    }
    job = request.job if isinstance(request, StartJob) else request
    names = {} if isinstance(job, ListJobs) else {"job": job.name}
    audit(actions[type(request)], origin, caller=caller, refused=refused, **names, namespace=job.namespace)


def _without_token(job: RunningJob) -> RunningJob:
    return job.model_copy(update={"token": ""})


class PolicyViolation(KubernetesError):
    """The operator's policy does not allow the job."""
