"""What Slurm and the log files report about a job, and what it means.

Slurm's JSON differs between releases: numbers are plain or objects with ``set`` and ``number``, states are a text or a
list. This module accepts both and ignores everything else.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from meshgate_processes.identity import last_output

REQUEUED = "REQUEUE"  # our word for the state of a job that has run and waits to run again, without what it was for
UNKNOWN = "UNKNOWN"  # the state of a job that ended longer ago than Slurm remembers
PENDING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
ALIVE = PENDING | {"RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT", "COMPLETING"}
QUEUE_REASONS: Mapping[str, str] = {
    "Resources": "waits for nodes to become free",
    "Priority": "other jobs come first",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "the job that it waits for did not end as --dependency= says; cancel it",
    "BeginTime": "its begin time has not come",
    "JobHeldUser": "it is held; `scontrol release` starts it",
    "JobHeldAdmin": "an administrator holds it",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows; cancel it, and ask for fewer",
    "PartitionTimeLimit": "its time limit is over the partition's; cancel it, and lower time_limit=",
    "InvalidAccount": "its account is not valid any more; cancel it, and set another account=",
    "InvalidQOS": "its QOS is not valid any more; cancel it, and set another qos=",
    "BadConstraints": "no node has what it asks for; cancel it, and ask for less",
    "ReqNodeNotAvail": "a node that it needs is not available; `sinfo -R` says why",
    "Reservation": "waits for its reservation",
    "Licenses": "waits for a license",
}
_LIMITED = re.compile(r"(QOS|Assoc)(Max|Grp|Min|\w*Limit)")
ENDS: Mapping[str, str] = {
    "BOOT_FAIL": "its nodes did not boot",
    "CANCELLED": "a user or an administrator cancelled it",
    "COMPLETED": "all of its workers ended",
    "DEADLINE": "it could not end before its deadline",
    "FAILED": "its batch script failed",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "it used more memory than it was given; ask for more with mem=",
    "PREEMPTED": "a job of another partition or QOS took its nodes",
    REQUEUED: "it was put back into the queue, as by `scontrol requeue`, which ended its workers",
    "REVOKED": "another cluster of the federation took it",
    "TIMEOUT": "it reached its time limit",
}
MAX_NODES = 65_536
NO_VALUE = 0xFFFFFFFE  # Slurm's number for none; the next one is for no limit
_BRACKETS = re.compile(r"\[([^\]]*)\]")
TAIL_BYTES = 8192
TAIL_LINES = 12
MAX_TAIL = 2000


# Slurm's lists of nodes: ``n[1-3,07],login`` as names.


def expand(text: str) -> tuple[str, ...]:
    """The names in ``text``, in order. Raises ValueError if it is malformed or names too many nodes."""
    found: list[str] = []
    for item in _split(text):
        for name in _expand_item(item):
            found.append(name)
            if len(found) > MAX_NODES:
                raise ValueError(f"the list {text[:80]!r} names more than {MAX_NODES} nodes")
    return tuple(found)


def _split(text: str) -> Iterator[str]:
    """The items between the commas that are not in brackets."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if depth != 0:
        raise ValueError(f"unbalanced brackets in {text[:80]!r}")
    if text[start:]:
        yield text[start:]


def _expand_item(item: str) -> Iterator[str]:
    found = _BRACKETS.search(item)
    if found is None:
        yield item
        return
    before, after = item[: found.start()], item[found.end() :]
    for part in found[1].split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is not a number or a range of numbers")
        for number in range(int(first), int(last or first) + 1):
            for rest in _expand_item(after):
                yield f"{before}{number:0{len(first)}d}{rest}"


class JobStatus(BaseModel):
    """A job as Slurm reported it. Times are in seconds since 1970; None if unknown."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    job_id: int
    state: str = "PENDING"
    reason: str = ""  # why it waits or ended, in Slurm's word
    expected_start: float | None = None
    end_time: float | None = None  # when its time limit, or the grace time of a preemption, ends it
    preempted_at: float | None = None  # when Slurm decided to give its nodes to another job
    time_limit: int | None = None  # minutes
    partition: str = ""
    account: str = ""
    qos: str = ""
    nodes: tuple[str, ...] = ()
    batch_host: str = ""  # the first of its nodes, also after the end
    exit_code: int = 0
    signal: int = 0
    restarts: int = 0
    node_problem: str = ""  # which node failed, and Slurm's reason for that

    @property
    def pending(self) -> bool:
        return self.state in PENDING

    @property
    def ended(self) -> bool:
        return self.state not in ALIVE

    def seconds_left(self) -> float | None:
        """Until Slurm ends it; None if no end is known."""
        if self.state != "RUNNING" or self.end_time is None:
            return None
        if self.time_limit is None and self.preempted_at is None:  # Slurm says an end in a year
            return None
        return max(self.end_time - time.time(), 0.0)

    def why_pending(self) -> str:
        """``Resources: waits for nodes to become free``."""
        reason = self.reason if self.reason not in ("", "None") else "not considered yet"
        meaning = QUEUE_REASONS.get(reason.partition(",")[0])
        if meaning is None and (found := _LIMITED.match(reason)):
            meaning = f"a limit of its {'QOS' if found[1] == 'QOS' else 'account'} is reached"
        return f"{reason}: {meaning}" if meaning else reason

    def describe_end(self) -> str:
        """``Slurm ended job 12: TIMEOUT: …``."""
        if self.state == UNKNOWN:
            return f"Slurm job {self.job_id} has ended, and Slurm no longer knows why"
        return f"Slurm ended job {self.job_id}: {self.why_ended()}"

    def why_ended(self) -> str:
        """``TIMEOUT: it reached its time limit of 2 min``, with the exit code if there is one."""
        text = ENDS.get(self.state, "Slurm gives no explanation")
        if self.state == "TIMEOUT" and self.time_limit:
            text += f" of {self.time_limit} min"
        if self.node_problem:
            text += f": {self.node_problem}"
        details = []
        if self.reason not in _SAYS_NO_MORE:
            details.append(f"reason {self.reason}")
        if self.exit_code:
            details.append(f"exit code {self.exit_code}")
        if self.signal:
            details.append(f"signal {self.signal}")
        return f"{self.state}: {text}" + (f" ({', '.join(details)})" if details else "")


# Reasons that say no more than the state.
_SAYS_NO_MORE = frozenset({"", "None", "NonZeroExitCode", "TimeLimit", "OutOfMemory", "NodeDown", "Preempted"})


def parse_jobs(text: str) -> dict[int, JobStatus]:
    """The jobs in the output of ``squeue --json``, by number. Raises ValueError if it is not that."""
    found = json.loads(text)
    if not isinstance(found, dict) or not isinstance(found.get("jobs"), list):
        raise ValueError("Slurm's JSON has no list of jobs")  # noqa: TRY004 - of the text, not of its type
    jobs = [_job(job) for job in found["jobs"]]
    return {job.job_id: job for job in jobs}


def parse_node(text: str) -> tuple[str, str]:
    """The state and the reason of the node in the output of ``scontrol show node --json``: DOWN, Not responding."""
    nodes = json.loads(text).get("nodes") or [{}]
    return "+".join(_texts(nodes[0].get("state"))), str(nodes[0].get("reason") or "").strip()


def _job(job: Mapping[str, Any]) -> JobStatus:
    states = _texts(job.get("job_state"))
    exit_code = job.get("exit_code")
    exit_code = exit_code if isinstance(exit_code, dict) else {"return_code": exit_code}
    state = next((state for state in states if state not in ("COMPLETING", "CONFIGURING")), states[0] if states else "")
    if "CONFIGURING" in states:  # the nodes are booting
        state = "CONFIGURING"
    start = _number(job.get("start_time"))
    return JobStatus(
        job_id=int(job["job_id"]),
        state=state or "PENDING",
        reason=str(job.get("state_reason") or ""),
        expected_start=start,
        end_time=_number(job.get("end_time")),
        preempted_at=_number(job.get("preempt_time")),
        time_limit=int(_number(job.get("time_limit")) or 0) or None,
        **{name: str(job.get(name) or "") for name in ("partition", "account", "qos")},
        nodes=_nodes(job),
        batch_host=str(job.get("batch_host") or ""),
        exit_code=int(_number(exit_code.get("return_code")) or 0),
        signal=_signal(exit_code.get("signal")),
        restarts=int(_number(job.get("restart_cnt")) or 0),
    )


def _nodes(job: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        return expand(str(job.get("nodes") or ""))
    except ValueError:
        return ()


def _signal(value: Any) -> int:
    if isinstance(value, dict):
        value = value.get("id", value.get("signal_id"))
    return int(_number(value) or 0)


def _texts(value: Any) -> Sequence[str]:
    return [str(each) for each in value] if isinstance(value, list) else [str(value)] if value else []


def _number(value: Any) -> float | None:
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 < value < NO_VALUE else None


# The ends of log files, for the messages that explain why a job or a worker ended.


def read_end(path: str | os.PathLike[str]) -> str:
    """The last lines of a file; "" if it cannot be read, as if it is not written yet, or only on another machine."""
    try:
        with open(path, "rb") as file:
            skipped = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
            file.seek(max(0, skipped - 1))
            end = file.read()
            return (end.partition(b"\n")[2] or end if skipped else end).decode(errors="replace")
    except OSError:
        return ""


def missing_log(status: JobStatus, path: str) -> str:
    """A question about a job that failed on its nodes, and whose log this machine does not have; else ""."""
    if status.state != "FAILED" or not path or os.path.exists(path):
        return ""
    return (
        f"\n{os.uname().nodename} does not have the log of the batch script, {path}. Do the nodes share its directory, "
        "and that of python_exe, with this machine? If not, set log_dir= and python_exe= to paths that they share"
    )


def last_lines(text: str, whose: str) -> str:
    """``text``'s last lines below a title, to be added to a message; "" if there are none."""
    lines = last_output(text.strip(), MAX_TAIL).splitlines()[-TAIL_LINES:]
    return "".join([f"\nThe last lines of {whose}:", *(f"\n  {line}" for line in lines)]) if lines else ""
