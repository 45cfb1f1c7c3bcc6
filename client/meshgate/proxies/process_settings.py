"""Actors that change settings of the processes of a mesh: the environment of torchrun's ranks
(``procs.setup_torch()``), and the level of the root logger (``procs.logging_option()``).

They need nothing but torchmonarch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from meshgate.proxies.torch_variables import HeldPort, hold_master_port, rank_variables  # sent along
from meshgate.serialization.sent_as_source import Actor, SentAsSource, endpoint


class TorchEnvironment(Actor, metaclass=SentAsSource):
    """Sets the variables of its process."""

    rank: int  # worker processes add it to every actor

    def __init__(self) -> None:
        self.held: HeldPort | None = None

    @endpoint
    def hold_port(self, address: str | None, port: int, hosts: int) -> tuple[str, int, str]:
        """The address and port for rank 0, and why they cannot be used, or "". The port is held until the process
        ends."""
        self.held, answer = hold_master_port(address, port, hosts)
        return answer

    @endpoint
    def set_up(self, world: int, local_world: int, master: Sequence[Any]) -> None:
        os.environ.update(rank_variables(self.rank, world, local_world, master, os.environ))


class LogLevel(Actor, metaclass=SentAsSource):
    """Sets the level of the root logger of its process."""

    @endpoint
    def set(self, level: int) -> None:
        logging.getLogger().setLevel(level)


def set_up_ranks(actors: Any, address: str | None, port: int) -> None:
    """Makes ``actors``, a mesh of TorchEnvironment, the ranks of one group, whose rank 0 serves at ``address``.

    Raises ValueError if rank 0 cannot serve there.
    """
    extent = actors.extent
    hosts = extent["hosts"] if "hosts" in extent.labels else 1
    first = actors.slice(**dict.fromkeys(extent.labels, 0))
    place, held, problem = first.hold_port.call_one(address, port, hosts).get()
    if problem:
        raise ValueError(f"setup_torch(): {problem}")
    actors.set_up.call(len(actors), len(actors) // hosts, (place, held)).get()
