"""Which unix sockets a local job listens on. docs/security.md and the warning at the start rely on it."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest

from meshgate import ProcessJob
from meshgate.jobs.local_gateway import JOB_VARIABLE
from meshgate_processes.marks import find_processes

ACCEPTS_CONNECTIONS = 0x10000  # a flag in /proc/net/unix
MONARCH = ("meshgate_gateway.engine", "meshgate_worker", "monarch")


def listening() -> dict[str, str]:
    """The names of all listening unix sockets by inode; those of abstract ones begin with ``@``."""
    lines = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {line[6]: line[7] for line in lines if len(line) > 7 and int(line[3], 16) & ACCEPTS_CONNECTIONS}


def sockets_of(pid: int, known: dict[str, str]) -> list[str]:
    links = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                links.append(os.readlink(link))
    return [
        known[found[1]] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link)) and found[1] in known
    ]


@pytest.fixture(scope="module")
def job(job_of_its_own: ProcessJob) -> ProcessJob:
    return job_of_its_own  # all its processes are examined


def test_only_monarch_opens_sockets_that_other_users_could_reach(job: Any, workers: Any) -> None:
    workers.rank.call().get(timeout=60)
    known = listening()
    private = Path(job._gateway.record.directory)
    assert private.stat().st_mode & 0o077 == 0
    abstract: dict[str, int] = {}
    for process in find_processes(f"{JOB_VARIABLE}={job.apply_id}"):
        names = sockets_of(process.pid, known)
        try:
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):  # it has ended, and its sockets with it
            continue
        for name in names:
            if name.startswith("@"):
                (part,) = [part for part in MONARCH if part in command][:1] or ["another process"]
                abstract[part] = abstract.get(part, 0) + 1
            else:
                assert Path(name).is_relative_to(private), name
    assert "another process" not in abstract
    # If Monarch stops opening them, remove the warning at the start and in the documentation.
    assert abstract.get("meshgate_worker", 0) >= 1
