"""``python -m meshgate_slurm.login ACTION``: what the client runs on the login node, usually over ssh.

Reads a line with a JSON object from stdin and writes one line to stdout: ``MARK`` and a JSON object. ``start`` submits
a job, and starts a gateway that outlives this program unless the job starts it on its first node; ``submit`` submits a
job with a client of its own; ``state`` is about a gateway here, ``report`` about a job with its gateway on a node;
``end`` ends any job and waits until Slurm reports the end; ``list`` lists the jobs that any machine of the user has
submitted.

After the reply about a job that it has submitted, this program waits for ``CONFIRMATION`` on stdin. If stdin ends
instead, its client was interrupted, killed or cut off, and it ends the job: no job is left that no client knows of. For
the same reason it ignores signals.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from meshgate_slurm import commands
from meshgate_slurm.commands import SlurmError, Unanswered
from meshgate_slurm.gateway_process import (
    end_gateway,
    end_leftovers,
    gateway_of,
    gateway_output,
    host_name,
    make_log_directory,
    remove_files,
    software_version,
    start_gateway,
    wait_until,
    write_token,
)
from meshgate_slurm.messages import (
    ADDRESS_FILE,
    CONFIRMATION,
    MARK,
    BatchRequest,
    Ended,
    GatewayAddress,
    GatewayState,
    JobReport,
    Rejected,
    RunningSlurmJob,
    StartRequest,
)
from meshgate_slurm.records import forget_job, list_jobs, record_job
from meshgate_slurm.script import batch_log, client_script, gateway_script, log_directory
from meshgate_slurm.spec import SlurmSpec
from meshgate_slurm.status import REQUEUED, UNKNOWN, JobStatus, last_lines, missing_log, read_end

JOB_END_TIMEOUT = 20.0
GATEWAY_TIMEOUT = 300.0  # seconds from the start of the job until the gateway on its first node must be known
CONFIRMATION_TIMEOUT = 60.0  # seconds; a client that has stopped, or is cut off unnoticed, keeps no job for longer
CLAIM_TIMEOUT = 150.0  # seconds; less than those that clients wait for the reply
NEEDED = ("monarch", "pydantic_settings", "uvloop")


def main() -> None:
    actions: Mapping[str, Callable[[str], BaseModel]] = {
        "start": _start,
        "submit": _submit,
        "state": _state,
        "report": _report,
        "end": _end,
        "list": lambda _: list_jobs(),
    }
    action = actions.get(sys.argv[1] if len(sys.argv) == 2 else "")
    if action is None:
        raise SystemExit(f"usage: python -m meshgate_slurm.login {'|'.join(actions)}")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)  # unlike SIG_IGN, not inherited by the gateway
    try:
        reply = action(sys.stdin.readline())
    except (SlurmError, OSError) as error:
        reply = Rejected(error=str(error), silent=isinstance(error, Unanswered))
    except ValidationError as error:
        reply = Rejected(error=f"invalid request; do both sides have the same version of meshgate? {error}")
    written = _write(reply)
    if isinstance(reply, RunningSlurmJob) and not (written and _confirmed()):
        _end(reply.model_dump_json())
        raise SystemExit(1)


def _confirmed() -> bool:
    """Whether the client knows of the job."""
    readable, _, _ = select.select([sys.stdin], [], [], CONFIRMATION_TIMEOUT)
    return bool(readable) and sys.stdin.readline() == CONFIRMATION


def _write(reply: BaseModel) -> bool:
    """Returns whether the client can still have read it."""
    try:
        sys.stdout.write(f"{MARK}{reply.model_dump_json()}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # which the interpreter flushes at the end
        return False
    return True


# --- start -------------------------------------------------------------------------------------------------


def _start(text: str) -> BaseModel:
    request = StartRequest.model_validate_json(text)
    _require_packages()
    _claim(request.apply_id)
    cluster = commands.cluster_name()
    directory = Path.home() / ".meshgate" / "slurm" / request.apply_id
    end_leftovers(directory)
    if request.spec.gateway_on == "login":
        return _recorded(start_gateway(directory, request.apply_id, request.spec), request.spec, cluster)
    token = write_token(directory)
    try:
        spec = commands.with_share(request.spec)
        script = gateway_script(spec, sys.executable, make_log_directory(spec), str(directory))
        job = _submit_script(request.apply_id, spec, script, str(Path.home()), directory=str(directory), token=token)
        return _recorded(job, request.spec, cluster)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _submit(text: str) -> BaseModel:
    request = BatchRequest.model_validate_json(text)
    _require_packages()
    _claim(request.apply_id)
    cluster = commands.cluster_name()
    spec = commands.with_share(request.spec)
    script = client_script(spec, sys.executable, make_log_directory(spec), request.client)
    job = _submit_script(request.apply_id, spec, script, os.path.expanduser(request.directory))
    return _recorded(job, request.spec, cluster)


def _recorded(reply: RunningSlurmJob | Rejected, spec: SlurmSpec, cluster: str) -> RunningSlurmJob | Rejected:
    """Records the job, with its cluster. If that fails, ends it."""
    if isinstance(reply, RunningSlurmJob):
        reply = reply.model_copy(update={"cluster": cluster})
        try:
            record_job(reply, spec, cluster)
        except BaseException:
            _end(reply.model_dump_json())
            raise
    return reply


def _claim(apply_id: str) -> None:
    """Makes this program the only one on this machine that submits the job, until it exits. A provisioning gateway that
    was restarted meanwhile asks again: the program that its predecessor started ends what it has submitted first."""
    claim = socket.socket(socket.AF_UNIX)

    def bound() -> bool:
        try:
            claim.bind(f"\0meshgate-slurm-{os.getuid()}-{apply_id}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        return True

    if not wait_until(bound, CLAIM_TIMEOUT):
        claim.close()
        raise SlurmError(f"another program on {host_name()} has been submitting this job for {CLAIM_TIMEOUT:g} s")
    claim.detach()  # open until this program exits, so that the kernel keeps the name


def _submit_script(
    apply_id: str, spec: SlurmSpec, script: str, working_directory: str, *, directory: str = "", token: str = ""
) -> RunningSlurmJob:
    """Submits a job whose gateway is not on this machine."""
    job_id, log_dir = commands.submit(script, directory=working_directory), log_directory(spec)
    return RunningSlurmJob(
        apply_id=apply_id,
        job_id=job_id,
        host="",
        directory=directory,
        socket="",
        pid=0,
        started="",
        token=token,
        meshes=spec.meshes,
        log_dir=log_dir,
        batch_log=batch_log(spec, log_dir, str(job_id)),
        version=software_version(),
    )


def _require_packages() -> None:
    """Raises SlurmError."""
    missing = [name for name in NEEDED if not importlib.util.find_spec(name)]
    if missing:
        raise SlurmError(
            f"{sys.executable} on {host_name()} lacks {', '.join(missing)}: run "
            f"{sys.executable} -m pip install 'meshgate[gateway,worker]' there"
        )


# --- state and end -----------------------------------------------------------------------------------------


def _state(text: str) -> BaseModel:
    job = RunningSlurmJob.model_validate_json(text)
    ended = gateway_of(job).ended
    return GatewayState(host=host_name(), alive=not ended, output=gateway_output(Path(job.directory)) if ended else "")


def _report(text: str) -> BaseModel:
    job = RunningSlurmJob.model_validate_json(text)
    known = commands.jobs([job.job_id]).get(job.job_id)
    status = JobStatus(job_id=job.job_id, state=UNKNOWN) if known is None else known
    if status.restarts and not status.ended and not os.path.isdir(job.directory):  # removed at the end of the gateway
        status = status.model_copy(update={"state": REQUEUED})
    report = JobReport.of(status, sum(job.meshes.values()))
    if report.pending:
        return report
    if report.ended:
        why = f"{report.why}{_problem_of_first_node(status)}"
        failed = f"{why}{missing_log(status, job.batch_log)}{_last_lines(job)}"
        return report.model_copy(update={"why": why, "failed": failed})
    try:
        found = GatewayAddress.model_validate_json((Path(job.directory) / ADDRESS_FILE).read_bytes())
    except FileNotFoundError:
        if status.expected_start is not None and time.time() - status.expected_start > GATEWAY_TIMEOUT:
            problem = (
                f"the gateway on the first node of Slurm job {job.job_id} did not leave its address in {job.directory} "
                f"within {GATEWAY_TIMEOUT:g} s; do {host_name()} and the nodes share this directory?{_last_lines(job)}"
            )
            return report.model_copy(update={"failed": problem})
        return report
    return report.model_copy(update={"gateway": found.address})


def _problem_of_first_node(status: JobStatus) -> str:
    """That of the gateway's node, with which the job ends: Slurm may say no more than that a signal ended a script."""
    failed = status.state == "NODE_FAIL" or (status.state == "FAILED" and status.signal)
    if not failed or not status.batch_host:
        return ""
    with contextlib.suppress(SlurmError):
        if problem := commands.node_problem(status.batch_host):
            return f". The gateway was on node {status.batch_host}, which is {problem}"
    return ""


def _last_lines(job: RunningSlurmJob) -> str:
    """The ends of the logs of the job's script and gateway."""
    gateway = gateway_output(Path(job.directory))
    return last_lines(read_end(job.batch_log), "the batch script") + last_lines(gateway, "the gateway")


def _end(text: str) -> BaseModel:
    job = RunningSlurmJob.model_validate_json(text)
    if job.host == host_name():
        end_gateway(job)
    commands.cancel(job.job_id)  # its gateway has done so, unless it was killed, or ends when it sees that
    state = _wait_job_ended(job.job_id)
    if job.directory and job.host in ("", host_name()):
        remove_files(Path(job.directory))
    with contextlib.suppress(SlurmError, OSError):  # the job has ended: if its record is left, ``list`` removes it
        forget_job(job.job_id)
    return Ended(state=state)


def _wait_job_ended(job_id: int) -> str:
    """The last state of the job. Raises SlurmError if it does not end in time."""
    state = ""

    def ended() -> bool:
        nonlocal state
        status = commands.jobs([job_id]).get(job_id)
        state = status.state if status else state
        return status is None or status.ended

    if not wait_until(ended, JOB_END_TIMEOUT):
        raise SlurmError(f"Slurm job {job_id} is still {state} {JOB_END_TIMEOUT:g} s after scancel; see squeue")
    return state


if __name__ == "__main__":
    main()
