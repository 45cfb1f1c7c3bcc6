"""Submits Slurm jobs for callers that have only a token, within the operator's policy, and leads to their gateways.

A caller opens a websocket at ``/v1/jobs``, sends one request and receives one reply. Requests below
``/v1/jobs/<id>`` are forwarded unread to that job's gateway, which is a process of the job's user on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import re
import socket
import struct
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import async_timeout
from pydantic import SecretStr, ValidationError

from meshgate_gateway.http.auth import (
    Denied,
    Identity,
    Origin,
    TokenAuthenticator,
    action_of,
    audit,
    bearer_token,
    busy,
    credentials_for,
    digest_of,
    origin_of,
)
from meshgate_gateway.http.forwarding import forward_bytes
from meshgate_gateway.http.messages import Request, Response
from meshgate_gateway.http.text_websocket import TextWebSocket
from meshgate_gateway.logs import EventLog
from meshgate_gateway.provisioning.conversations import Conversations
from meshgate_gateway.provisioning.refusals import at_limit, job_not_allowed
from meshgate_gateway.provisioning.slurm_policy import (
    DEFAULT_PYTHON,
    Caller,
    SlurmPolicy,
    read_slurm_policy,
    slurm_violations,
    why_not_use,
)
from meshgate_gateway.provisioning.slurm_submission import Account, Record, Submissions
from meshgate_processes.identity import last_output
from meshgate_slurm.commands import SlurmError, Unanswered
from meshgate_slurm.messages import (
    BatchRequest,
    EndJob,
    JobEnded,
    JobUp,
    ProvisioningReply,
    ProvisioningRequest,
    Rejected,
    RequestRejected,
    StartJob,
    StartRequest,
    parse_request,
)
from meshgate_wire.fields import first_problem

log = EventLog()

JOB_PATH = re.compile(r"/v1/jobs/([0-9a-f-]{8,64})(/v1/.*)")
MAX_THREADS = 32
MAX_CONNECTIONS = 512
MAX_WITHDRAWN = 1024
CONNECT_TIMEOUT = 5.0
HOME = "~"  # where batch jobs run


@dataclass(frozen=True, slots=True)
class Owner:
    """A caller, and the user that its jobs run as. ``operator``: has the gateway's own token, and may end every job."""

    name: str
    user: str | None
    operator: bool = False


def create_slurm_provisioner(policy: Path, token: TokenAuthenticator) -> SlurmProvisioner:
    """A provisioning service of this machine. Raises ValueError if the policy is unusable, OSError if the records of
    earlier jobs cannot be read."""
    return SlurmProvisioner(read_slurm_policy(policy, os.getuid()), token, Submissions())


class SlurmProvisioner:
    """Handles the requests below ``/v1/jobs``."""

    def __init__(self, policy: SlurmPolicy, token: TokenAuthenticator, submissions: Submissions) -> None:
        self._policy, self._token, self._submissions = policy, token, submissions
        self._conversations = Conversations(self._authenticate, self._converse)
        self._forwarding: set[asyncio.Task[None]] = set()
        # By owner: one start after the other, so that limits hold and a repeated request finds its job.
        self._turns: dict[str, asyncio.Lock] = {}
        self._starting: Counter[tuple[str, str]] = Counter()  # requests to start, by owner and job
        # Of clients that were interrupted: the end may arrive before the start that it is for.
        self._withdrawn: deque[tuple[str, str]] = deque(maxlen=MAX_WITHDRAWN)
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="meshgate-slurm")

    async def respond(self, path: str, request: Request, connection: socket.socket) -> Response | None:
        """The response, or None if the connection was taken over. Raises MalformedRequest."""
        if job := JOB_PATH.fullmatch(path):
            response = await self._forward(job[1], job[2], request, connection)
            return None if response is None else replace(response, for_job=True)
        return await self._conversations.open(path, request, connection)

    async def close(self) -> None:
        """Ends connections. Jobs that are starting or running continue."""
        await self._conversations.close()
        for task in self._forwarding:
            task.cancel()
        await asyncio.gather(*self._forwarding, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- callers

    async def _authenticate(self, request: Request) -> Owner | Denied:
        result = await self._token.authenticate(request)
        if isinstance(result, Identity):
            return Owner("token", None, operator=True)
        caller = self._caller(bearer_token(request) or "")
        if caller is None:
            return Denied("no caller of this gateway has the presented token: set MESHGATE_TOKEN to yours")
        return Owner(f"caller:{caller.name}", caller.user)

    def _caller(self, token: str) -> Caller | None:
        digest = digest_of(token).hex()
        return next(
            (caller for caller in self._policy.callers if hmac.compare_digest(caller.token_sha256, digest)), None
        )

    # --- requests

    async def _converse(self, connection: TextWebSocket, owner: Owner, origin: Origin) -> None:
        text = await connection.receive()
        if text is None:
            return
        try:
            request = parse_request(text)
        except ValidationError as error:
            problem = f"{first_problem(error)}; do both sides have the same version of meshgate?"
            reply: ProvisioningReply = RequestRejected(reason=problem)
        else:
            reply = await connection.answer_pings_during(self._handle(request, owner, origin))
        await connection.send(reply.model_dump_json())

    async def _handle(self, request: ProvisioningRequest, owner: Owner, origin: Origin) -> ProvisioningReply:
        if isinstance(request, StartJob):
            return await self._start(request, owner, origin)
        return await self._end(request, owner, origin)

    async def _start(self, request: StartJob, owner: Owner, origin: Origin) -> ProvisioningReply:
        """Submits the job. A caller that was cut off asks again, and gets the same job."""
        refused = self._why_not(request, owner)
        facts = {"job": request.apply_id, "user": owner.user, "name": request.spec.job_name}
        audit("start job", origin, caller=owner.name, refused=refused, **facts)
        if refused is not None:
            return RequestRejected(reason=refused)
        starting = (owner.name, request.apply_id)
        self._starting[starting] += 1
        try:
            async with self._turn(owner):
                return await self._run(self._submit_blocking, request, owner)
        finally:
            self._starting[starting] -= 1
            self._starting += Counter()  # drops those without requests

    def _turn(self, owner: Owner) -> asyncio.Lock:
        return self._turns.setdefault(owner.name, asyncio.Lock())

    def _why_not(self, request: StartJob, owner: Owner) -> str | None:
        if owner.user is None and os.getuid() == 0:
            return (
                "this gateway runs as root, and no job may: use the token of one of the callers in its policy, not the "
                "gateway's own"
            )
        return job_not_allowed(slurm_violations(self._policy, request.spec, batch=request.client is not None))

    def _submit_blocking(self, request: StartJob, owner: Owner) -> ProvisioningReply:
        if (owner.name, request.apply_id) in self._withdrawn:
            return RequestRejected(reason=f"job {request.apply_id} was ended before it started", missing=True)
        known = self._submissions.find(request.apply_id)
        if known is not None:
            return JobUp(job=known.job) if known.owner == owner.name else _missing(request.apply_id)
        limit = self._policy.max_jobs_per_caller
        if limit is not None and len(running := self._submissions.running(owner.name)) >= limit:
            numbers = ", ".join(str(record.job.job_id) for record in running)
            return RequestRejected(
                reason=f"the limit of Slurm jobs per caller is {limit}, and these of {owner.name} have not ended: "
                f"{numbers}. End one first"
            )
        chosen = request.spec.python_exe
        account = Account(user=owner.user, python=self._policy.python if chosen == DEFAULT_PYTHON else chosen)
        start = StartRequest(apply_id=request.apply_id, spec=request.spec)
        if request.client is not None:
            start = BatchRequest(apply_id=request.apply_id, spec=request.spec, client=request.client, directory=HOME)
        record = self._submissions.start(owner.name, account, start)
        if isinstance(record, Rejected):
            return RequestRejected(reason=record.error, output=record.output, silent=record.silent)
        return JobUp(job=record.job)

    async def _end(self, request: EndJob, owner: Owner, origin: Origin) -> ProvisioningReply:
        record = self._submissions.find(request.apply_id)
        if record is None:
            self._withdrawn.append((owner.name, request.apply_id))
        if self._starting[owner.name, request.apply_id]:
            async with self._turn(owner):
                record = self._submissions.find(request.apply_id)
        if record is None or not (owner.operator or owner.name == record.owner):
            missing = _missing(request.apply_id)
            audit("end job", origin, caller=owner.name, refused=missing.reason, job=request.apply_id)
            return missing
        audit("end job", origin, caller=owner.name, job=request.apply_id)
        return await self._run(lambda: JobEnded(state=self._submissions.end(record)))

    async def _run(self, work: Any, *arguments: Any) -> ProvisioningReply:
        """Runs ``work`` on a thread; its errors become the reply."""
        try:
            reply: ProvisioningReply = await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        except (SlurmError, OSError) as error:
            return RequestRejected(reason=str(error), silent=isinstance(error, Unanswered))
        return reply

    # --- the way to a job's gateway

    async def _forward(self, apply_id: str, path: str, request: Request, connection: socket.socket) -> Response | None:
        """Authenticates by the job's own token, so that no other caller finds out whether the job exists."""
        verb = action_of(path, request.method)
        audited = partial(audit, "forward", origin_of(request, connection), verb=verb, job=apply_id)
        record = self._submissions.find(apply_id)
        expected = record.job.token if record is not None and record.job.token else os.urandom(32).hex()
        presented = bearer_token(request) or ""
        if record is None or not hmac.compare_digest(digest_of(presented), digest_of(expected)):
            refused = f"no job {apply_id} accepts these credentials (it may have ended)"
            audited(caller=None, refused=refused)
            return Response.error(HTTPStatus.UNAUTHORIZED, refused, headers={"WWW-Authenticate": "Bearer"})
        if denied := why_not_use(self._policy, record.owner, submits=verb == "submit run"):
            audited(caller=record.owner, refused=denied)
            return Response.error(HTTPStatus.CONFLICT if verb == "submit run" else HTTPStatus.FORBIDDEN, denied)
        if len(self._forwarding) >= MAX_CONNECTIONS:
            return at_limit(MAX_CONNECTIONS).response()
        upstream = socket.socket(socket.AF_UNIX)
        try:
            await _connect(upstream, record)
        except (OSError, asyncio.TimeoutError, SlurmError) as error:
            upstream.close()
            return await self._why_silent(record, str(error) or "it does not answer")
        audited(caller=record.owner)
        credentials = credentials_for(request, record.owner, SecretStr(presented))
        task = asyncio.create_task(forward_bytes(connection.dup(), request, path, upstream, credentials))
        self._forwarding.add(task)
        task.add_done_callback(self._forwarding.discard)
        return None

    async def _why_silent(self, record: Record, problem: str) -> Response:
        """Ends the session of a client whose gateway has ended; others try again."""
        try:
            state = await asyncio.get_running_loop().run_in_executor(self._threads, record.gateway_state)
        except SlurmError as error:
            return busy(f"the gateway of the job does not answer ({problem}; {error}): retry later").response()
        if state.alive:
            return busy(f"the gateway of the job does not answer ({problem}): retry later").response()
        reason = f"its process on {state.host} has ended"
        reason += f". Its last output:\n{last_output(state.output, 1000)}" if state.output else ""
        return Response.error(HTTPStatus.GONE, f"the job's gateway is gone: {reason}", kind="unknown", reason=reason)


async def _connect(upstream: socket.socket, record: Record) -> None:
    """Raises SlurmError if the socket is not one of the job's user: the path is from a program of that user."""
    upstream.setblocking(False)
    loop = asyncio.get_running_loop()
    async with async_timeout.timeout(CONNECT_TIMEOUT):
        await loop.sock_connect(upstream, record.job.socket)
    credentials = upstream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    with contextlib.suppress(KeyError):
        if uid == record.account.entry().pw_uid:
            return
    raise SlurmError("its socket belongs to another user")


def _missing(apply_id: str) -> RequestRejected:
    return RequestRejected(reason=f"you have no job {apply_id} here (it may have ended)", missing=True)
