from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from meshgate.jobs import registry
from meshgate.jobs.registry import LocalEntry
from meshgate_processes.identity import identify_process

UNTIL_INPUT_CLOSES = "import sys; sys.stdin.read()"


@pytest.fixture
def run() -> CliRunner:
    return CliRunner(env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def _no_other_jobs(no_jobs_of_other_tests: None) -> None:
    """For all commands."""


@pytest.fixture
def jobs(no_jobs_of_other_tests: None) -> Iterator[list[LocalEntry]]:
    """Two registered jobs, each with a running process."""
    started = [subprocess.Popen([sys.executable, "-c", UNTIL_INPUT_CLOSES], stdin=subprocess.PIPE) for _ in range(2)]
    entries = []
    for number, child in enumerate(started):
        process = identify_process(child.pid)
        assert process is not None
        entries.append(
            LocalEntry(
                apply_id=f"{number}f00d",
                kind="ProcessJob",
                meshes={"workers": 2},
                url="ws://127.0.0.1:1",
                pid=process.pid,
                started=process.started,
                directory=f"/home/{number}",
                created=1.0 + number,
            )
        )
        registry.register(entries[-1])
    yield entries
    for child, entry in zip(started, entries, strict=True):
        child.kill()
        child.communicate()
        registry.unregister(entry.apply_id)
