"""When a run uses too much, and what is counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshgate_gateway.runs.limits import (
    Limits,
    descendants,
    disk_used,
    memory_of,
    nearly_full,
)

LIMITS = Limits(memory=10**9, processes=10, disk=10**8)
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def disk(free: int, total: int, *, inodes: tuple[int, int] = (0, 0)) -> os.statvfs_result:
    """A file system of ``total`` bytes of which ``free`` are available, and so with its inodes."""
    return os.statvfs_result(
        (4096, 4096, total // 4096, free // 4096, free // 4096, inodes[1], inodes[0], inodes[0], 0, 255)
    )


@pytest.mark.parametrize(
    ("memory", "processes", "reason"),
    [
        (10**9, 10, ""),
        (10**9 + 1, 1, "it used 1.0 GB of memory, and its limit is 1.0 GB"),
        (0, 11, "it had 11 processes, and its limit is 10"),
    ],
)
def test_what_exceeds_the_limits_of_memory_and_processes(memory: int, processes: int, reason: str) -> None:
    assert LIMITS.exceeded(memory, processes) == reason


@pytest.mark.parametrize(
    ("used", "free", "total", "reason"),
    [
        (10**8, 10**12, 10**13, ""),
        (10**8 + 10**6, 10**12, 10**13, "its directory holds 101.0 MB, and its limit is 100.0 MB"),
        (10**8, 10**7, 10**13, "its directory holds 100.0 MB, and only 10.0 MB are left on that disk"),
        (10**6, 10**7, 10**13, ""),  # another program has filled it
        (10**8, 10**7, 10**8, ""),  # a small disk
    ],
)
def test_what_exceeds_the_limits_of_the_disk(used: int, free: int, total: int, reason: str) -> None:
    assert LIMITS.disk_exceeded(used, 10**6, disk(free, total)) == reason


@pytest.mark.parametrize(
    ("files", "inodes", "reason"),
    [
        (10**6, (0, 0), ""),  # a file system without a fixed number of inodes
        (10**6 + 1, (0, 0), "its directory holds 1000001 files, and the limit is 1000000"),
        (500, (400, 10**4), "its directory holds 500 files, and that disk has inodes for only 400 more"),
        (300, (400, 10**4), ""),  # another program has filled it
        (500, (600, 10**4), ""),
    ],
)
def test_what_exceeds_the_limit_of_files(files: int, inodes: tuple[int, int], reason: str) -> None:
    found = disk(10**12, 10**13, inodes=inodes)
    assert LIMITS.disk_exceeded(0, files, found) == reason
    assert nearly_full(found) == (inodes == (400, 10**4))


def test_a_disk_is_nearly_full_below_a_reserve_or_a_share() -> None:
    assert nearly_full(disk(10**8, 10**12))
    assert not nearly_full(disk(10**9, 10**12))
    assert not nearly_full(disk(10**8, 10**9))


def test_files_count_with_what_they_take_on_the_disk(tmp_path: Path) -> None:
    before = disk_used(tmp_path)
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_bytes(b"x" * 1_000_000)
    os.sync()  # some file systems count only what is written
    (tmp_path / "link").symlink_to("/")
    used, files = disk_used(tmp_path)
    assert 1_000_000 <= used - before[0] < 1_200_000
    assert files - before[1] == 4


@linux
def test_descendants_are_found_at_every_depth() -> None:
    script = "sleep 1000 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        child = int(shell.stdout.readline())
        try:
            assert {shell.pid, child} <= set(descendants(os.getpid()))
            assert descendants(shell.pid) == [child]
        finally:
            os.kill(child, signal.SIGKILL)


@linux
def test_pages_that_processes_share_count_once_near_the_limit() -> None:
    code = (
        "import os, signal\ndata = bytearray(b'x') * 50_000_000\n"
        "child = os.fork()\nif child: print(child, flush=True)\nsignal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert memory_of([parent.pid, child], limit=10**12) > 100_000_000
            assert 50_000_000 < memory_of([parent.pid, child], limit=60_000_000) < 90_000_000
        finally:
            os.kill(child, signal.SIGKILL)
            parent.kill()
