"""``python -m meshgate_slurm.login start|submit|state|end``: what the client runs on the login node, usually over ssh.

Reads one JSON object from stdin and writes one line to stdout: ``MARK`` and a JSON object. ``start`` starts a gateway
that outlives this program and submits the job; ``submit`` submits a job with a client of its own; ``end`` ends either
and waits until Slurm reports the end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from meshgate_slurm import commands
from meshgate_slurm.errors import SlurmError
from meshgate_slurm.messages import (
    MARK,
    BatchRequest,
    Ended,
    GatewayReport,
    GatewayState,
    Rejected,
    RunningSlurmJob,
    StartRequest,
)
from meshgate_slurm.script import client_script, log_directory
from meshgate_slurm.spec import SlurmSpec

__all__ = ["end_gateway", "main", "start_gateway", "write_private"]

START_TIMEOUT = 120.0  # sbatch may take its time on a busy controller
GATEWAY_END_TIMEOUT = 30.0
JOB_END_TIMEOUT = 20.0
TAIL = 4096
SPEC_FILE, TOKEN_FILE, LOG_FILE = "spec.json", "token", "gateway.log"
NEEDED = ("monarch", "pydantic_settings", "structlog", "uvloop")


def main() -> None:
    actions: Mapping[str, Callable[[str], BaseModel]] = {
        "start": _start,
        "submit": _submit,
        "state": _state,
        "end": _end,
    }
    action = actions.get(sys.argv[1] if len(sys.argv) == 2 else "")
    if action is None:
        raise SystemExit(f"usage: python -m meshgate_slurm.login {'|'.join(actions)}")
    try:
        reply = action(sys.stdin.read())
    except (SlurmError, OSError) as error:
        reply = Rejected(error=str(error))
    except ValidationError as error:
        reply = Rejected(error=f"invalid request; do both sides have the same version of meshgate? {error}")
    sys.stdout.write(f"{MARK}{reply.model_dump_json()}\n")


# --- start -------------------------------------------------------------------------------------------------


def _start(text: str) -> BaseModel:
    request = StartRequest.model_validate_json(text)
    _require_packages()
    return start_gateway(Path.home() / ".meshgate" / "slurm" / request.apply_id, request.apply_id, request.spec)


def _submit(text: str) -> BaseModel:
    request = BatchRequest.model_validate_json(text)
    _require_packages()
    spec = commands.with_share(request.spec)
    log_dir = log_directory(spec)
    os.makedirs(log_dir, exist_ok=True)
    script = client_script(spec, sys.executable, log_dir, request.client)
    return RunningSlurmJob(
        apply_id=request.apply_id,
        job_id=commands.submit(script, directory=os.path.expanduser(request.directory)),
        host="",
        directory="",
        socket="",
        pid=0,
        started="",
        token="",
        meshes=spec.meshes,
        log_dir=log_dir,
        version=_version(),
    )


def _require_packages() -> None:
    """Raises SlurmError."""
    missing = [name for name in NEEDED if not importlib.util.find_spec(name)]
    if missing:
        raise SlurmError(
            f"{sys.executable} on {_host()} lacks {', '.join(missing)}: run "
            f"{sys.executable} -m pip install 'meshgate[gateway,worker]' there"
        )


def start_gateway(directory: Path, apply_id: str, spec: SlurmSpec) -> RunningSlurmJob | Rejected:
    """Starts a gateway with its files in ``directory``, which it creates, and waits until it has its job. Raises
    OSError. Leaves nothing behind if that fails."""
    directory.mkdir(mode=0o700, parents=True)
    token = secrets.token_urlsafe(32)
    try:
        write_private(directory / SPEC_FILE, spec.model_dump_json())
        write_private(directory / TOKEN_FILE, token)
        process, report = _start_process(directory, spec)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    if isinstance(report, Rejected):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
        return report
    return RunningSlurmJob(
        apply_id=apply_id,
        job_id=report.job_id,
        host=_host(),
        directory=str(directory),
        socket=report.socket,
        pid=report.pid,
        started=_started(report.pid) or "",
        token=token,
        meshes=spec.meshes,
        log_dir=report.log_dir,
        version=_version(),
    )


def _start_process(directory: Path, spec: SlurmSpec) -> tuple[subprocess.Popen[bytes], GatewayReport | Rejected]:
    announce, theirs = os.pipe()
    log = directory / LOG_FILE
    try:
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "meshgate_gateway", "--slurm-job", str(directory / SPEC_FILE)),
                    *("--token-file", str(directory / TOKEN_FILE), "--local-socket", "--announce-fd", str(theirs)),
                    *("--lease", str(spec.lease), "--idle-timeout", str(spec.idle_timeout)),
                ],
                cwd=Path.home(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs,),
                start_new_session=True,
            )
    finally:
        os.close(theirs)
    with os.fdopen(announce, "rb", buffering=0) as pipe:
        line = _read_line(pipe.fileno(), time.monotonic() + START_TIMEOUT)
    try:
        report = GatewayReport.model_validate_json(line)
    except ValidationError:
        code = process.poll()
        how = f"it did not start within {START_TIMEOUT:g} s" if code is None else f"it exited with code {code}"
        return process, Rejected(error=f"the gateway on {_host()} did not start: {how}", output=_tail(log))
    return process, report if report.error is None else Rejected(error=report.error)


def _read_line(descriptor: int, deadline: float) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (remaining := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select([descriptor], [], [], remaining)
        if not readable or not (data := os.read(descriptor, 65536)):
            break
        line += data
    return line


def write_private(path: Path, text: str) -> None:
    """Creates the file, for this user only."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


# --- state and end -----------------------------------------------------------------------------------------


def _state(text: str) -> BaseModel:
    job = RunningSlurmJob.model_validate_json(text)
    alive = bool(job.started) and _started(job.pid) == job.started
    return GatewayState(host=_host(), alive=alive, output="" if alive else _tail(Path(job.directory) / LOG_FILE))


def _end(text: str) -> BaseModel:
    job = RunningSlurmJob.model_validate_json(text)
    if job.host != _host():
        commands.cancel(job.job_id)  # the gateway, out of reach here, ends when it sees that
        return Ended(state=_wait_job_ended(job.job_id))
    end_gateway(job)
    commands.cancel(job.job_id)  # the gateway has done so, unless it was killed
    state = _wait_job_ended(job.job_id)
    shutil.rmtree(job.directory, ignore_errors=True)
    return Ended(state=state)


def end_gateway(job: RunningSlurmJob) -> None:
    """Ends the job's gateway, which runs on this machine if it does, and waits for its end."""
    if job.started and _started(job.pid) == job.started:
        os.kill(job.pid, signal.SIGTERM)
        if not _wait(lambda: _started(job.pid) != job.started, GATEWAY_END_TIMEOUT):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


def _wait_job_ended(job_id: int) -> str:
    """The last state of the job. Raises SlurmError if it does not end in time."""
    state = ""

    def ended() -> bool:
        nonlocal state
        status = commands.jobs([job_id]).get(job_id)
        state = status.state if status else state
        return status is None or status.ended

    if not _wait(ended, JOB_END_TIMEOUT):
        raise SlurmError(f"Slurm job {job_id} is still {state} {JOB_END_TIMEOUT:g} s after scancel; see squeue")
    return state


def _wait(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)  # there are no events for these
    return True


def _started(pid: int) -> str | None:
    """When the process started, in clock ticks since boot: a process id may be used again. None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _tail(log: Path) -> str:
    try:
        return log.read_bytes()[-TAIL:].decode(errors="replace").strip()
    except OSError:
        return ""


def _host() -> str:
    return socket.gethostname()


def _version() -> str:
    from meshgate_wire.version import SOFTWARE_VERSION  # noqa: PLC0415  (only ``start`` needs it)

    return SOFTWARE_VERSION


if __name__ == "__main__":
    main()
