"""What the client exchanges with the program on the login node, or with a provisioning gateway, as JSON, and what a
gateway says about its job.

A client sends a provisioning gateway one request on a websocket, as a text message, and receives one reply.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from meshgate_slurm.spec import SlurmSpec
from meshgate_slurm.status import JobStatus

ADDRESS_FILE = "address.json"  # in the directory of a job with its gateway on a node: a GatewayAddress
JOB_FILE = "MESHGATE_SLURM_JOB"  # the variable with the path of the file that describes a batch job to its client
PYTHON_FILE = "~/.meshgate/slurm/python"  # a program that runs the Python of the last submission
MARK = "meshgate-slurm: "  # begins the line with the reply: shell start-up files may print other lines
CONFIRMATION = "confirmed\n"  # from the client that has read the reply about the job that it submits

ApplyId = Annotated[str, Field(pattern=r"^[0-9a-f-]{8,64}$")]
AnswerT = TypeVar("AnswerT", bound=BaseModel)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class StartRequest(_Model):
    apply_id: ApplyId
    spec: SlurmSpec


class BatchRequest(StartRequest):
    """A job whose client is ``client``, a command that runs in ``directory`` of the first node."""

    client: str = Field(min_length=1)
    directory: str


class RunningSlurmJob(_Model):
    """What a client needs to find a job again. ``host`` is the machine of its gateway, ``socket`` a unix socket there,
    ``pid`` and ``started`` identify the gateway's process. A job with its gateway on its first node has none of
    them, and ``directory`` is where that gateway leaves its address. A batch job, whose gateway only its own client
    uses, has no ``token`` either. Clusters number their jobs alike: ``cluster`` is Slurm's ``ClusterName``."""

    apply_id: ApplyId
    job_id: int
    cluster: str = ""
    host: str
    directory: str
    socket: str
    pid: int
    started: str
    token: str = Field(repr=False)
    meshes: dict[str, int]
    log_dir: str
    batch_log: str = ""
    version: str = ""


def surrounding_job() -> RunningSlurmJob | None:
    """The batch job that this program is the client of, if any."""
    path = os.environ.get(JOB_FILE)
    return None if path is None else RunningSlurmJob.model_validate_json(Path(path).read_bytes())


class GatewayAddress(_Model):
    """What a gateway on a node leaves in its job's directory: ``host:port`` on the network of the nodes."""

    address: str


class Rejected(_Model):
    """Why the login node could not do what was asked; ``output`` is the last output of the gateway, if any. ``silent``:
    nothing was done, because Slurm's controller does not answer; it may be asked again."""

    error: str
    output: str = ""
    silent: bool = False


class GatewayState(_Model):
    """``alive``: whether the gateway's process runs, as far as ``host`` can tell; True if it was started elsewhere."""

    host: str
    alive: bool
    output: str = ""


class Ended(_Model):
    """The job has ended: its last state, in Slurm's word."""

    state: str = ""


class GatewayReport(_Model):
    """What the gateway announces to the program that started it."""

    url: str = ""
    pid: int = 0
    socket: str = ""
    job_id: int = 0
    log_dir: str = ""
    error: str | None = None
    silent: bool = False  # as of Rejected


class JobReport(_Model):
    """The job as its gateway sees it, or Slurm while there is none. ``why`` says why it waits or has ended; ``failed``
    why its workers cannot be used. ``registered`` counts workers that have connected, ``ready`` those that still are.
    ``gateway`` is the address of a gateway on a node, once it has one. ``time_limit`` is in seconds. What Slurm has
    allocated is a ``SlurmAllocation`` of the gateway's status as well."""

    job_id: int
    state: str
    why: str = ""
    expected_start: float | None = None
    end_time: float | None = None
    ended: bool = False
    pending: bool = False
    registered: int = 0
    ready: int = 0
    nodes: int = 0
    failed: str | None = None
    gateway: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    time_limit: float | None = None
    seconds_left: float | None = None

    @classmethod
    def of(cls, status: JobStatus, nodes: int, *, failed: str | None = None) -> JobReport:
        """What Slurm says. The workers are not counted."""
        why = status.why_pending() if status.pending else status.describe_end() if status.ended else ""
        return cls(
            job_id=status.job_id,
            state=status.state,
            why=why,
            expected_start=status.expected_start if status.pending else None,
            end_time=status.end_time,
            ended=status.ended,
            pending=status.pending,
            nodes=nodes,
            failed=failed,
            partition=status.partition,
            account=status.account,
            qos=status.qos,
            time_limit=None if status.time_limit is None else 60.0 * status.time_limit,
            seconds_left=status.seconds_left(),
        )


class RecordedJob(_Model):
    """What the cluster keeps of a job for other machines of its user. ``created`` is in seconds since 1970."""

    created: float
    job: RunningSlurmJob
    spec: SlurmSpec


class ListedJob(_Model):
    """A recorded job that has not ended. ``age``: the seconds since its submission."""

    job: RunningSlurmJob
    spec: SlurmSpec
    report: JobReport
    age: float


class JobList(_Model):
    """``unreadable``: the numbers of other jobs, which another version of meshgate has recorded."""

    jobs: tuple[ListedJob, ...] = ()
    unreadable: tuple[int, ...] = ()


def read_answer(output: str, kind: type[AnswerT]) -> AnswerT | Rejected | None:
    """The answer of the program on the login node, in its output; None if there is none. Raises ValidationError if this
    version cannot read it."""
    line = next((line for line in output.splitlines() if line.startswith(MARK)), None)
    if line is None:
        return None
    # First, because a model without required fields, such as an empty list of jobs, can be read from a rejection.
    with contextlib.suppress(ValidationError):
        return Rejected.model_validate_json(line[len(MARK) :])
    return kind.model_validate_json(line[len(MARK) :])


def run_submission(
    command: Sequence[str], request: str, confirm: Callable[[str], bool], timeout: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs ``command``, which leads to the program on the login node, with a request to submit a job.

    ``confirm`` receives what the program has printed, up to its reply, and returns whether the caller knows of the job
    from now on. Otherwise the program ends the job again, and exits with another code than 0. This can be interrupted
    at any time, since the program then finds that its input has ended. Raises OSError and TimeoutExpired.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryFile() as errors:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(command, bufsize=0, **pipes, **options)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin, process.stdout:
                _send(process.stdin, f"{request}\n")
                printed = _read(process.stdout, timeout, deadline, until=_has_reply)
                if _has_reply(printed) and confirm(printed.decode(errors="replace")):
                    _send(process.stdin, CONFIRMATION)
                process.stdin.close()
                printed += _read(process.stdout, timeout, deadline)
            code = process.wait(max(deadline - time.monotonic(), 1))
        except BaseException:
            threading.Thread(target=process.wait, daemon=True).start()  # it ends what it has started
            raise
        errors.seek(0)
        words = errors.read().decode(errors="replace")
    return subprocess.CompletedProcess(command, code, printed.decode(errors="replace"), words)


def _read(pipe: IO[bytes], timeout: float, deadline: float, until: Callable[[bytes], bool] | None = None) -> bytes:
    """What comes ``until`` that is true of it, or else until the end."""
    printed = b""
    while until is None or not until(printed):
        readable, _, _ = select.select([pipe], [], [], max(deadline - time.monotonic(), 0))
        if not readable:
            raise subprocess.TimeoutExpired("the program on the login node", timeout)
        if not (data := os.read(pipe.fileno(), 65536)):
            break
        printed += data
    return printed


def _send(pipe: IO[bytes], text: str) -> None:
    data = text.encode()
    with contextlib.suppress(BrokenPipeError):  # the program has ended: what it printed and its exit code say why
        while data:
            data = data[os.write(pipe.fileno(), data) :]


def _has_reply(printed: bytes) -> bool:
    lines = printed.splitlines(keepends=True)
    return any(line.startswith(MARK.encode()) and line.endswith(b"\n") for line in lines)


# --- with a provisioning gateway


class StartJob(_Model):
    """Submit this job, or return it if that has been done. With ``client``, it is a batch job with this command, which
    runs in the caller's home."""

    ask: Literal["start"] = "start"
    apply_id: ApplyId
    spec: SlurmSpec
    client: Annotated[str, Field(min_length=1, max_length=65_536)] | None = None


class EndJob(_Model):
    """End a job. The reply follows when Slurm reports its end."""

    ask: Literal["end"] = "end"
    apply_id: ApplyId


class JobUp(_Model):
    """The job is in the queue, and its gateway runs."""

    say: Literal["up"] = "up"
    job: RunningSlurmJob


class JobEnded(_Model):
    say: Literal["ended"] = "ended"
    state: str = ""


class RequestRejected(_Model):
    """``missing``: the caller has no such job. ``output`` and ``silent`` are as of Rejected."""

    say: Literal["refused"] = "refused"
    reason: str
    output: str = ""
    missing: bool = False
    silent: bool = False


ProvisioningRequest: TypeAlias = StartJob | EndJob
ProvisioningReply: TypeAlias = JobUp | JobEnded | RequestRejected
_requests: TypeAdapter[ProvisioningRequest] = TypeAdapter(Annotated[ProvisioningRequest, Field(discriminator="ask")])
_replies: TypeAdapter[ProvisioningReply] = TypeAdapter(Annotated[ProvisioningReply, Field(discriminator="say")])


def parse_request(text: str | bytes) -> ProvisioningRequest:
    """Raises ``pydantic.ValidationError`` for an invalid message."""
    return _requests.validate_json(text)


def parse_reply(text: str | bytes) -> ProvisioningReply:
    """Raises ``pydantic.ValidationError`` for an invalid message."""
    return _replies.validate_json(text)
