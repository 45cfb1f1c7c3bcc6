"""The actor that reads what the processes on a host use: CPU, memory and GPUs. It needs nothing but torchmonarch.

It finds the processes that have marked themselves (``meshgate_gateway/engine/on_worker/stacks.py``). What their own
children use, such as a data loader's workers, counts as theirs.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from typing import Any

from meshgate.ranks.processes import STACKS_MARK, find_marks, siblings  # sent along
from meshgate.serialization.sent_as_source import Actor, SentAsSource, endpoint

SMI = "nvidia-smi"
SMI_TIMEOUT = 10.0  # seconds; the driver may have to wake the GPUs
MIB = 2**20
DEVICES = "index,uuid,utilization.gpu,memory.used,memory.total"
APPS = "pid,gpu_uuid,used_memory"


class UsageReader(Actor, metaclass=SentAsSource):
    """Keeps the CPU times of one look for the next."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], float] = {}  # of CPU time, by pid and start of the process
        self._looked = 0.0

    @endpoint
    def read(self) -> dict[str, Any]:
        """The name of the ``host``, its ``processes`` and ``gpus``, and ``problem``: why the latter are not known.

        A process has ``mesh``, ``rank``, ``host``, ``pid``, ``cpu`` (percent of one CPU since the last look; None at
        the first), ``memory`` (resident bytes), ``gpus`` (indexes), and ``gpu_memory`` (bytes; None if unknown).
        """
        stats = {pid: stat for pid in siblings() if (stat := read_stat(pid)) is not None}
        marks = {pid: mark for pid in stats if (mark := _mark(pid)) is not None}
        families: dict[int, list[int]] = {pid: [] for pid in marks}
        for pid in stats:
            owner = _owner(pid, stats, marks)
            if owner is not None:
                families[owner].append(pid)
        before, since = self._seconds, self._looked
        self._seconds = {(pid, stat["start"]): stat["cpu"] for pid, stat in stats.items()}
        self._looked = time.monotonic()
        gpus, users, problem = read_gpus()
        processes = []
        for pid, mark in marks.items():
            own = [user for user in users if user["pid"] in families[pid]]
            used = {user["uuid"] for user in own}
            keys = [(member, stats[member]["start"]) for member in families[pid]]
            spent = sum(self._seconds[key] - before.get(key, 0.0) for key in keys)
            known = (pid, stats[pid]["start"]) in before
            processes.append(
                {
                    **{name: mark[name] for name in ("mesh", "rank", "host", "pid")},
                    "cpu": 100 * spent / (self._looked - since) if known else None,
                    "memory": sum(stats[member]["memory"] for member in families[pid]),
                    "gpus": [gpu["index"] for gpu in gpus if gpu["uuid"] in used]
                    or visible_gpus(mark.get("gpus"), gpus),
                    "gpu_memory": sum(user["memory"] or 0 for user in own) if own else None,
                }
            )
        host = os.environ.get("MESHGATE_HOST_NAME") or socket.gethostname()
        return {"host": host, "processes": processes, "gpus": gpus, "problem": problem}


def _mark(pid: int) -> dict[str, Any] | None:
    marks = find_marks(pid, STACKS_MARK)
    for descriptor, _ in marks:
        os.close(descriptor)
    return marks[0][1] if marks else None


def _owner(pid: int, stats: dict[int, dict[str, Any]], marks: dict[int, Any]) -> int | None:
    """The marked process that ``pid`` is, or that started it, directly or not."""
    while pid in stats and pid not in marks:
        pid = stats[pid]["parent"]
    return pid if pid in marks else None


def read_stat(pid: int) -> dict[str, Any] | None:
    """``parent``, ``start`` (ticks), ``cpu`` (seconds) and ``memory`` (bytes) of a process; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return {
        "parent": int(fields[1]),
        "start": int(fields[19]),
        "cpu": (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        "memory": int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    }


# The standard library only.


def read_gpus() -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """The GPUs, their users, and why they are not known. All are empty if the host has no ``nvidia-smi``.

    A GPU has ``index``, ``uuid``, ``utilization`` (percent), ``memory`` and ``memory_total`` (bytes); a user ``pid``,
    ``uuid`` and ``memory``. None stands for what the GPU does not report.
    """
    if shutil.which(SMI) is None:
        return [], [], ""
    try:
        gpus = [_gpu(line) for line in _query(f"--query-gpu={DEVICES}")]
        users = [_user(line) for line in _query(f"--query-compute-apps={APPS}")]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = (getattr(error, "stdout", None) or "").strip()
        return [], [], f"{SMI} failed: {error}{f': {said}' if said else ''}"
    return gpus, users, ""


def visible_gpus(setting: str | None, gpus: list[dict[str, Any]]) -> list[int]:
    """The indexes in ``CUDA_VISIBLE_DEVICES``, which has indexes or the beginnings of UUIDs; empty if it is not set."""
    names = [name.strip() for name in (setting or "").split(",") if name.strip()]
    return [gpu["index"] for gpu in gpus if any(_names(name, gpu) for name in names)]


def _names(name: str, gpu: dict[str, Any]) -> bool:
    return bool(int(name) == gpu["index"] if name.isdecimal() else gpu["uuid"].startswith(name))


def _query(option: str) -> list[list[str]]:
    command = [SMI, option, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SMI_TIMEOUT)
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _gpu(fields: list[str]) -> dict[str, Any]:
    index, uuid, utilization, used, total = fields
    sizes = {"memory": _number(used, MIB), "memory_total": _number(total, MIB)}
    return {"index": int(index), "uuid": uuid, "utilization": _number(utilization), **sizes}


def _user(fields: list[str]) -> dict[str, Any]:
    pid, uuid, used = fields
    return {"pid": int(pid), "uuid": uuid, "memory": _number(used, MIB)}


def _number(text: str, unit: int = 1) -> int | None:
    """None for ``[N/A]`` and ``[Not Supported]``."""
    return int(text) * unit if text.isdecimal() else None
