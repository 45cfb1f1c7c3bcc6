"""The GPUs of this host, and the processes that use them, as ``nvidia-smi`` reports them. The standard library only."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

SMI = "nvidia-smi"
SMI_TIMEOUT = 10.0  # seconds; the driver may have to wake the GPUs
MIB = 2**20
DEVICES = "index,uuid,utilization.gpu,memory.used,memory.total"
APPS = "pid,gpu_uuid,used_memory"


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
