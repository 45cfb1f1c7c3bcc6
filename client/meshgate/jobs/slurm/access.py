"""How a driver submits its jobs and reaches their gateways: by a login node, or by a gateway behind a URL."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from meshgate.errors import (
    AuthenticationError,
    ConnectionFailedError,
    GatewayLostError,
    JobError,
    JobStartFailed,
    MeshgateError,
)
from meshgate.jobs.slurm.login_node import SSH_FAILED, CommandOutput, LoginNode, python_command
from meshgate.jobs.tokens import own_token, token_is_renewed, token_to_dial
from meshgate.session.dialing import (
    PING_INTERVAL,
    Dialer,
    Route,
    UrlDialer,
    call_in_thread,
    describe_response,
    is_gateway_url,
)
from meshgate.session.gateway_client import CreatesNoJobs, GatewayClient, NoReply, get
from meshgate_processes.identity import last_output
from meshgate_slurm.messages import (
    PYTHON_FILE,
    BatchRequest,
    Ended,
    EndJob,
    GatewayState,
    JobEnded,
    JobList,
    JobReport,
    JobUp,
    ProvisioningReply,
    Rejected,
    RequestRejected,
    RunningSlurmJob,
    StartJob,
    StartRequest,
    parse_reply,
    read_answer,
)

QUEUE_INTERVAL = 2.0
GONE_INTERVAL = 4.0
# A node that loses power closes no connection. With these pings, the driver knows of the loss, and asks about the job,
# within 25 s; Slurm's own limit, SlurmdTimeout, is 300 s by default.
NODE_PING_INTERVAL = 5.0
ANSWER_TIMEOUT = 200.0  # seconds; the gateway gives the login node 180
CREATES_NONE = "Pass the URL of a gateway that submits jobs to Slurm (--slurm-policy)"
MODULE = "meshgate_slurm.login"
COMMAND_NOT_FOUND = 127

Reply = TypeVar("Reply", bound=BaseModel)
Known: TypeAlias = Callable[[RunningSlurmJob], None]
"""Called as soon as a job is submitted, with what it takes to end it."""


class SlurmSilent(JobError, ConnectionFailedError):
    """Slurm's controller does not answer the login node. Nothing was done; the same can be asked again."""


class Access(Protocol):
    """All methods may block and raise JobError or GatewayError."""

    queue_interval: float
    """The seconds between two questions about a job in the queue."""

    def start(self, request: StartRequest, known: Known) -> None:
        """Submits the job; a BatchRequest is one with a client of its own. Raises JobStartFailed and SlurmSilent.

        However this ends, Ctrl-C included, the job is ended too unless ``known`` was called: the caller ends it then.
        """

    def end(self, job: RunningSlurmJob) -> None:
        """Ends the job and waits until Slurm reports the end."""

    def report(self, job: RunningSlurmJob) -> JobReport:
        """What the job's gateway reports. Raises ConnectionFailedError if it does not answer."""

    def is_running(self, job: RunningSlurmJob) -> bool: ...

    def dialer(self, job: RunningSlurmJob) -> Dialer: ...

    def close(self) -> None: ...

    def __str__(self) -> str: ...


class LoginAccess:
    """By a login node, whose ``python`` runs meshgate's program there."""

    queue_interval = QUEUE_INTERVAL

    def __init__(self, login: LoginNode, python: str) -> None:
        self._login, self._python = login, python
        login.open()

    def start(self, request: StartRequest, known: Known) -> None:
        start(self._login, request, self._python, known)

    def end(self, job: RunningSlurmJob) -> None:
        end(self._login, job, self._python)

    def report(self, job: RunningSlurmJob) -> JobReport:
        try:
            return ask_gateway(self._login.forward(job.socket), job)
        except ConnectionFailedError as error:
            why = None
            with suppress(JobError, OSError):  # unknown while the login node does not answer
                why = self._why_gone(job)
            if why is None:
                raise
            raise GatewayLostError(f"the gateway of Slurm job {job.job_id} on {job.host} is gone: {why}") from error

    def is_running(self, job: RunningSlurmJob) -> bool:
        try:
            return not self.report(job).ended
        except GatewayLostError:  # without which the workers end
            return False
        except ConnectionFailedError:  # Slurm knows the job wherever the login node's name leads to now
            if not self._ask_slurm(job).ended:
                raise
            return False

    def dialer(self, job: RunningSlurmJob) -> Dialer:
        return SlurmDialer(job, job.host, lambda: self._login.forward(job.socket), lambda: self._why_gone(job))

    def _ask_slurm(self, job: RunningSlurmJob) -> JobReport:
        return report(self._login, job, self._python)

    def _why_gone(self, job: RunningSlurmJob) -> str | None:
        state = gateway_state(self._login, job, self._python)
        if state.alive or state.host != job.host:
            return None
        output = f". Its last output:\n{last_output(state.output, 1000)}" if state.output else ""
        return f"its process on {state.host} has ended{output}"

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
        self._ended: dict[int, JobReport] = {}  # the last reports, by job

    def report(self, job: RunningSlurmJob) -> JobReport:
        if job.job_id in self._ended or job.job_id not in self._addresses:
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
        why = partial(self._why_gone, job)
        return SlurmDialer(job, "its first node", partial(self._find, job), why, ping_interval=NODE_PING_INTERVAL)

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
        if job.job_id in self._ended:  # for good, while a node without power would not even refuse a connection
            return self._ended[job.job_id]
        report = super()._ask_slurm(job)
        if report.gateway:
            self._addresses[job.job_id] = report.gateway
        elif report.ended:
            self._ended[job.job_id] = report
        return report


class UrlAccess(GatewayClient[ProvisioningReply, RequestRejected]):
    """By a gateway that submits jobs for the holder of ``own_token``, as a user that its policy names."""

    queue_interval = QUEUE_INTERVAL

    def __init__(self, url: str) -> None:
        try:
            own_token()
        except JobError as error:
            raise JobError(f"SlurmJob(gateway_url={url!r}): {error}") from None
        token = partial(token_to_dial, own_token)
        super().__init__(url, token, parse_reply, RequestRejected, CREATES_NONE, token_is_renewed)

    def start(self, request: StartRequest, known: Known) -> None:
        client = request.client if isinstance(request, BatchRequest) else None
        try:
            start = StartJob(apply_id=request.apply_id, spec=request.spec, client=client)
            reply = self._answer(start, JobUp, ANSWER_TIMEOUT)
            if isinstance(reply, JobUp):
                known(reply.job)
        except CreatesNoJobs:
            raise
        except (KeyboardInterrupt, SystemExit, JobError, NoReply):
            self._withdraw(request)
            raise
        if isinstance(reply, RequestRejected):
            if reply.silent:
                raise SlurmSilent(f"{self}: {reply.reason}")
            raise JobStartFailed(f"{self}: {reply.reason}", reply.output)

    def _withdraw(self, request: StartRequest) -> None:
        """Ends a job that the gateway submits, or has submitted, without this program knowing it. Says so if the
        gateway does not."""
        name, why = request.spec.job_name, ""
        _say(f"waiting until {self} has cancelled the submission of {name}. Ctrl-C again does not wait")
        try:
            reply = self._answer(EndJob(apply_id=request.apply_id), JobEnded, ANSWER_TIMEOUT)
            if isinstance(reply, RequestRejected) and not reply.missing:
                why = reply.reason
        except (KeyboardInterrupt, SystemExit):
            why = "interrupted"
        except MeshgateError as error:
            why = str(error)
        if why:
            _say(
                f"it is not known whether {self} has cancelled {name} ({why}). `squeue --name={name}` on the cluster "
                "lists it if not, and `scancel` with its number ends it"
            )

    def end(self, job: RunningSlurmJob) -> None:
        reply = self._answer(EndJob(apply_id=job.apply_id), JobEnded, ANSWER_TIMEOUT)
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
        return UrlDialer(f"{self._url}{self._path(job)}", job.token)

    def close(self) -> None:
        return None

    def __str__(self) -> str:
        return str(self._dialer)

    def _path(self, job: RunningSlurmJob) -> str:
        return f"/v1/jobs/{job.apply_id}"


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


def start(login: LoginNode, request: StartRequest, python: str, known: Known) -> None:
    """Submits the job, and starts its gateway if it is no batch job. Raises JobStartFailed and SlurmSilent; leaves
    nothing behind if that fails before ``known`` is called."""

    def confirm(printed: str) -> bool:
        job = _read(login, printed, RunningSlurmJob)
        if isinstance(job, RunningSlurmJob):
            known(job)
        return isinstance(job, RunningSlurmJob)

    action = "submit" if isinstance(request, BatchRequest) else "start"
    try:
        output = _run(login, partial(login.submit, confirm=confirm), python, action, request.model_dump_json())
        reply = _read(login, output.stdout, RunningSlurmJob)
        if reply is None or (isinstance(reply, RunningSlurmJob) and output.code != 0):  # the program has ended the job
            raise _no_reply(login, output, python)
    except JobError as error:
        raise JobStartFailed(str(error)) from error
    if isinstance(reply, Rejected):
        if reply.silent:
            raise SlurmSilent(f"{login}: {reply.error}")
        raise JobStartFailed(f"{login}: {reply.error}", reply.output)


def _say(line: str) -> None:
    sys.stderr.write(f"\nmeshgate: {line}\n")
    sys.stderr.flush()


def gateway_state(login: LoginNode, job: RunningSlurmJob, python: str) -> GatewayState:
    """Whether the job's gateway runs. Raises JobError if that is unknown."""
    return _require(login, _ask(login, python, "state", job.model_dump_json(), GatewayState))


def report(login: LoginNode, job: RunningSlurmJob, python: str) -> JobReport:
    """What Slurm says about a job with its gateway on a node, and where that is. Raises JobError if that is unknown."""
    return _require(login, _ask(login, python, "report", job.model_dump_json(), JobReport))


def end(login: LoginNode, job: RunningSlurmJob, python: str) -> Ended:
    """Ends the gateway and the Slurm job, and waits until Slurm reports the end. Raises JobError."""
    return _require(login, _ask(login, python, "end", job.model_dump_json(), Ended))


def list_jobs(login: LoginNode) -> JobList:
    """The jobs of this user that have not ended, submitted by any machine. Raises JobError."""
    output = _run(login, login.run, PYTHON_FILE, "list", "")
    answer = _read(login, output.stdout, JobList)
    if answer is None and output.code == COMMAND_NOT_FOUND:
        words = last_output(output.stderr.strip(), 2000)
        raise JobError(
            f"{login} has no jobs to list: {PYTHON_FILE} does not run there ({words}). Each "
            "submission by SlurmJob writes this file; submit a job if the Python of the last one is gone"
        )
    if answer is None:
        raise _no_reply(login, output, PYTHON_FILE)
    return _require(login, answer)


def _require(login: LoginNode, reply: Reply | Rejected) -> Reply:
    if isinstance(reply, Rejected):
        raise (SlurmSilent if reply.silent else JobError)(f"{login}: {reply.error}")
    return reply


def _ask(login: LoginNode, python: str, action: str, request: str, kind: type[Reply]) -> Reply | Rejected:
    output = _run(login, login.run, python, action, request)
    answer = _read(login, output.stdout, kind)
    if answer is None:
        raise _no_reply(login, output, python)
    return answer


def _run(
    login: LoginNode, run: Callable[[str, str], CommandOutput], python: str, action: str, request: str
) -> CommandOutput:
    try:
        return run(f"exec {python_command(python, '-m', MODULE, action)}", request)
    except subprocess.TimeoutExpired as error:
        raise JobError(f"{login} did not answer within {error.timeout:g} s") from None


def _read(login: LoginNode, printed: str, kind: type[Reply]) -> Reply | Rejected | None:
    try:
        return read_answer(printed, kind)
    except ValidationError as error:
        raise JobError(
            f"{login} gave a reply that this version of meshgate cannot read ({error.errors()[0]['msg']}); install "
            "the same version on both machines"
        ) from None


def _no_reply(login: LoginNode, output: CommandOutput, python: str) -> JobError | ConnectionFailedError:
    words = last_output(output.stderr.strip(), 2000)
    if output.code == SSH_FAILED:
        return ConnectionFailedError(f"the connection to {login} failed: {words}")
    if output.code == COMMAND_NOT_FOUND or "not found" in words or "No such file" in words:
        return JobError(
            f"{login} has no Python at python_exe={python!r} ({words}): pass the path of a Python there that has "
            "meshgate[gateway,worker], on a file system that the nodes share"
        )
    if f"No module named '{MODULE.partition('.')[0]}'" in words or "No module named meshgate_slurm" in words:
        return JobError(
            f"python_exe={python!r} on {login} does not have meshgate: run there\n"
            f"  {python} -m pip install 'meshgate[gateway,worker]'"
        )
    return JobError(f"the program on {login} failed with exit code {output.code}: {words or 'it gave no reason'}")


class SlurmDialer:
    """A ``Dialer``: connects again, by a new ssh connection if needed.

    ``find`` returns the path of a unix socket or ``host:port``, ``why_gone`` why the gateway will never answer again if
    that is certain. Both may block and raise JobError and OSError.
    """

    def __init__(
        self,
        job: RunningSlurmJob,
        where: str,
        find: Callable[[], str],
        why_gone: Callable[[], str | None],
        *,
        ping_interval: float = PING_INTERVAL,
    ) -> None:
        self._job, self._where, self._find, self._why_gone = job, where, find, why_gone
        self._ping_interval = ping_interval
        self._asked = -GONE_INTERVAL
        self._gone: str | None = None

    async def dial(self) -> Route:
        try:
            found = await call_in_thread(self._find)
        except JobError as error:
            raise ConnectionFailedError(str(error)) from error
        return replace(_route(found, self._job), ping_interval=self._ping_interval)

    async def gone(self) -> str | None:
        """Asks at most every ``GONE_INTERVAL``: Slurm's controller, which may be asked, serves the whole site."""
        now = asyncio.get_running_loop().time()
        if now - self._asked >= GONE_INTERVAL:
            self._asked = now
            try:
                self._gone = await call_in_thread(self._why_gone)
            except (JobError, OSError):  # unknown while the login node does not answer
                self._gone = None
        return self._gone

    def __str__(self) -> str:
        return f"the gateway of Slurm job {self._job.job_id} on {self._where}"


def ask_gateway(place: str, job: RunningSlurmJob) -> JobReport:
    """What the gateway at ``place``, a unix socket or ``host:port``, reports about its job. Raises
    ConnectionFailedError if it does not answer."""
    gateway = f"the gateway of Slurm job {job.job_id}"
    try:
        status, body, proven = get(_route(place, job), "/v1/job")
        facts = json.loads(body) if status == http.client.OK and proven else None
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise ConnectionFailedError(f"{gateway} does not answer: {error!r}") from error
    if facts is None:
        raise ConnectionFailedError(f"{gateway} answered {describe_response(status, body, proven=proven)}")
    return read_report(facts)


def read_report(facts: dict[str, Any]) -> JobReport:
    """The report in a gateway's description of its job. Raises ConnectionFailedError if it has none."""
    try:
        return JobReport.model_validate(facts["slurm"])
    except (KeyError, ValidationError) as error:
        raise ConnectionFailedError(f"the gateway does not report on a Slurm job: {error!r}") from error


def _route(place: str, job: RunningSlurmJob) -> Route:
    headers = {"Authorization": f"Bearer {job.token}"}
    if place.startswith("/"):
        return Route("ws://gateway.meshgate", unix_socket=place, headers=headers, through_proxy=False)
    return Route(f"ws://{place}", headers=headers, through_proxy=False)
