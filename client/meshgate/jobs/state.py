"""The state of a running job: its host meshes, each an attribute under its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshgate.client import Client
    from meshgate.proxies import HostMeshProxy

__all__ = ["JobState", "attached"]


class JobState:
    """The meshes a job asked for: ``state.trainers``, ``state.dataloaders``.

    An unknown name raises ``AttributeError`` with the names there are. ``hosts`` maps names to host meshes.
    """

    def __init__(self, hosts: Mapping[str, HostMeshProxy]) -> None:
        self._hosts = dict(hosts)

    def __getattr__(self, attr: str) -> HostMeshProxy:
        # Copying and unpickling look for special methods before _hosts is there.
        hosts: dict[str, HostMeshProxy] = self.__dict__.get("_hosts", {})
        try:
            return hosts[attr]
        except KeyError:
            available = ", ".join(sorted(hosts))
            raise AttributeError(f"'{attr}' is not a valid host mesh name. Available names: {available}") from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._hosts]

    def __repr__(self) -> str:
        return f"JobState(hosts={self._hosts})"


def attached(client: Client, meshes: Mapping[str, int], before: JobState | None) -> JobState:
    """The host meshes ``meshes`` in ``client``'s session: those of ``before``, the state so far, and others anew.

    A session attaches to the hosts of a mesh once: hosts that come back do so in the mesh that lost them, and those
    that are left can be used. Anew is what another session had, what could not be attached to, and what was shut down.
    """
    known = before._hosts if before is not None else {}
    hosts = {
        name: known[name] if name in known and known[name].is_usable_in(client) else client.attach_hosts(name, count)
        for name, count in meshes.items()
    }
    return before if before is not None and hosts == known else JobState(hosts)
