"""``meshgate gc``."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from meshgate.cli.leftovers import end_leftovers, find_leftovers
from meshgate_processes.identity import identify_process

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes by /proc")
READY_UNTIL_INPUT_CLOSES = "import sys; print(flush=True); sys.stdin.read()"


def process(folder: Path, pid: int, command: str, **environment: str) -> None:
    (folder / str(pid)).mkdir()
    (folder / str(pid) / "cmdline").write_bytes(b"\0".join(part.encode() for part in command.split()) + b"\0")
    variables = (f"{name}={value}" for name, value in environment.items())
    (folder / str(pid) / "environ").write_bytes("\0".join(variables).encode())


def test_processes_of_jobs_without_a_gateway_are_left_over(tmp_path: Path) -> None:
    process(tmp_path, 11, "python -m meshgate_gateway", MESHGATE_JOB="alive")
    process(tmp_path, 12, "python worker", MESHGATE_JOB="alive")
    process(tmp_path, 13, "python worker --x", A="b", MESHGATE_JOB="ended")
    process(tmp_path, 14, "python other", A="b")
    (tmp_path / "15").mkdir()  # of another user
    (tmp_path / "self").mkdir()
    assert [(found.job, found.pid, found.command) for found in find_leftovers(tmp_path)] == [
        ("ended", 13, "python worker --x")
    ]
    assert find_leftovers(tmp_path / "none") == []


def test_leftovers_are_ended() -> None:
    job = uuid.uuid4().hex
    child = subprocess.Popen(
        [sys.executable, "-c", READY_UNTIL_INPUT_CLOSES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "MESHGATE_JOB": job},
    )
    assert child.stdout is not None
    child.stdout.readline()  # before that, Linux may still show an empty environment
    found = identify_process(child.pid)
    assert found is not None
    leftovers = [each for each in find_leftovers() if each.job == job]
    assert [each.pid for each in leftovers] == [child.pid]
    end_leftovers(leftovers)
    assert found.wait_ended(10)
    child.communicate()
