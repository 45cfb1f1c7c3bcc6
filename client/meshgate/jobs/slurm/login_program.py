"""Starts, finds and ends jobs by the program ``meshgate_slurm.login`` on the login node."""

from __future__ import annotations

import subprocess
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from meshgate.errors import ConnectionFailedError, JobError, JobStartFailed
from meshgate.jobs.slurm.login_node import LoginNode, Output, python_command
from meshgate.jobs.slurm.ssh import SSH_FAILED
from meshgate_slurm.messages import (
    BatchRequest,
    Ended,
    GatewayState,
    JobReport,
    Rejected,
    RunningSlurmJob,
    StartRequest,
    read_answer,
)
from meshgate_slurm.spec import SlurmSpec

MODULE = "meshgate_slurm.login"
COMMAND_NOT_FOUND = 127

Reply = TypeVar("Reply", bound=BaseModel)


def start(login: LoginNode, spec: SlurmSpec, apply_id: str, python: str) -> RunningSlurmJob:
    """Submits the job and starts its gateway. Raises JobStartFailed, and leaves nothing behind, if that fails."""
    return _start(login, python, "start", StartRequest(apply_id=apply_id, spec=spec))


def submit(login: LoginNode, request: BatchRequest, python: str) -> RunningSlurmJob:
    """Submits a job with a client of its own. Raises JobStartFailed."""
    return _start(login, python, "submit", request)


def _start(login: LoginNode, python: str, action: str, request: StartRequest) -> RunningSlurmJob:
    try:
        reply = _ask(login, python, action, request.model_dump_json(), RunningSlurmJob)
    except JobError as error:
        raise JobStartFailed(str(error)) from error
    if isinstance(reply, Rejected):
        raise JobStartFailed(f"{login}: {reply.error}", reply.output)
    return reply


def gateway_state(login: LoginNode, job: RunningSlurmJob, python: str) -> GatewayState:
    """Whether the job's gateway runs. Raises JobError if that is unknown."""
    return _require(login, _ask(login, python, "state", job.model_dump_json(), GatewayState))


def report(login: LoginNode, job: RunningSlurmJob, python: str) -> JobReport:
    """What Slurm says about a job with its gateway on a node, and where that is. Raises JobError if that is unknown."""
    return _require(login, _ask(login, python, "report", job.model_dump_json(), JobReport))


def end(login: LoginNode, job: RunningSlurmJob, python: str) -> Ended:
    """Ends the gateway and the Slurm job, and waits until Slurm reports the end. Raises JobError."""
    return _require(login, _ask(login, python, "end", job.model_dump_json(), Ended))


def _require(login: LoginNode, reply: Reply | Rejected) -> Reply:
    if isinstance(reply, Rejected):
        raise JobError(f"{login}: {reply.error}")
    return reply


def _ask(login: LoginNode, python: str, action: str, request: str, kind: type[Reply]) -> Reply | Rejected:
    try:
        output = login.run(f"exec {python_command(python, '-m', MODULE, action)}", request)
    except subprocess.TimeoutExpired as error:
        raise JobError(f"{login} did not answer within {error.timeout:g} s") from None
    try:
        answer = read_answer(output.stdout, kind)
    except ValidationError as error:
        raise JobError(
            f"{login} gave a reply that this version of meshgate cannot read ({error.errors()[0]['msg']}); install "
            "the same version on both machines"
        ) from None
    if answer is None:
        raise _no_reply(login, output, python)
    return answer


def _no_reply(login: LoginNode, output: Output, python: str) -> JobError | ConnectionFailedError:
    words = output.stderr.strip()[-2000:]
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
