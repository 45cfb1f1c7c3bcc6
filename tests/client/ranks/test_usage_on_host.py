"""Reading what real processes use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshgate.ranks import usage_on_host
from meshgate.ranks.usage_on_host import UsageReader, read_gpus, visible_gpus
from tests.waiting import wait_for

needs_on_host = pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are read through /proc")
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
DEVICES = "0, GPU-aa11, 87, 40536, 81559\n1, GPU-bb22, [N/A], [Not Supported], 81559\n"
APPS = "4711, GPU-aa11, 40100\n4712, GPU-bb22, [N/A]\n"
GPUS = [{"index": 0, "uuid": "GPU-aa11"}, {"index": 1, "uuid": "GPU-bb22"}]


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A marked process that sleeps, whose child has 64 MiB and burns."""
    monkeypatch.setattr(os, "getppid", os.getpid)  # as if this process were the host
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    command = [sys.executable, "-c", SERVE, CHILD + BURN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process  # ends its child when its input closes


def read(reader: Any, pid: int) -> dict[str, Any]:
    answer = UsageReader.read._method(reader)
    (found,) = [process for process in answer["processes"] if process["pid"] == pid]
    return dict(found)


def child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def seconds_of(pid: int) -> float:
    stat = usage_on_host.read_stat(pid)
    assert stat is not None
    return float(stat["cpu"])


@needs_on_host
def test_a_childs_use_counts_as_that_of_the_marked_process(marked: Any) -> None:
    reader = UsageReader()
    first = read(reader, marked.pid)
    assert (first["mesh"], first["rank"], first["host"], first["cpu"]) == ("procs", 3, "workers-1", None)
    assert 64 * MIB < first["memory"] < 1024 * MIB
    child = child_of(marked.pid)
    spent = seconds_of(child) + 0.5
    wait_for(lambda: seconds_of(child) >= spent, "the child to use half a second")
    assert 0.5 < read(reader, marked.pid)["cpu"] < 150


@needs_on_host
def test_gpus_are_those_that_the_family_uses_or_that_the_process_sees(
    marked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [{"index": index, "uuid": f"GPU-{index}", "utilization": 5} for index in range(3)]
    users: list[dict[str, Any]] = []
    monkeypatch.setattr(usage_on_host, "read_gpus", lambda: (gpus, users, "a problem"))
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


@needs_on_host
def test_an_ended_process_has_no_stat() -> None:
    assert usage_on_host.read_stat(2**22 + 1) is None
    stat = usage_on_host.read_stat(os.getpid())
    assert stat is not None
    assert stat["cpu"] > 0


def install(directory: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_gpus_and_their_users_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        'test "$2" = --format=csv,noheader,nounits || exit 9\ncase "$1" in\n'
        f"--query-gpu=index,uuid,utilization.gpu,memory.used,memory.total) printf '{DEVICES}';;\n"
        f"--query-compute-apps=pid,gpu_uuid,used_memory) printf '{APPS}';;\n*) exit 9;;\nesac\n"
    )
    install(tmp_path, monkeypatch, body.replace("\n1, ", "\\n1, ").replace("\n4712", "\\n4712"))
    gpus, users, problem = read_gpus()
    assert problem == ""
    assert gpus == [
        {"index": 0, "uuid": "GPU-aa11", "utilization": 87, "memory": 40536 * 2**20, "memory_total": 81559 * 2**20},
        {"index": 1, "uuid": "GPU-bb22", "utilization": None, "memory": None, "memory_total": 81559 * 2**20},
    ]
    assert users == [
        {"pid": 4711, "uuid": "GPU-aa11", "memory": 40100 * 2**20},
        {"pid": 4712, "uuid": "GPU-bb22", "memory": None},
    ]


def test_a_host_without_the_program_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpus() == ([], [], "")


def test_a_failure_says_what_the_program_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed because it could not communicate'; exit 9\n")
    gpus, users, problem = read_gpus()
    assert (gpus, users) == ([], [])
    assert "exit status 9.: NVIDIA-SMI has failed because it could not communicate" in problem
    install(tmp_path, monkeypatch, "echo 'what is this'\n")
    assert read_gpus()[2].startswith("nvidia-smi failed: not enough values")


@pytest.mark.parametrize(
    ("setting", "indexes"),
    [(None, []), ("", []), ("1", [1]), ("1,0", [0, 1]), ("GPU-bb", [1]), ("10", []), ("-1", [])],
)
def test_visible_gpus_are_named_by_index_or_uuid(setting: str | None, indexes: list[int]) -> None:
    assert visible_gpus(setting, GPUS) == indexes
