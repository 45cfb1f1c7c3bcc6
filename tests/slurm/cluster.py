"""The cluster of SLURM_CONF and the kit that it is from, which can also break it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from meshgate import SlurmJob
from tests.conftest import RUN_VARIABLE
from tests.programs import ROOT, child_process

DEADLINE = 120.0
NOTICED = 60.0  # seconds that a machine under load has for what takes 5 s
KIT = Path(os.environ.get("MESHGATE_SLURM_UP") or ROOT.parent / "shared" / "slurm" / "up").parent
DISTURBED = "n4"  # the node of tests that disturb nodes; others leave it alone


def run(*command: str, timeout: float = DEADLINE, env: Mapping[str, str] | None = None) -> str:
    """The output of a command, which must succeed."""
    ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=env)
    assert ran.returncode == 0, f"{command}: exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def kit(program: str, *arguments: str) -> str:
    """Runs a program of the kit: ``on laptop ls``, ``node n4 kill``. A machine that it boots outlives the tests."""
    environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
    return run(str(KIT / program), *arguments, env=environment)


laptop_directory = ""  # of temporary files, such as the sockets of its connections; each module has one


def laptop(
    program: Path, *arguments: str, variables: Mapping[str, str] | None = None, stdin: int | None = None
) -> AbstractContextManager[subprocess.Popen[str]]:
    """A Python program on the laptop, from its own directory, without the variables of a cluster."""
    command = [str(KIT / "on"), "laptop", sys.executable, str(program), *arguments]
    return child_process(
        command,
        cwd=program.parent,
        env={**os.environ, "TMPDIR": laptop_directory, **(variables or {})},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def pids(*parts: bytes) -> list[int]:
    """The processes, of all machines of the kit, whose command has these parts, in the order of their starts."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                command = Path("/proc", entry, "cmdline").read_bytes()
                started = int(Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
            except OSError:
                continue
            if all(part in command for part in parts) and b"slurm/on" not in command and b"nsenter" not in command:
                found.append((started, int(entry)))
    return [pid for _, pid in sorted(found)]


def connection_pids() -> list[int]:
    """The processes of ssh that hold the laptop's connection."""
    return pids(f"ControlPath={laptop_directory}/".encode(), b"ControlMaster=auto\0")


def queue(name: str) -> list[str]:
    """The states of the jobs of this name that have not ended."""
    states = run("squeue", "--noheader", f"--name={name}", "--format=%T").split()
    return [state for state in states if state != "COMPLETING"]


def small_job(meshes: Mapping[str, int], name: str, directory: Path, **options: Any) -> SlurmJob:
    """A job that leaves space for others, and the disturbed node alone unless ``on_disturbed`` is set."""
    where = f"--nodelist={DISTURBED}" if options.pop("on_disturbed", False) else f"--exclude={DISTURBED}"
    given: dict[str, Any] = {
        "python_exe": sys.executable,
        "job_name": name,
        "exclusive": False,
        "time_limit": "10",
        "log_dir": str(directory),
        "sync_dirs": [str(directory)],
        "warn_before": 0,
        "slurm_args": [where, *options.pop("slurm_args", [])],
    }
    return SlurmJob(dict(meshes), **{**given, **options})
