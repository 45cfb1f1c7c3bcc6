"""``procs.setup_torch()``: gives actors the environment of torchrun's ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from meshgate.proxies.torch_variables import HeldPort, master_address, rank_variables  # sent along
from meshgate.serialization.sent_as_source import Actor, SentAsSource, endpoint


class TorchEnvironment(Actor, metaclass=SentAsSource):
    """Sets the variables of its process. It needs nothing but torchmonarch."""

    rank: int  # worker processes add it to every actor

    def __init__(self) -> None:
        self.held: HeldPort | None = None

    @endpoint
    def hold_port(self, address: str | None, port: int, hosts: int) -> tuple[str, int, str]:
        """The address and port for rank 0, and why they cannot be used, or "". The port is held until the process
        ends."""
        try:
            place = master_address(address, hosts)
            self.held = HeldPort(port)
        except OSError as error:
            return "", 0, error.strerror or str(error)
        except ValueError as error:
            return "", 0, str(error)
        return place, self.held.port, ""

    @endpoint
    def set_up(self, world: int, local_world: int, master: Sequence[Any]) -> None:
        os.environ.update(rank_variables(self.rank, world, local_world, master, os.environ))


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
