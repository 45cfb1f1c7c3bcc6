"""The part of a node's CPUs and memory that goes with some of its GPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshgate_slurm.errors import SlurmError

_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)")


def share_of_node(nodes: Sequence[tuple[int, int, str]], gpus: int) -> tuple[int, int]:
    """CPUs and memory in MB in proportion to ``gpus``, on the smallest of ``nodes`` that has so many.

    ``nodes`` are CPUs, memory in MB and Slurm's generic resources. Raises SlurmError if no node has so many GPUs.
    """
    shares = []
    for cpus, memory, resources in nodes:
        there = sum(int(count) for count in _GPUS.findall(resources))
        if there >= gpus:
            shares.append((cpus * gpus // there, memory * gpus // there))
    if not shares:
        raise SlurmError(f"share_node(): no node of the partition has {gpus} GPUs")
    return max(min(cpus for cpus, _ in shares), 1), min(memory for _, memory in shares)
