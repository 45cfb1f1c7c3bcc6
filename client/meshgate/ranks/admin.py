"""Monarch's admin server: the topology of a job's meshes over HTTP, for its terminal interface and for curl.

It runs in a process of the first host, where it is next to what it inspects, and its port is forwarded to this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from meshgate.errors import JobError
from meshgate.ranks.admin_on_host import AdminStarter
from meshgate.ranks.forward import ForwardedPort, forward

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy

START_TIMEOUT = 60.0  # seconds
LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True)
class MeshAdminConfig:
    """``admin_addr``: the address on the first host, ``127.0.0.1:PORT``; by default a free port."""

    admin_addr: str | None = None

    def __post_init__(self) -> None:
        host, _, port = (self.admin_addr or "127.0.0.1:0").rpartition(":")
        if host not in LOOPBACK or not port.isdecimal():
            raise ValueError(
                f"admin_addr={self.admin_addr!r}: expected 127.0.0.1:PORT. The admin server has no password, so it "
                "listens on loopback of the first host only; state().admin_url is its address on this machine"
            )


class MeshAdmin:
    """The admin server of one job's sessions, one at a time."""

    def __init__(self, config: MeshAdminConfig) -> None:
        self._config = config
        self._forwarded: ForwardedPort | None = None
        self._client: object = None
        self._url = ""

    def url(self, meshes: Mapping[str, HostMeshProxy]) -> str:
        """The server's address on this machine. Starts it if this session has none. Raises JobError."""
        first = next(iter(meshes.values()))
        if self._client is not first._client or (self._forwarded is not None and self._forwarded.error is not None):
            self.close()
            self._start(first.slice(hosts=slice(0, 1)), list(meshes.values()))
            self._client = first._client
        return self._url

    def close(self) -> None:
        """Ends the forwarding; the server ends with the session."""
        if self._forwarded is not None:
            self._forwarded.close()
        self._forwarded = self._client = None

    def _start(self, host: HostMeshProxy, meshes: list[HostMeshProxy]) -> None:
        starter: Any = host.spawn_procs(name="admin").spawn("admin", AdminStarter)
        address = self._config.admin_addr or "127.0.0.1:0"
        url, problem = starter.start.call_one(meshes, address).get(timeout=START_TIMEOUT)
        if problem:
            raise JobError(f"Monarch's admin server does not start on {address} of the first host: {problem}")
        served = urlsplit(url)
        self._forwarded = forward(host, served.port or 0, 0, local_port=None, reverse=False)
        self._url = f"{served.scheme}://127.0.0.1:{self._forwarded.port}"
