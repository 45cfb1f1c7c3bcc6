"""Reading what real processes use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshgate.ranks.usage import on_host
from meshgate.ranks.usage.on_host import UsageReader
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are read through /proc")
MIB = 2**20
CHILD = "import sys, time; held = bytearray(64 << 20); held[::4096] = b'1' * (64 << 8); print('up', flush=True); "
BURN = "\nwhile True: pass"
SERVE = (
    "import os, subprocess, sys\n"
    "from meshgate_gateway.engine.on_worker.stacks import serve_stacks\n"
    "serve_stacks('procs', 3, 'workers-1', 'mine')\n"
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]])\n"
    "sys.stdin.read()\n"
    "child.kill()\nchild.wait()\n"
)


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A marked process that sleeps, whose child has 64 MiB and burns."""
    monkeypatch.setattr(os, "getppid", os.getpid)  # as if this process were the host
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    command = [sys.executable, "-c", SERVE, CHILD + BURN]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield process
    process.communicate()


def read(reader: Any, pid: int) -> dict[str, Any]:
    answer = UsageReader.read._method(reader)
    (found,) = [process for process in answer["processes"] if process["pid"] == pid]
    return dict(found)


def child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def seconds_of(pid: int) -> float:
    stat = on_host.read_stat(pid)
    assert stat is not None
    return float(stat["cpu"])


def test_a_childs_use_counts_as_that_of_the_marked_process(marked: Any) -> None:
    reader = UsageReader()
    first = read(reader, marked.pid)
    assert (first["mesh"], first["rank"], first["host"], first["cpu"]) == ("procs", 3, "workers-1", None)
    assert 64 * MIB < first["memory"] < 1024 * MIB
    child = child_of(marked.pid)
    spent = seconds_of(child) + 0.5
    wait_for(lambda: seconds_of(child) >= spent, "the child to use half a second")
    assert 0.5 < read(reader, marked.pid)["cpu"] < 150


def test_gpus_are_those_that_the_family_uses_or_that_the_process_sees(
    marked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [{"index": index, "uuid": f"GPU-{index}", "utilization": 5} for index in range(3)]
    users: list[dict[str, Any]] = []
    monkeypatch.setattr(on_host, "read_gpus", lambda: (gpus, users, "a problem"))
    reader = UsageReader()
    found = read(reader, marked.pid)
    assert (found["gpus"], found["gpu_memory"]) == ([1], None)
    users += [
        {"pid": child_of(marked.pid), "uuid": "GPU-2", "memory": 7},
        {"pid": os.getpid(), "uuid": "GPU-0", "memory": 9},
    ]
    found = read(reader, marked.pid)
    assert (found["gpus"], found["gpu_memory"]) == ([2], 7)
    assert UsageReader.read._method(reader)["problem"] == "a problem"


def test_an_ended_process_has_no_stat() -> None:
    assert on_host.read_stat(2**22 + 1) is None
    stat = on_host.read_stat(os.getpid())
    assert stat is not None
    assert stat["cpu"] > 0
