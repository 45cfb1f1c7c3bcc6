"""The address at which the machines of the cluster reach this one."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

from meshgate_slurm import commands
from meshgate_slurm.errors import SlurmError


def own_address(partition: str | None) -> str:
    """The address of this machine on the network of the nodes: that of its route to one of them. Raises SlurmError."""
    node = commands.node_address(partition) or commands.node_address(None)  # of a wrong partition, sbatch complains
    if node is None:
        raise SlurmError("sinfo lists no nodes")
    try:
        found = _route_to(socket.getaddrinfo(node, 9, type=socket.SOCK_DGRAM))
    except OSError as error:
        raise SlurmError(f"this machine ({socket.gethostname()}) has no route to node {node}: {error}") from None
    return found


def _route_to(targets: Sequence[tuple[Any, ...]]) -> str:
    family, kind, _, _, target = targets[0]
    with socket.socket(family, kind) as probe:  # UDP: nothing is sent
        probe.connect(target)
        return str(ipaddress.ip_address(probe.getsockname()[0]))
