"""The process of a job's gateway: started on this machine, found again by its process id, and ended.

Its files are in a directory of its own, for this user only: the specification of its job, its token and its log.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshgate_processes.identity import ProcessIdentity, identify_process, last_output
from meshgate_slurm import commands
from meshgate_slurm.commands import SlurmError
from meshgate_slurm.messages import GatewayReport, Rejected, RunningSlurmJob
from meshgate_slurm.script import log_directory
from meshgate_slurm.spec import SlurmSpec

START_TIMEOUT = 120.0  # sbatch may take its time on a busy controller
END_TIMEOUT = 30.0
SUBMISSION_END_TIMEOUT = 4 * commands.TIMEOUT  # a gateway that submits its job waits for sbatch, and then cancels it
TAIL = 4096
SPEC_FILE, TOKEN_FILE, LOG_FILE = "spec.json", "token", "gateway.log"
PROCESS_FILE = "process"  # the identity of the gateway
TEMPORARY = "tmp"  # a link to the directory of temporary files, for those of a gateway that was killed
TEMPORARY_PREFIX = "meshgate-slurm-"  # not "meshgate-job-": local jobs remove unlocked directories of that name


def start_gateway(directory: Path, apply_id: str, spec: SlurmSpec) -> RunningSlurmJob | Rejected:
    """Starts a gateway with its files in ``directory``, which it creates, and waits until it has its job. Raises
    OSError. Leaves nothing behind if that fails."""
    token = write_token(directory)
    try:
        process, report = start_process(directory, spec, ["--local-socket"])
    except BaseException:
        remove_files(directory)
        raise
    if isinstance(report, Rejected):
        _end_process(process)
        remove_files(directory)
        return report
    gateway = identify_process(report.pid)
    return RunningSlurmJob(
        apply_id=apply_id,
        job_id=report.job_id,
        host=host_name(),
        directory=str(directory),
        socket=report.socket,
        pid=report.pid,
        started=gateway.started if gateway else "",
        token=token,
        meshes=spec.meshes,
        log_dir=report.log_dir,
        version=software_version(),
    )


def write_token(directory: Path) -> str:
    """Creates the directory of a gateway, with its token. Raises OSError, and leaves nothing behind if that fails."""
    directory.mkdir(mode=0o700, parents=True)
    token = secrets.token_urlsafe(32)
    try:
        write_private(directory / TOKEN_FILE, token)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return token


def start_process(
    directory: Path, spec: SlurmSpec, listen: Sequence[str]
) -> tuple[subprocess.Popen[bytes], GatewayReport | Rejected]:
    """Starts a gateway for the holders of the token in ``directory``; ends it if the start is interrupted. ``listen``:
    its options that say where."""
    write_private(directory / SPEC_FILE, spec.model_dump_json())
    announce, theirs = os.pipe()
    log = directory / LOG_FILE
    # For its engines: a unix socket in the home directory could have too long a path.
    temporary = tempfile.mkdtemp(prefix=TEMPORARY_PREFIX)
    os.symlink(temporary, directory / TEMPORARY)
    try:
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "meshgate_gateway", "--slurm-job", str(directory / SPEC_FILE)),
                    *("--token-file", str(directory / TOKEN_FILE), *listen, "--announce-fd", str(theirs)),
                    *("--lease", str(spec.lease), "--idle-timeout", str(spec.idle_timeout)),
                    *("--remove-at-end", temporary),
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
    try:
        identity = identify_process(process.pid)
        write_private(directory / PROCESS_FILE, f"{process.pid} {identity.started if identity else ''}")
        return process, _read_report(announce, process, directory)
    except BaseException:
        _end_process(process)
        raise


def _read_report(announce: int, process: subprocess.Popen[bytes], directory: Path) -> GatewayReport | Rejected:
    """Waits for what the gateway says once it has its job. Closes ``announce``."""
    with os.fdopen(announce, "rb", buffering=0) as pipe:
        line = _read_line(pipe.fileno(), time.monotonic() + START_TIMEOUT)
    try:
        report = GatewayReport.model_validate_json(line)
    except ValidationError:
        code = process.poll()
        how = f"it did not start within {START_TIMEOUT:g} s" if code is None else f"it exited with code {code}"
        return Rejected(error=f"the gateway on {host_name()} did not start: {how}", output=gateway_output(directory))
    return report if report.error is None else Rejected(error=report.error, silent=report.silent)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Ends a gateway that this program has started. If it has submitted its job, it cancels that first."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SUBMISSION_END_TIMEOUT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_line(descriptor: int, deadline: float) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (remaining := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select([descriptor], [], [], remaining)
        if not readable or not (data := os.read(descriptor, 65536)):
            break
        line += data
    return line


def write_private(path: Path, text: str) -> None:
    """Creates the file, for this user only. Raises OSError with the path, also if the disk is full."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def make_log_directory(spec: SlurmSpec) -> str:
    """Creates the directory of the job's logs, and returns its path. Raises SlurmError."""
    log_dir = log_directory(spec)
    try:
        os.makedirs(log_dir, exist_ok=True)
    except OSError as error:
        raise SlurmError(f"cannot create the directory of the logs, log_dir={log_dir!r}: {error}") from None
    if not os.access(log_dir, os.W_OK | os.X_OK):
        raise SlurmError(f"cannot write to the directory of the logs, log_dir={log_dir!r}")
    return log_dir


def end_gateway(job: RunningSlurmJob) -> None:
    """Ends the job's gateway, which runs on this machine if it does, and waits for its end."""
    _end_identified(gateway_of(job), END_TIMEOUT)


def end_leftovers(directory: Path) -> None:
    """Ends what is left of a start that was killed, if there is one: the gateway, which cancels its job, and files."""
    with contextlib.suppress(FileNotFoundError):
        pid, _, started = (directory / PROCESS_FILE).read_text().partition(" ")
        if started:
            _end_identified(ProcessIdentity(int(pid), started), SUBMISSION_END_TIMEOUT)
    remove_files(directory)


def _end_identified(process: ProcessIdentity, timeout: float) -> None:
    process.signal(signal.SIGTERM)
    if not process.wait_ended(timeout):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def remove_files(directory: Path) -> None:
    """Removes the files of a gateway that has ended, on this machine or another."""
    shutil.rmtree(os.path.realpath(directory / TEMPORARY), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)  # there are no events for these
    return True


def gateway_of(job: RunningSlurmJob) -> ProcessIdentity:
    """The process of the job's gateway, on this machine or another."""
    return ProcessIdentity(job.pid, job.started)


def gateway_output(directory: Path) -> str:
    """The last output of the gateway with this directory; "" if there is none."""
    try:
        return last_output((directory / LOG_FILE).read_text(errors="replace").strip(), TAIL)
    except OSError:
        return ""


def host_name() -> str:
    return socket.gethostname()


def software_version() -> str:
    from meshgate_wire.handshake import SOFTWARE_VERSION  # noqa: PLC0415  (only starting a job needs it)

    return SOFTWARE_VERSION


def own_address(partition: str | None) -> str:
    """The address of this machine on the network of the nodes: that of its route to one of them. Raises SlurmError."""
    node = commands.node_address(partition) or commands.node_address(None)  # of a wrong partition, sbatch complains
    if node is None:
        raise SlurmError("sinfo lists no nodes")
    try:
        found = _route_to(socket.getaddrinfo(node, 9, type=socket.SOCK_DGRAM))
    except OSError as error:
        raise SlurmError(f"this machine ({socket.gethostname()}) has no route to node {node}: {error}") from None
    return found


def _route_to(targets: Sequence[tuple[Any, ...]]) -> str:
    family, kind, _, _, target = targets[0]
    with socket.socket(family, kind) as probe:  # UDP: nothing is sent
        probe.connect(target)
        return str(ipaddress.ip_address(probe.getsockname()[0]))
