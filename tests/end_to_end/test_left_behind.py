"""A job leaves no file in the directory for temporary files, whichever way it and its driver end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshgate.jobs.local_gateway import JOB_VARIABLE
from meshgate_processes.marks import find_processes

TIMEOUT = 120.0
PROGRAM = """
import sys
from meshgate import ProcessJob
from tests.end_to_end.actors import Worker

with ProcessJob({"workers": 2}) as job:
    workers = job.state().workers.spawn_procs().spawn("workers", Worker)
    workers.temporary_file.call().get(timeout=60)
    print(job.apply_id, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Not ``tmp_path``, whose path is too long for sockets."""
    path = Path(tempfile.mkdtemp(prefix="m-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("end", ["in order", "driver killed"])
def test_a_job_leaves_nothing_in_the_directory_for_temporary_files(temporary: Path, end: str) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.getcwd()}
    driver = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    with driver:
        apply_id = driver.stdout.readline().strip()
        assert apply_id
        processes = find_processes(f"{JOB_VARIABLE}={apply_id}")
        (directory,) = temporary.iterdir()
        assert any("written by an actor" in path.name for path in directory.iterdir())
        if end == "driver killed":
            driver.send_signal(signal.SIGKILL)
        else:
            driver.stdin.close()
    for process in processes:
        assert process.wait_ended(TIMEOUT)
    assert list(temporary.iterdir()) == []
