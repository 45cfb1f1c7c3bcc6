"""The state of a running job: its host meshes, each an attribute under its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy

__all__ = ["JobState"]


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
            raise AttributeError(
                f"'{attr}' is not a valid host mesh name. Available names: {available}"
            ) from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._hosts]

    def __repr__(self) -> str:
        return f"JobState(hosts={self._hosts})"
