"""How a driver submits its jobs and reaches their gateways: by a login node, or by a gateway behind a URL."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import closing
from typing import Protocol

from meshgate.errors import AuthenticationError, ConnectionFailedError, GatewayLostError, JobError, JobStartFailed
from meshgate.jobs.slurm import login_program
from meshgate.jobs.slurm.dialer import SlurmDialer, ask_gateway, read_report
from meshgate.jobs.slurm.login_node import LoginNode
from meshgate.session.dialing import Dialer, UrlDialer, is_gateway_url
from meshgate.session.gateway_client import GatewayClient
from meshgate_slurm.messages import (
    BatchRequest,
    EndJob,
    JobEnded,
    JobReport,
    JobUp,
    ProvisioningReply,
    RequestRejected,
    RunningSlurmJob,
    StartJob,
    StartRequest,
    parse_reply,
)

QUEUE_INTERVAL = 2.0
ANSWER_TIMEOUT = 200.0  # seconds; the gateway gives the login node 180
CREATES_NONE = "Pass the URL of a gateway that submits jobs to Slurm (--slurm-policy)"


class Access(Protocol):
    """All methods may block and raise JobError or GatewayError."""

    queue_interval: float
    """The seconds between two questions about a job in the queue."""

    def start(self, request: StartRequest) -> RunningSlurmJob:
        """Submits the job; a BatchRequest is one with a client of its own. Raises JobStartFailed."""

    def end(self, job: RunningSlurmJob) -> None:
        """Ends the job and waits until Slurm reports the end."""

    def report(self, job: RunningSlurmJob) -> JobReport:
        """What the job's gateway reports. Raises ConnectionFailedError if it does not answer."""

    def is_running(self, job: RunningSlurmJob) -> bool: ...

    def dialer(self, job: RunningSlurmJob) -> Dialer: ...

    @property
    def connection(self) -> str | None:
        """By which another process of this machine can use the same connection, if there is one."""

    def close(self) -> None: ...

    def __str__(self) -> str: ...


class LoginAccess:
    """By a login node, whose ``python`` runs meshgate's program there."""

    queue_interval = QUEUE_INTERVAL

    def __init__(self, login: LoginNode, python: str) -> None:
        self._login, self._python = login, python
        login.open()

    def start(self, request: StartRequest) -> RunningSlurmJob:
        if isinstance(request, BatchRequest):
            return login_program.submit(self._login, request, self._python)
        return login_program.start(self._login, request.spec, request.apply_id, self._python)

    def end(self, job: RunningSlurmJob) -> None:
        login_program.end(self._login, job, self._python)

    def report(self, job: RunningSlurmJob) -> JobReport:
        return ask_gateway(self._login.forward(job.socket), job)

    def is_running(self, job: RunningSlurmJob) -> bool:
        try:
            return not self.report(job).ended
        except ConnectionFailedError:
            # Without their gateway the workers end. Slurm knows that wherever the login node's name leads to now.
            if self._why_gone(job) is None and not self._ask_slurm(job).ended:
                raise
            return False

    def dialer(self, job: RunningSlurmJob) -> Dialer:
        return SlurmDialer(job, job.host, lambda: self._login.forward(job.socket), lambda: self._why_gone(job))

    def _ask_slurm(self, job: RunningSlurmJob) -> JobReport:
        return login_program.report(self._login, job, self._python)

    def _why_gone(self, job: RunningSlurmJob) -> str | None:
        state = login_program.gateway_state(self._login, job, self._python)
        if state.alive or state.host != job.host:
            return None
        output = f". Its last output:\n{state.output[-1000:]}" if state.output else ""
        return f"its process on {state.host} has ended{output}"

    @property
    def connection(self) -> str | None:
        return self._login.connection

    def close(self) -> None:
        self._login.close()

    def __str__(self) -> str:
        return str(self._login)


class NodeAccess(LoginAccess):
    """By a login node that leads to a gateway on the first node of the allocation, once the job runs.

    Until then Slurm is asked, by a program on the login node; nothing of the job stays there.
    """

    queue_interval = 5.0

    def __init__(self, login: LoginNode, python: str) -> None:
        super().__init__(login, python)
        self._addresses: dict[int, str] = {}  # of gateways, by job

    def report(self, job: RunningSlurmJob) -> JobReport:
        if job.job_id not in self._addresses:
            report = self._ask_slurm(job)
            if not report.gateway:
                return report
        try:
            return ask_gateway(self._find(job), job)
        except ConnectionFailedError:
            report = self._ask_slurm(job)
            if not report.ended:
                raise
            return report

    def is_running(self, job: RunningSlurmJob) -> bool:
        return not self._ask_slurm(job).ended

    def dialer(self, job: RunningSlurmJob) -> Dialer:
        return SlurmDialer(job, "its first node", lambda: self._find(job), lambda: self._why_gone(job))

    def _find(self, job: RunningSlurmJob) -> str:
        if job.job_id not in self._addresses:
            report = self._ask_slurm(job)
            if not report.gateway:
                raise ConnectionFailedError(
                    report.failed or f"Slurm job {job.job_id} is {report.state}, and has no gateway yet"
                )
        return self._login.forward(self._addresses[job.job_id])

    def _why_gone(self, job: RunningSlurmJob) -> str | None:
        report = self._ask_slurm(job)
        return report.failed if report.ended else None

    def _ask_slurm(self, job: RunningSlurmJob) -> JobReport:
        report = super()._ask_slurm(job)
        if report.gateway:
            self._addresses[job.job_id] = report.gateway
        return report


class UrlAccess(GatewayClient[ProvisioningReply]):
    """By a gateway that submits jobs for the holder of ``$MESHGATE_TOKEN``, as a user that its policy names."""

    queue_interval = QUEUE_INTERVAL

    def __init__(self, url: str) -> None:
        token = os.environ.get("MESHGATE_TOKEN", "").strip()
        if not token:
            raise JobError(f"SlurmJob(gateway_url={url!r}) has no token: set MESHGATE_TOKEN to yours")
        super().__init__(url, token, os.environ.get("MESHGATE_CA") or None, parse_reply, CREATES_NONE)

    def start(self, request: StartRequest) -> RunningSlurmJob:
        client = request.client if isinstance(request, BatchRequest) else None
        reply = self._answer(StartJob(apply_id=request.apply_id, spec=request.spec, client=client))
        if isinstance(reply, JobUp):
            return reply.job
        assert isinstance(reply, RequestRejected)
        raise JobStartFailed(f"{self}: {reply.reason}", reply.output)

    def end(self, job: RunningSlurmJob) -> None:
        reply = self._answer(EndJob(apply_id=job.apply_id))
        if isinstance(reply, RequestRejected) and not reply.missing:
            raise JobError(f"{self}: {reply.reason}")

    def report(self, job: RunningSlurmJob) -> JobReport:
        return read_report(self._get(f"{self._path(job)}/v1/job", job.token))

    def is_running(self, job: RunningSlurmJob) -> bool:
        try:
            return not self.report(job).ended
        except (AuthenticationError, GatewayLostError):  # it has no such job, or the job's gateway has ended
            return False

    def dialer(self, job: RunningSlurmJob) -> Dialer:
        return UrlDialer(f"{self._url}{self._path(job)}", job.token, ca=self._ca)

    @property
    def connection(self) -> str | None:
        return None

    def close(self) -> None:
        return None

    def __str__(self) -> str:
        return str(self._dialer)

    def _path(self, job: RunningSlurmJob) -> str:
        return f"/v1/jobs/{job.apply_id}"

    def _answer(self, request: StartJob | EndJob) -> ProvisioningReply:
        replies: Generator[ProvisioningReply, None, None] = self._ask_with_retries(request, ANSWER_TIMEOUT)
        expected = JobUp if isinstance(request, StartJob) else JobEnded
        with closing(replies):
            for reply in replies:
                if isinstance(reply, (expected, RequestRejected)):
                    return reply
        raise AssertionError("the replies do not end before one of these")


def check_gateway_url(url: str | None, login: str | None, python_exe: str, gateway_on: str) -> str | None:
    """Raises ValueError unless ``url`` can be a gateway's and agrees with the other arguments."""
    if url is None:
        return None
    if login is not None:
        raise ValueError(
            f"SlurmJob(login={login!r}, gateway_url={url!r}): the gateway is on a login node; pass only one"
        )
    if gateway_on != "login":
        raise ValueError(
            f"SlurmJob(gateway_url=…, gateway_on={gateway_on!r}): the gateway behind the URL starts the gateways of "
            "its jobs on its own machine; remove gateway_on"
        )
    if not is_gateway_url(url):
        raise ValueError(f"SlurmJob(gateway_url={url!r}): expected ws://host:port or wss://host[:port]")
    if python_exe.startswith("~"):
        raise ValueError(
            f"SlurmJob(python_exe={python_exe!r}, gateway_url=…): pass an absolute path that the gateway's policy "
            "allows, or leave it out"
        )
    return url
