"""The Slurm jobs that a gateway has submitted for others: started and ended as their users, and recorded in files.

Each job has a gateway process of its own, which runs as the job's user and outlives this one. So this gateway can be
restarted at any time, and finds the jobs again by its records. What it runs as a user, it does not trust: that user may
choose the Python that runs there.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from meshgate_gateway.logs import EventLog
from meshgate_processes.identity import last_output
from meshgate_slurm import commands
from meshgate_slurm.commands import SlurmError
from meshgate_slurm.gateway_process import write_private
from meshgate_slurm.messages import (
    BatchRequest,
    Ended,
    GatewayState,
    Rejected,
    RunningSlurmJob,
    StartRequest,
    read_answer,
    run_submission,
)

log = EventLog()

AnswerT = TypeVar("AnswerT", bound=BaseModel)
Completed: TypeAlias = "subprocess.CompletedProcess[str]"
RECORDS = Path("~/.meshgate/slurm/provisioned")
COMMAND_TIMEOUT = 180.0
KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "SLURM_CONF", "SLURM_CLUSTERS", "MESHGATE_RUNS")


class Account(BaseModel):
    """A user of the cluster, and the Python that runs as this user. ``user`` None: the gateway's own."""

    model_config = ConfigDict(frozen=True)

    user: str | None
    python: str

    def entry(self) -> pwd.struct_passwd:
        """Raises KeyError if there is no such user any more."""
        return pwd.getpwuid(os.getuid()) if self.user is None else pwd.getpwnam(self.user)

    def run(self, action: str, request: BaseModel, kind: type[AnswerT]) -> AnswerT | Rejected:
        """Runs the program of the login node as this user. Blocks. Raises SlurmError if it does not answer."""

        def run(command: Sequence[str], request: str, **options: Any) -> Completed:
            captured: dict[str, Any] = {"capture_output": True, "text": True, "timeout": COMMAND_TIMEOUT}
            ran: Completed = subprocess.run(command, input=request, check=False, **captured, **options)
            return ran

        return self._ask(action, request, kind, run)[0]

    def submit(self, request: StartRequest, known: Callable[[RunningSlurmJob], None]) -> RunningSlurmJob | Rejected:
        """Submits a job as this user; a BatchRequest is one without a gateway. Blocks. Raises SlurmError.

        However this ends, also with this process, the job is ended too unless ``known`` has returned.
        """

        def confirm(printed: str) -> bool:
            job = read_answer(printed, RunningSlurmJob)
            if not isinstance(job, RunningSlurmJob):
                return False
            known(job)
            return True

        def run(command: Sequence[str], request: str, **options: Any) -> Completed:
            return run_submission(command, request, confirm, COMMAND_TIMEOUT, **options)

        action = "submit" if isinstance(request, BatchRequest) else "start"
        reply, ran = self._ask(action, request, RunningSlurmJob, run)
        if isinstance(reply, RunningSlurmJob) and ran.returncode != 0:
            raise SlurmError(f"Slurm job {reply.job_id} was cancelled: this gateway did not confirm it in time")
        return reply

    def _ask(
        self, action: str, request: BaseModel, kind: type[AnswerT], run: Callable[..., Completed]
    ) -> tuple[AnswerT | Rejected, Completed]:
        try:
            entry = self.entry()
            command = [self.python, "-m", "meshgate_slurm.login", action]
            place = {"cwd": entry.pw_dir, "env": _environment(entry), **_credentials(entry)}
            ran = run(command, request.model_dump_json(), **place)
            answer = read_answer(ran.stdout, kind)
        except KeyError:
            raise SlurmError(f"the gateway's machine has no user {self.user!r}") from None
        except subprocess.TimeoutExpired:
            raise SlurmError(f"the login node did not answer within {COMMAND_TIMEOUT:g} s") from None
        except (OSError, ValidationError) as error:
            raise SlurmError(f"cannot run {self.python} as {entry.pw_name}: {error}") from None
        if answer is None:
            words = last_output(ran.stderr.strip(), 2000) or "it gave no reason"
            raise SlurmError(f"{self.python} failed as {entry.pw_name} with exit code {ran.returncode}: {words}")
        return answer, ran


def _environment(entry: pwd.struct_passwd) -> Mapping[str, str]:
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {**kept, "HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name, "SHELL": entry.pw_shell}


def _credentials(entry: pwd.struct_passwd) -> dict[str, Any]:
    if entry.pw_uid == os.getuid():
        return {}
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}


class Record(BaseModel):
    """A job, the caller that owns it, and the account that it runs as."""

    model_config = ConfigDict(frozen=True)

    owner: str
    account: Account
    job: RunningSlurmJob

    def gateway_state(self) -> GatewayState:
        """Whether the job's gateway runs. Blocks. Raises SlurmError."""
        state = self.account.run("state", self.job, GatewayState)
        if isinstance(state, Rejected):
            raise SlurmError(state.error)
        return state


class Submissions:
    """The recorded jobs, by their ids. Methods block, except ``find``; all others raise SlurmError and OSError."""

    def __init__(self, directory: Path | None = None) -> None:
        """Reads the records. Raises OSError."""
        self._directory = directory or RECORDS.expanduser()
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._records: dict[str, Record] = {}
        for path in self._directory.glob("*.json"):
            try:
                record = Record.model_validate_json(path.read_bytes())
            except ValidationError as error:
                log.warning("unreadable record of a job", path=str(path), reason=str(error))
            else:
                self._records[record.job.apply_id] = record

    def find(self, apply_id: str) -> Record | None:
        return self._records.get(apply_id)

    def running(self, owner: str) -> list[Record]:
        """The owner's jobs that have not ended, as Slurm says. Removes what is left of the others."""
        owned = [record for record in list(self._records.values()) if record.owner == owner]
        known = commands.jobs(record.job.job_id for record in owned) if owned else {}
        running = []
        for record in owned:
            status = known.get(record.job.job_id)
            if status is None or status.ended:
                self._forget(record)
            else:
                running.append(record)
        return running

    def start(self, owner: str, account: Account, request: StartRequest) -> Record | Rejected:
        """Submits the job; a BatchRequest is one without a gateway."""
        kept: list[Record] = []

        def known(job: RunningSlurmJob) -> None:
            if job.apply_id != request.apply_id:
                raise SlurmError("the login node started another job than the one that was requested")
            kept.append(Record(owner=owner, account=account, job=job))
            self._keep(kept[0])

        try:
            job = account.submit(request, known)
        except BaseException:
            if (record := self._records.get(request.apply_id)) is not None:
                self._forget(record)
            raise
        return job if isinstance(job, Rejected) else kept[0]  # which may have been ended since

    def _keep(self, record: Record) -> None:
        path = self._path(record.job.apply_id)
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)  # of a gateway that was killed
        write_private(new, record.model_dump_json())
        os.replace(new, path)  # at once with its content
        self._records[record.job.apply_id] = record

    def end(self, record: Record) -> str:
        """Ends the job and returns its last state. The record goes once Slurm reports the end."""
        ended = record.account.run("end", record.job, Ended)
        if isinstance(ended, Rejected):
            raise SlurmError(ended.error)
        self._path(record.job.apply_id).unlink(missing_ok=True)
        self._records.pop(record.job.apply_id, None)
        return ended.state

    def _forget(self, record: Record) -> None:
        """Removes what is left of a job that has ended, or ends it."""
        try:
            self.end(record)
        except SlurmError as error:  # the next request of its owner tries again
            log.warning("cannot clean up a job", job=record.job.job_id, owner=record.owner, reason=str(error))

    def _path(self, apply_id: str) -> Path:
        return self._directory / f"{apply_id}.json"
