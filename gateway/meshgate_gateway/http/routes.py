"""The routes of the gateway: health for anyone, the job and its sessions for authenticated callers.

Checks run from cheap to expensive, so unauthenticated callers cost little: the path, the protocol version (a mismatch
is no secret and is reported before the token is checked), the credentials, then the session.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qs, urlsplit

from meshgate_gateway.hosts.provider import HostProvider, HostsUnavailable
from meshgate_gateway.http.auth import (
    END_PATH,
    JOB_IDENTITY,
    OF_RUNS,
    READING,
    RUNS_PATH,
    Action,
    Authenticator,
    Denied,
    Identity,
    Origin,
    action_of,
    audit,
    bearer_token,
    origin_of,
    prover_of,
)
from meshgate_gateway.http.messages import MalformedRequest, Request, Response
from meshgate_gateway.sessions.session_manager import END_TIMEOUT, ConnectRequest, SessionManager
from meshgate_gateway.sessions.session_table import Gone, Reject
from meshgate_wire.handshake import PROTOCOL_VERSION, PYTHON_VERSION, SOFTWARE_VERSION
from meshgate_wire.status import RunStatus, SlurmAllocation

if TYPE_CHECKING:
    from meshgate_gateway.http.metrics import Metrics

SESSION_PATH = re.compile(r"/v1/sessions/([0-9a-f]{32})")
AUDIT_INTERVAL = 60.0
"""Seconds in which a caller that reads the same again, as `meshgate logs --follow` does, is in the audit log once."""


class JobService(Protocol):
    """Handles requests below ``/v1/jobs`` in a provisioning gateway."""

    async def respond(self, path: str, request: Request, connection: socket.socket) -> Response | None: ...


class RunService(Protocol):
    """Handles authenticated requests at and below ``/v1/runs``."""

    def identify(self, token: str | None) -> Identity | None:
        """The run with this secret, unless it has ended."""

    async def statuses(self) -> tuple[RunStatus, ...]:
        """All runs, the oldest first."""

    async def respond(self, request: Request, caller: Identity, origin: Origin) -> Response: ...


@dataclass(slots=True)
class Routes:
    """Responds to requests. ``metrics`` is called at each request for them. ``job_facts``: what else ``/v1/job``
    reports; of a Slurm job, ``/v1/status`` shows the ``slurm`` among it. ``restart_reason``: why an earlier gateway of
    the job was replaced by this one, or "". ``read_sizes`` reads from the cluster how many hosts each mesh has, and
    raises HostsUnavailable. ``draining``: why the gateway accepts no more sessions; None while it does. ``name`` is the
    gateway's in proofs. ``job``: what identifies the job in the audit log, if its gateway serves one of several in a
    cluster."""

    authenticator: Authenticator
    sessions: SessionManager
    hosts: HostProvider
    metrics: Callable[[], Metrics]
    jobs: JobService | None = None
    runs: RunService | None = None
    job_facts: Callable[[], dict[str, Any]] = dict
    restart_reason: Callable[[], Awaitable[str]] | None = None
    read_sizes: Callable[[], Awaitable[None]] | None = None
    draining: str | None = None
    name: str = ""
    job: Mapping[str, str] = field(default_factory=dict)
    _read: dict[tuple[str, Action], float] = field(default_factory=dict)  # when that was audited last

    async def respond(self, request: Request, connection: socket.socket) -> Response | None:
        """The response, or None if the connection was handed over. Raises MalformedRequest."""
        path = urlsplit(request.path).path
        of_runs = self.runs is not None and (path == RUNS_PATH or path.startswith(f"{RUNS_PATH}/"))
        of_jobs = self.jobs is not None and (path == "/v1/jobs" or path.startswith("/v1/jobs/"))
        ends = request.method == "POST" and END_PATH.fullmatch(path) is not None
        reads_sizes = path == "/v1/job" and self.read_sizes is not None
        posts = request.method == "POST" and (of_runs or ends or reads_sizes or (of_jobs and path != "/v1/jobs"))
        if request.method not in ("GET", "HEAD") and not posts:
            reason = f"the method {request.method} is not allowed: use GET"
            return Response.error(HTTPStatus.METHOD_NOT_ALLOWED, reason, headers={"Allow": "GET, HEAD"})
        if session := SESSION_PATH.fullmatch(path):
            return await self._session(session[1], request, connection)
        if self.jobs is not None and of_jobs:
            return await self.jobs.respond(path, request, connection)
        if of_runs or ends or path in READING:
            return await self._of_job(path, request, origin_of(request, connection))
        if path in ("/healthz", "/readyz"):
            return self._health(path)
        known = "/v1/sessions, /v1/sessions/<id>, /v1/job, /v1/hosts, /v1/status, /v1/output, /v1/runs and /metrics"
        return Response.error(HTTPStatus.NOT_FOUND, f"this gateway serves {known}")

    def _health(self, path: str) -> Response:
        if path == "/readyz" and self.draining is not None:
            return _unavailable(self.draining)
        return Response(HTTPStatus.OK, {"status": "ok", "version": SOFTWARE_VERSION})

    async def _authenticate(
        self, action: Action, request: Request, origin: Origin, **facts: str
    ) -> Identity | Response:
        run = None if self.runs is None else self.runs.identify(bearer_token(request))
        result = run or await self.authenticator.authenticate(request)
        if isinstance(result, Identity) and (run is None or action in OF_RUNS):
            return result
        if isinstance(result, Identity):
            reason = f"the secret of a run opens the job and its sessions, no other request ({action}): ask"
            result = Denied(f"{reason} from a driver, with the job's own token (MESHGATE_TOKEN)", HTTPStatus.FORBIDDEN)
        caller = None if run is None else run.caller
        audit(action, origin, caller=caller, refused=result.reason, **facts, **self.job)
        return result.response()

    def _audit_reading(self, action: Action, origin: Origin, caller: str) -> None:
        now = time.monotonic()
        if now - self._read.get((caller, action), -AUDIT_INTERVAL) < AUDIT_INTERVAL:
            return
        self._read = {known: at for known, at in self._read.items() if now - at < AUDIT_INTERVAL}
        self._read[caller, action] = now
        audit(action, origin, caller=caller, **self.job)

    async def _job(self, request: Request) -> Response:
        if request.method == "POST" and self.read_sizes is not None:
            try:
                await self.read_sizes()
            except HostsUnavailable as error:
                return Response.error(HTTPStatus.CONFLICT, str(error))
        python = PYTHON_VERSION.rpartition(".")[0]
        counts = self.sessions.statistics()
        return Response(
            HTTPStatus.OK,
            {
                "meshes": dict(self.hosts.meshes()),
                "version": SOFTWARE_VERSION,
                "python": python,
                "sessions": counts.sessions,
                "connected": counts.connected,
                **self.job_facts(),
            },
        )

    async def _of_job(self, path: str, request: Request, origin: Origin) -> Response:
        posts = request.method == "POST"
        action = action_of(path, request.method)
        caller = await self._authenticate(action, request, origin)
        if isinstance(caller, Response):
            return caller
        if ends := END_PATH.fullmatch(path):
            return await self._end_session(ends[1], origin, caller)
        if not posts or path in READING:
            self._audit_reading(action, origin, caller.caller)
        if path in READING:
            return await self._describe(path, request, caller)
        assert self.runs is not None
        draining = posts and self.draining is not None
        return _unavailable(self.draining or "") if draining else await self.runs.respond(request, caller, origin)

    async def _describe(self, path: str, request: Request, caller: Identity) -> Response:
        inspection = self.sessions.inspection
        if path == "/metrics":
            return self.metrics().response()
        if path == "/v1/job":
            return await self._job(request)
        if path == "/v1/hosts":
            return await self._hosts(request)
        if path == "/v1/sessions":
            sessions = await inspection.sessions(caller.name)
            restarted = await self._restarted()
            body: dict[str, Any] = {
                "sessions": sessions,
                "ended": inspection.ended(caller.name),
                "restarted": restarted,
            }
        elif path == "/v1/status":
            runs = () if self.runs is None else await self.runs.statuses()
            shown = tuple(run.model_copy(update={"command": ()}) for run in runs)
            report = self.job_facts().get("slurm")
            slurm = None if report is None else SlurmAllocation.model_validate(report)
            added = {"runs": shown, "slurm": slurm}
            body = (await inspection.status()).model_copy(update=added).model_dump(mode="json")
        else:
            body = (await inspection.output(_lines_seen(request))).model_dump(mode="json")
        return Response(HTTPStatus.OK, body)

    async def _restarted(self) -> str:
        return await self.restart_reason() if self.restart_reason is not None else ""

    async def _hosts(self, request: Request) -> Response:
        """The hosts of ``?mesh=<name>``, by which a program beside the gateway attaches to them itself."""
        mesh = parse_qs(urlsplit(request.path).query, max_num_fields=16).get("mesh", [""])[-1]
        if mesh not in (meshes := self.hosts.meshes()):
            known = ", ".join(meshes) or "none"
            return Response.error(HTTPStatus.NOT_FOUND, f"the job has no mesh {mesh!r}; its meshes: {known}")
        try:
            hosts = await self.hosts.hosts(mesh)
        except HostsUnavailable as error:
            return Response.error(HTTPStatus.CONFLICT, str(error))
        return Response(HTTPStatus.OK, {"hosts": [host.model_dump(mode="json") for host in hosts]})

    async def _end_session(self, session: str, origin: Origin, caller: Identity) -> Response:
        who = caller.end_user or ("another program" if caller.name == JOB_IDENTITY else caller.name)
        ending = self.sessions.end(session, caller.name, f"{who} ended it")
        refused = ending.reason if isinstance(ending, (Gone, Reject)) else None
        audit("end session", origin, caller=caller.caller, refused=refused, session=session, **self.job)
        if isinstance(ending, (Gone, Reject)):
            return _failure(ending)
        if ending is not None:
            await asyncio.wait({ending}, timeout=END_TIMEOUT)
            if not ending.done():
                return _unavailable("the session is ending, but its engine has not exited yet")
        return Response(HTTPStatus.OK, {"session": session})

    async def _session(self, session: str, request: Request, connection: socket.socket) -> Response | None:
        # The engine completes the handshake, but an invalid one must not start a session.
        problem = "GET only" if request.method != "GET" else request.websocket_problem
        if problem is not None:
            raise MalformedRequest(HTTPStatus.BAD_REQUEST, f"a session needs a websocket handshake: {problem}")
        if mismatch := _version_mismatch(request):
            return mismatch
        origin = origin_of(request, connection)
        identity = await self._authenticate("session", request, origin, session=session)
        if isinstance(identity, Response):
            return identity
        if self.draining is not None:
            return _unavailable(self.draining)
        resume = request.header("Meshgate-Resume") == "1"
        prover = prover_of(request)
        proof = {"gateway": self.name, "proof_key": prover.key} if prover is not None else {}
        connect = ConnectRequest(session, identity.name, resume, request.head, run=identity.run, **proof)
        failure = await self.sessions.connect(connect, connection)
        if isinstance(failure, Gone) and failure.kind == "unknown" and (restarted := await self._restarted()):
            failure = replace(failure, reason=f"{failure.reason}; {restarted}")
        refused = None if failure is None else failure.reason
        audit("session", origin, caller=identity.caller, refused=refused, session=session, resume=resume, **self.job)
        return _failure(failure) if failure else None


def _lines_seen(request: Request) -> dict[str, int]:
    """The number of the last line that the caller has of each session: ``?<session>=<number>&…``."""
    try:
        seen = parse_qs(urlsplit(request.path).query, strict_parsing=False, max_num_fields=256)
        return {session: int(numbers[-1]) for session, numbers in seen.items()}
    except ValueError:
        reason = "the query of /v1/output must be <session>=<number of the last line you have>, joined by &"
        raise MalformedRequest(HTTPStatus.BAD_REQUEST, reason) from None


def _failure(failure: Gone | Reject) -> Response:
    if isinstance(failure, Gone):
        facts: dict[str, Any] = {"kind": failure.kind, "reason": failure.reason, "output": failure.output}
        return Response.error(HTTPStatus.GONE, f"the session has ended: {failure.reason}", **facts)
    if failure.forbidden:
        return Response.error(HTTPStatus.FORBIDDEN, failure.reason)
    return _unavailable(failure.reason)


def _version_mismatch(request: Request) -> Response | None:
    protocol = request.header("Meshgate-Protocol")
    if protocol == str(PROTOCOL_VERSION):
        return None
    software = request.header("Meshgate-Version")
    ours = f"this gateway speaks protocol {PROTOCOL_VERSION} (meshgate {SOFTWARE_VERSION})"
    client = f"the client {_protocol(protocol)}" + (f" (meshgate {software[:20]})" if software else "")
    newer = protocol is not None and protocol.isdecimal() and int(protocol[:9]) > PROTOCOL_VERSION
    return Response.error(
        HTTPStatus.UPGRADE_REQUIRED,
        f"{ours}, {client}: upgrade the {'gateway' if newer else 'client'}",
        protocol=PROTOCOL_VERSION,
        version=SOFTWARE_VERSION,
        headers={"Upgrade": "websocket"},
    )


def _protocol(version: str | None) -> str:
    return f"speaks protocol {version[:20]}" if version else "names no protocol"


def _unavailable(reason: str) -> Response:
    return Response.error(HTTPStatus.SERVICE_UNAVAILABLE, reason, headers={"Retry-After": "1"})
