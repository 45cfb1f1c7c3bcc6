"""The batch scripts of jobs: one worker on each node, which outlives the loss of another node.

The script of an ordinary job is the step that runs the workers. That of a job with a client of its own, or with its
gateway on its first node, runs ``meshgate_slurm.batch`` there, which starts a gateway, and that the step.

Slurm's defaults end a whole job, and start it again under its old id, when one of its nodes fails. So the job has
``--no-kill --no-requeue``, and the step inside it ``--no-kill --kill-on-bad-exit=0 --wait=0``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshgate_slurm.spec import SlurmSpec

WORKER_MODULE = "meshgate_worker.slurm"
CLIENT_MODULE = "meshgate_slurm.batch"
LOG_DIRECTORY = "~/.meshgate/slurm/logs"
SPEC = "MESHGATE_SLURM_SPEC"  # the variable with the job's specification, for CLIENT_MODULE
DIRECTORY = "MESHGATE_SLURM_DIRECTORY"  # the variable with the directory of the gateway, for CLIENT_MODULE
ALLOCATION = "MESHGATE_SLURM_ALLOCATION"  # the variable with the number of the job in which a gateway runs
# Each node has one worker with all of its CPUs, however many tasks Slurm counts; so these must not reach srun.
NOT_FOR_STEPS = (
    "SLURM_CPUS_PER_TASK",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
)


@dataclass(frozen=True, slots=True)
class Connect:
    """How workers reach the gateway: its addresses (``host:port``), and the secret that it expects of them."""

    addresses: Sequence[str]
    secret: str

    def variables(self, spec: SlurmSpec) -> dict[str, str]:
        """The environment of the workers, without that of ``spec``."""
        return {
            "MESHGATE_SLURM_GATEWAY": ",".join(self.addresses),
            "MESHGATE_SLURM_SECRET": self.secret,
            "MESHGATE_SLURM_PORT": str(spec.monarch_port or 0),
            "MESHGATE_SPLIT_GPUS": str(int(spec.split_gpus)),
        }


def log_directory(spec: SlurmSpec) -> str:
    """The directory of the logs, an absolute path on the machine that this runs on."""
    return os.path.abspath(os.path.expanduser(spec.log_dir or LOG_DIRECTORY))


def log_pattern(spec: SlurmSpec, log_dir: str, job_id: str = "%j", node: str = "%N") -> str:
    """The log file of the worker on ``node``, or Slurm's pattern for it."""
    return f"{log_dir}/slurm_{job_id}_{spec.job_name}_{node}.log"


def batch_script(spec: SlurmSpec, python: str, log_dir: str, connect: Connect) -> str:
    """The script. ``python``: the interpreter of the workers, an absolute path. Raises ValueError if a path has a line
    break, which no line of the script can contain."""
    last = [f"unset {' '.join(NOT_FOR_STEPS)}", shlex.join(step(spec, python, log_dir))]
    return _script(spec, python, log_dir, connect.variables(spec), last)


def client_script(spec: SlurmSpec, python: str, log_dir: str, command: str) -> str:
    """The script of a job whose client is ``command``, on the first node. Raises ValueError like ``batch_script``."""
    last = [shlex.join(["exec", python, "-u", "-m", CLIENT_MODULE, command])]
    return _script(spec, python, log_dir, {SPEC: spec.model_dump_json()}, last)


def gateway_script(spec: SlurmSpec, python: str, log_dir: str, directory: str) -> str:
    """The script of a job with its gateway on the first node. ``directory`` has the gateway's token. Raises ValueError
    like ``batch_script``."""
    last = [shlex.join(["exec", python, "-u", "-m", CLIENT_MODULE])]
    return _script(spec, python, log_dir, {SPEC: spec.model_dump_json(), DIRECTORY: directory}, last)


def batch_log(spec: SlurmSpec, log_dir: str, job_id: str = "%j") -> str:
    """The log file of the batch script, or Slurm's pattern for it."""
    return f"{log_dir}/slurm_{job_id}_{spec.job_name}.log"


def _script(spec: SlurmSpec, python: str, log_dir: str, variables: Mapping[str, str], last: Sequence[str]) -> str:
    if "\n" in python or "\n" in log_dir:
        raise ValueError("a path contains a line break")
    directives = (f"#SBATCH {directive}" for directive in _directives(spec, log_dir))
    exports = (f"export {name}={shlex.quote(value)}" for name, value in {**spec.env, **variables}.items())
    where = []
    if (directory := spec.working_directory) and directory.startswith("/"):  # Slurm would go on in /tmp
        missing = shlex.quote(f"has no directory {directory}, which slurm_args names (--chdir)")
        where = [f"[ . -ef {shlex.quote(directory)} ] || {{ echo $(hostname) {missing} >&2; exit 1; }}"]
    return "\n".join(["#!/bin/bash", *directives, *where, *exports, *last]) + "\n"


def _directives(spec: SlurmSpec, log_dir: str) -> list[str]:
    log = batch_log(spec, log_dir)
    found: list[tuple[str, object]] = [
        ("--job-name", spec.job_name),
        ("--nodes", spec.nodes),
        ("--ntasks-per-node", spec.ntasks_per_node),
        ("--output", log),
        ("--error", log),
        ("--time", spec.time_limit),
        ("--gpus-per-node", spec.gpus_per_node),
        ("--cpus-per-task", spec.cpus_per_task),
        ("--mem", spec.mem),
        ("--partition", spec.partition),
        ("--account", spec.account),
        ("--qos", spec.qos),
    ]
    flags = ["--no-kill", "--no-requeue", *(["--exclusive"] if spec.exclusive else [])]
    return [*(f"{name}={_quote(value)}" for name, value in found if value is not None), *flags, *spec.slurm_args]


def _quote(value: object) -> str:
    text = str(value)
    return f'"{text}"' if any(character.isspace() for character in text) else text


def step(spec: SlurmSpec, python: str, log_dir: str) -> list[str]:
    """The command that runs the workers, in the allocation."""
    return [
        # sbatch --export=NONE, which some sites ask for, would keep this script's variables from the workers.
        *("srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", "--export=ALL"),
        *(f"--nodes={spec.nodes}", f"--ntasks={spec.nodes}", "--ntasks-per-node=1"),
        f"--output={log_pattern(spec, log_dir)}",
        *(python, "-u", "-m", WORKER_MODULE),
    ]
