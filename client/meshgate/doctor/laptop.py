"""Checks of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshgate.doctor.findings import Finding, problem

LIMITS = Path("/proc/sys/fs/inotify")
FEWEST_WATCHES = 65_536
FEWEST_INSTANCES = 64


def check_file_watches(limits: Path = LIMITS) -> Iterator[Finding]:
    """Whether ``job.sync(watch=True)`` can watch a large project. Finds nothing where the kernel has no such limits."""
    for name, fewest in (("max_user_watches", FEWEST_WATCHES), ("max_user_instances", FEWEST_INSTANCES)):
        try:
            limit = int((limits / name).read_text())
        except (OSError, ValueError):  # another kernel
            continue
        if limit < fewest:
            remedy = f"run `sudo sysctl fs.inotify.{name}={fewest}`, and set it in /etc/sysctl.d to keep it"
            yield problem("file watches", f"the limit {name} is {limit}: saves may not be noticed", remedy)
        else:
            yield Finding(check="file watches", outcome="ok", text=f"{name} is {limit}")
