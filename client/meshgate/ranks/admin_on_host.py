"""The actor that starts Monarch's admin server on a host; it needs nothing but torchmonarch."""

from __future__ import annotations

import os
from typing import Any

from meshgate.serialization.sent_as_source import Actor, SentAsSource, endpoint


class AdminStarter(Actor, metaclass=SentAsSource):
    @endpoint
    def start(self, meshes: Any, address: str) -> tuple[str, str]:
        """Starts the server, which ends with this process. Returns its URL on this host, or what went wrong."""
        from monarch._src.actor.host_mesh import _spawn_admin  # noqa: PLC0415 - only on hosts

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # it prints URLs that do not work on the laptop
        try:
            url, _ = _spawn_admin(meshes, admin_addr=address).get()
        except Exception as error:  # noqa: BLE001 - reported to the laptop
            return "", str(error)
        return str(url), ""
