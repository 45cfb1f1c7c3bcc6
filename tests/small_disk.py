"""A disk of a few kilobytes, to fill it. It takes root, on Linux."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """Mounts a disk with space for 256 KiB and 64 files at ``path``; skips the test if this user may not."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=64", "none", path]
    try:
        mounted = subprocess.run(command, check=False, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def fill(disk: Path) -> None:
    with suppress(OSError), (disk / "filling").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with suppress(OSError):
        for number in range(1000):
            (disk / f"empty-{number}").touch()
