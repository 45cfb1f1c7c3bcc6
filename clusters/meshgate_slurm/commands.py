"""Slurm's commands: the only module that runs them.

Each call blocks for at most ``TIMEOUT`` seconds. The environment of a surrounding Slurm job, if there is one, does not
reach them, since sbatch and srun would take options from it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshgate_slurm.script import NOT_FOR_STEPS
from meshgate_slurm.spec import SlurmSpec
from meshgate_slurm.status import JobStatus, parse_jobs, parse_node

TIMEOUT = 30.0
FIND_TIMEOUT = 45.0  # seconds for which a job is looked for whose sbatch got no answer; a busy controller takes it late
MAX_LISTED = 16  # values that a refusal names
KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTERS"})
_FROM_A_JOB = re.compile(r"(SLURM|SBATCH|SRUN)_")
_SECRETS = ("MESHGATE_TOKEN", "MESHGATE_TOKEN_FILE", "MESHGATE_ANNOUNCE_FD", "MESHGATE_LIFETIME_FD")
_NO_CONTROLLER = re.compile("Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted")
_NOT_SENT = "connect failure"  # in the words of a command that reached no controller
_UNKNOWN_JOB = "Invalid job id"
# What to change when sbatch refuses a job with such words, and sinfo's format for the values that are allowed.
_LISTED = (
    ("invalid partition|time limit", "Set partition= and time_limit=. The partitions and their limits", "%R %l"),
    ("invalid feature", "The features of the nodes", "%f"),
    (
        "node configuration|more processors",
        "No node has what the job asks for. Their partitions, CPUs, MB of memory and GPUs",
        "%R %c %m %G",
    ),
    ("node count", "Set fewer nodes in meshes=. The partitions and their nodes", "%R %D"),
)
_CLUSTER = re.compile(r"^ClusterName\s*=\s*([\w.-]*\w)\s*$", re.MULTILINE)
_NO_ANSWER = "\nSlurm's controller does not answer; running jobs continue. Try again once `scontrol ping` says UP"
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)")


class SlurmError(Exception):
    """Base class of all errors of this package. ``str()`` is a sentence or a few lines for people."""


class NoSlurm(SlurmError):
    """This machine does not have Slurm's commands."""


class Refused(SlurmError):
    """Slurm refused the job; carries its words."""


class Unreachable(SlurmError):
    """A command of Slurm's failed or did not answer."""


class Unanswered(Unreachable):
    """Slurm's controller does not answer, as while it restarts. Nothing was done for the request."""


def share_of_node(nodes: Sequence[tuple[int, int, str]], gpus: int) -> tuple[int, int]:
    """CPUs and memory in MB in proportion to ``gpus``, on the smallest of ``nodes`` that has so many.

    ``nodes`` are CPUs, memory in MB and Slurm's generic resources. Raises SlurmError if no node has so many GPUs.
    """
    shares = []
    for cpus, memory, resources in nodes:
        there = sum(int(count) for count in _GPUS.findall(resources))
        if there >= gpus:
            shares.append((cpus * gpus // there, memory * gpus // there))
    if not shares:
        raise SlurmError(f"share_node(): no node of the partition has {gpus} GPUs")
    return max(min(cpus for cpus, _ in shares), 1), min(memory for _, memory in shares)


def submit(script: str, *, directory: str) -> int:
    """Submits a batch script that runs in ``directory`` unless it has a ``--chdir`` of its own; returns the job's
    number. Raises Refused in Slurm's words, and Unanswered if Slurm has certainly not got the job."""
    if not os.path.isdir(directory):
        raise Refused(f"cannot submit the job: {os.uname().nodename} has no directory {directory}")
    mark = f"meshgate-{secrets.token_hex(8)}"
    first, end, rest = script.partition("\n")  # the script's own --comment, if there is one, comes later and counts
    try:
        result = _run(["sbatch", "--parsable"], f"{first}{end}#SBATCH --comment={mark}\n{rest}", directory)
    except Unanswered as error:
        if _NOT_SENT in str(error):
            raise
        return _find_submitted(mark, error)
    if result.returncode != 0:
        raise Refused(f"Slurm refused the job: {_words(result)}{_remedy(result.stderr)}")
    number = result.stdout.strip().rpartition("\n")[2].partition(";")[0]
    if not number.isdecimal():
        raise Unreachable(f"sbatch reported no job number but {result.stdout.strip()[:200]!r}")
    return int(number)


def _find_submitted(mark: str, error: Unanswered) -> int:
    """The number of the job with this comment, which Slurm may have taken although sbatch got no answer. Raises
    Unreachable if there is none in time: it may still come, so that it must not be submitted again."""
    deadline = time.monotonic() + FIND_TIMEOUT
    while time.monotonic() < deadline:
        with contextlib.suppress(Unreachable):
            for line in _output(_run(["squeue", "--noheader", "--me", "--states=all", "--format=%A %k"])).splitlines():
                number, _, comment = line.strip().partition(" ")
                if comment == mark:
                    return int(number)
        time.sleep(1)
    raise Unreachable(
        f"{error}\nSlurm may have taken the job all the same, although none with the comment {mark} was found within "
        f"{FIND_TIMEOUT:g} s: `squeue --me --format='%A %j %k'` lists it then, and `scancel` with its number ends it"
    )


def _remedy(words: str) -> str:
    """What to do about a job that sbatch has refused with these words; "" if they say it."""
    if re.search("invalid (account|qos)|accounting/QOS", words, re.IGNORECASE):
        return (
            "\nSet account= and qos=. `sacctmgr show assoc where user=$USER format=account,partition,qos` lists yours, "
            "and `sacctmgr show qos` the limits"
        )
    for pattern, change, form in _LISTED:
        if re.search(pattern, words, re.IGNORECASE):
            with contextlib.suppress(SlurmError):
                lines = _output(_run(["sinfo", "--noheader", f"--format={form}"])).splitlines()
                listed = list(dict.fromkeys(" ".join(line.replace("(null)", "none").split()) for line in lines))
                return f"\n{change}: {', '.join([*listed[:MAX_LISTED], *(['…'] if listed[MAX_LISTED:] else [])])}"
    return ""


def start_step(command: Sequence[str], variables: Mapping[str, str], log: str) -> subprocess.Popen[bytes]:
    """Starts a step of the allocation in which this runs. What srun itself says goes to the file ``log``."""
    kept = {name: value for name, value in os.environ.items() if name not in (*_SECRETS, *NOT_FOR_STEPS)}
    with open(log, "ab") as output:
        return subprocess.Popen(
            command, env={**kept, **variables}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


def jobs(job_ids: Iterable[int]) -> dict[int, JobStatus]:
    """The jobs of these numbers, by number, in one request. Jobs that Slurm no longer knows are missing."""
    wanted = list(job_ids)
    listed = ",".join(map(str, wanted))
    result = _run(["squeue", "--json", "--states=all", f"--jobs={listed}"])
    if result.returncode != 0 and _UNKNOWN_JOB in result.stderr:
        return {}
    try:
        found = parse_jobs(_output(result))
    except ValueError as error:
        raise Unreachable(f"cannot read the output of squeue --json (Slurm 21.08 or later has it): {error}") from error
    return {number: found[number] for number in wanted if number in found}


def cancel(job_id: int) -> None:
    """Cancels the job. Does nothing if it has ended."""
    result = _run(["scancel", str(job_id)])
    if result.returncode != 0 and _UNKNOWN_JOB not in result.stderr:
        raise Unreachable(f"Slurm did not cancel job {job_id}: {_words(result)}")


def cluster_name() -> str:
    """The name of the cluster that the other commands are about."""
    found = _CLUSTER.search(_output(_run(["scontrol", "show", "config"])))
    if found is None:
        raise Unreachable("scontrol show config reported no usable ClusterName")
    return found[1]


def node_state(node: str) -> str:
    """The state of a node and Slurm's reason for it: ``DOWN: Not responding``."""
    return ": ".join(filter(None, _node(node)))


def node_problem(node: str) -> str:
    """``node_state`` if Slurm has a reason for it, as after a failure; else empty."""
    state, reason = _node(node)
    return f"{state}: {reason}" if reason else ""


def _node(node: str) -> tuple[str, str]:
    try:
        return parse_node(_output(_run(["scontrol", "show", "node", node, "--json"])))
    except ValueError as error:
        raise Unreachable(f"cannot read the output of scontrol show node: {error}") from error


def node_address(partition: str | None) -> str | None:
    """The address of some node of the partition (default: of any); None if it has no nodes."""
    only = [f"--partition={partition}"] if partition else []
    listed = _output(_run(["sinfo", "--Node", "--noheader", "--format=%o", *only])).split()
    return listed[0] if listed else None


def with_share(spec: SlurmSpec) -> SlurmSpec:
    """``spec`` with the CPUs and memory of its share of each node, if it shares nodes."""
    if not spec.share:
        return spec
    assert spec.partition is not None
    assert spec.gpus_per_node is not None
    cpus, memory = share_of_node(_partition_nodes(spec.partition), spec.gpus_per_node)
    return spec.model_copy(update={"cpus_per_task": max(cpus // spec.ntasks_per_node, 1), "mem": f"{memory}M"})


def _partition_nodes(partition: str) -> list[tuple[int, int, str]]:
    """CPUs, memory in MB and generic resources (``gpu:a100:8``) of each node of a partition."""
    found = _output(_run(["sinfo", "--Node", "--noheader", "--format=%c %m %G", f"--partition={partition}"]))
    nodes = [line.split(None, 2) for line in found.splitlines() if line.strip()]
    return [(int(cpus.rstrip("+")), int(memory.rstrip("+")), gres) for cpus, memory, gres in nodes]


def _environment() -> Mapping[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _SECRETS and (name in KEPT or not _FROM_A_JOB.match(name))
    }


def _run(command: Sequence[str], stdin: str = "", directory: str | None = None) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": TIMEOUT, "env": _environment()}
    try:
        result = subprocess.run(command, input=stdin, cwd=directory, check=False, **options)
    except FileNotFoundError:
        raise NoSlurm(
            f"{os.uname().nodename} has no {command[0]} on its PATH: name a machine that has Slurm's commands with "
            "login=, or add them to the PATH in ~/.profile there"
        ) from None
    except subprocess.TimeoutExpired:
        raise Unanswered(f"{command[0]} did not finish within {TIMEOUT:g} s{_NO_ANSWER}") from None
    except OSError as error:  # such as of a machine that is short of processes or memory for a moment
        raise Unreachable(f"cannot run {command[0]} on {os.uname().nodename}: {error}") from error
    except UnicodeDecodeError as error:
        raise Unreachable(f"cannot read the output of {command[0]}: {error}") from error
    if result.returncode != 0 and _NO_CONTROLLER.search(words := _words(result)):
        raise Unanswered(f"{command[0]} failed: {words}{_NO_ANSWER}")
    return result


def _output(result: subprocess.CompletedProcess[str]) -> str:
    if result.returncode != 0:
        raise Unreachable(f"{result.args[0]} failed: {_words(result)}")
    return result.stdout


def _words(result: subprocess.CompletedProcess[str]) -> str:
    return result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}"
