"""Creates jobs for callers without permissions of their own, within the operator's policy.

A caller opens a websocket at ``/v1/jobs``, sends one request and receives progress until the result. Requests below
``/v1/jobs/<namespace>/<name>`` are forwarded unread to that job's gateway. A caller never gets the token of a job: its
own identity leads there, for as long as ``Access`` lets it.

A job takes long to start, and an ingress may close any connection, some after 30 s regardless of traffic. The caller
then reconnects, repeats its request and follows the job from its current state. If the caller closes its websocket, or
does not return in time, the job is deleted, unless it existed before the request.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from pydantic import ValidationError

from meshgate_gateway.http.auth import Action, Origin, TokenAuthenticator, audit
from meshgate_gateway.http.kubernetes_auth import KubernetesUsers
from meshgate_gateway.http.messages import Request, Response
from meshgate_gateway.http.text_websocket import TextWebSocket
from meshgate_gateway.logs import EventLog
from meshgate_gateway.provisioning.access import END, SCALE, USE, Access, Caller, owner_name
from meshgate_gateway.provisioning.conversations import Conversations
from meshgate_gateway.provisioning.growth import Growth
from meshgate_gateway.provisioning.job_proxy import JobProxy
from meshgate_gateway.provisioning.policy import (
    Policy,
    PolicyViolation,
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
    JobProgress,
    JobsListed,
    JobUp,
    ListJobs,
    ObjectCreated,
    ProvisioningReply,
    ProvisioningRequest,
    RequestRejected,
    ScaleJob,
    StartJob,
    encode_reply,
    parse_request,
    rejection,
)
from meshgate_kubernetes.manifests.spec import JobSpec, Object
from meshgate_kubernetes.status.readiness import Progress

LISTED_TOGETHER = 500
JOB_PATH = re.compile(r"/v1/jobs/([a-z0-9-]{1,63})/([a-z0-9-]{1,63})(/v1/.*)")
log = EventLog()

MAX_THREADS = 64
RECONNECT_TIMEOUT = 20.0
CLOSE_TIMEOUT = 10.0
SEND_TIMEOUT = 60.0

Start = Callable[["PendingJob"], RunningJob]
End = Callable[[RunningJob], None]
Key = tuple[str, str]
"""The caller and its request."""


class Provisioner:
    """Handles the requests below ``/v1/jobs``."""

    def __init__(self, api: Api, policy: Policy, token: TokenAuthenticator, users: KubernetesUsers) -> None:
        self._api, self._policy = api, policy
        self._access = Access(api, policy, token, users)
        self._conversations: Conversations[Caller] = Conversations(self._access.identify, self._converse)
        self._proxy = JobProxy(api, self._access)
        self._growth = Growth(api, policy, self._list_counted)
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
        if isinstance(request, ScaleJob):
            owner = owner_name(caller)
            change = partial(self._growth.change, request, owner)
            await self._pending.get_or_start((owner, request.model_dump_json()), change).follow(connection)
            return None
        if isinstance(request, ListJobs):
            await self._list_jobs(request, caller, connection)
            return None
        if isinstance(request, FindJob):
            found = await asyncio.to_thread(lifecycle.find, self._api, request.name, request.namespace)
            return JobUp(job=found.without_token())
        uid = request.uid or None  # checked as the deletion begins: another job may have taken the name meanwhile
        ending = asyncio.to_thread(objects.delete, self._api, request.name, request.namespace, uid=uid)
        await connection.answer_pings_during(ending)
        return JobEnded()

    async def _why_not(self, caller: Caller, request: ProvisioningRequest) -> str | None:
        """Why the request is refused; None if it is not. Raises NotFound."""
        if isinstance(request, ListJobs):  # the list has what the caller may use
            return None
        if not isinstance(request, StartJob):
            needed = USE if isinstance(request, FindJob) else SCALE if isinstance(request, ScaleJob) else END
            uid = "" if isinstance(request, FindJob) else request.uid
            denied = await self._access.why_not(caller, request.name, request.namespace, needed, uid)
            if denied is None and isinstance(request, ScaleJob):
                return await asyncio.to_thread(self._growth.why_not, request)
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
        self, spec: JobSpec, timeout: float | None, owner: str, groups: tuple[str, ...], pending: PendingJob
    ) -> RunningJob:
        spec = lifecycle.resolve(self._api, spec)
        pods = sum(mesh.replicas for mesh in spec.meshes)
        if pods > self._policy.max_replicas:  # the selector matches more pods than the policy allows
            raise PolicyViolation(f"{pods} pods exceed the policy's limit of {self._policy.max_replicas}")
        self._require_quota(spec, owner)

        def on_new(job: RunningJob) -> None:
            pending.is_new = True
            self._require_quota(spec, owner)  # again: another job of the caller may have been created meanwhile

        job = lifecycle.start(self._api, spec, pending, timeout=timeout, owner=owner, groups=groups, on_new=on_new)
        return job.without_token()

    def _list_counted(self, namespace: str) -> list[ListedJob]:
        return self._list_blocking(counted_namespaces(self._policy, namespace))

    def _require_quota(self, spec: JobSpec, owner: str) -> None:
        """Raises PolicyViolation if the caller's jobs, with this one, exceed the limits per caller."""
        reason = exceeded_quota(self._policy, spec, owner, self._growth.counted(self._list_counted(spec.namespace)))
        if refused := job_not_allowed([reason] if reason else []):
            raise PolicyViolation(refused)


def _audit(request: ProvisioningRequest, origin: Origin, caller: str, refused: str | None) -> None:
    actions: dict[type, Action] = {
        StartJob: "start job",
        FindJob: "find job",
        ListJobs: "list jobs",
        ScaleJob: "scale job",
        EndJob: "end job",
    }
    job = request.job if isinstance(request, StartJob) else request
    names = {} if isinstance(job, ListJobs) else {"job": job.name}
    audit(actions[type(request)], origin, caller=caller, refused=refused, **names, namespace=job.namespace)


class PendingJobs:
    """The jobs that are starting, one for each caller and request."""

    def __init__(self, end: End) -> None:
        """``end`` ends a job whose caller has gone. It blocks and raises KubernetesError."""
        self._end = end
        self._jobs: dict[Key, PendingJob] = {}
        # Separate threads: each blocks for as long as a job takes to start, and other requests must not wait for it.
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="meshgate-start-job")

    def get_or_start(self, key: Key, start: Start) -> PendingJob:
        """The pending job for ``key``; if there is none, starts one by ``start`` on a thread."""
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = PendingJob(self._threads, start, self._end, lambda: self._remove(key))
        return job

    def _remove(self, key: Key) -> None:
        self._jobs.pop(key, None)

    async def close(self) -> None:
        """Abandons all pending jobs and waits up to ``CLOSE_TIMEOUT`` seconds for their deletion."""
        if deleting := [job.abandon() for job in list(self._jobs.values())]:
            await asyncio.wait(deleting, timeout=CLOSE_TIMEOUT)
        self._threads.shutdown(wait=False, cancel_futures=True)


class PendingJob:
    """One job that is starting or changing, and the connections that follow it. A ProgressListener on the thread that
    does the work."""

    def __init__(self, threads: ThreadPoolExecutor, start: Start, end: End, on_settled: Callable[[], None]) -> None:
        """``on_settled`` is called once, when no further connection may follow the job."""
        self._threads, self._end, self._on_settled = threads, end, on_settled
        self.is_new = False  # set by ``start`` once it has created a job, instead of finding one
        self._loop = asyncio.get_running_loop()
        self._connections: set[TextWebSocket] = set()
        self._settled = False
        self._abandon_timer: asyncio.TimerHandle | None = None
        self._deleting: asyncio.Task[None] | None = None
        self._starting = asyncio.create_task(self._start(start))

    async def follow(self, connection: TextWebSocket) -> None:
        """Reports progress and the result over ``connection``; returns once the result is sent or the caller has
        disconnected."""
        if self._abandon_timer is not None:
            self._abandon_timer.cancel()
        self._connections.add(connection)
        disconnected = asyncio.create_task(connection.wait_closed())
        try:
            await asyncio.wait([self._starting, disconnected], return_when=asyncio.FIRST_COMPLETED)
            if self._starting.done() and await connection.send(encode_reply(self._starting.result())):
                self._settle()
        finally:
            disconnected.cancel()
            self._connections.discard(connection)
            if not self._connections and not self._settled:
                delay = 0 if connection.closed_by_peer else RECONNECT_TIMEOUT
                self._abandon_timer = self._loop.call_later(delay, self.abandon)

    def abandon(self) -> asyncio.Task[None]:
        """Deletes the job if it is new. The returned task is done once nothing of it is left."""
        if self._deleting is None:
            self._settle()
            self._deleting = asyncio.create_task(self._delete())
        return self._deleting

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            self._on_settled()

    async def _delete(self) -> None:
        reply = await self._starting  # the next progress report aborts it
        if isinstance(reply, JobUp) and self.is_new:
            try:
                await self._loop.run_in_executor(self._threads, self._end, reply.job)
            except KubernetesError as error:
                log.warning("cannot delete an abandoned job", job=reply.job.name, reason=str(error))

    async def _start(self, start: Start) -> ProvisioningReply:
        try:
            return JobUp(job=await self._loop.run_in_executor(self._threads, start, self))
        except KubernetesError as error:
            return rejection(error)
        except Exception as fault:
            log.exception("cannot start or scale a job")
            return RequestRejected(reason=f"internal error in the gateway: {fault!r}; please report it as a bug")

    # --- on the thread that starts the job ----------------------------------------------------------------

    def created(self, obj: Object) -> None:
        self._report(ObjectCreated(kind=obj["kind"], name=obj["metadata"]["name"]))

    def progress(self, progress: Progress) -> None:
        self._report(JobProgress(progress=progress))

    def _report(self, reply: ProvisioningReply) -> None:
        if self._deleting is not None:
            raise KubernetesError("the caller has disconnected")
        asyncio.run_coroutine_threadsafe(self._send(encode_reply(reply)), self._loop).result(SEND_TIMEOUT)

    async def _send(self, text: str) -> None:
        for connection in list(self._connections):
            await connection.send(text)
