"""The socket on which a host listens, parsed from its Monarch address."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


class AddressError(ValueError):
    """A host cannot serve this address."""


@dataclass(frozen=True, slots=True)
class ListeningAt:
    """A stream socket's family and its address on this machine."""

    family: int
    address: str | tuple[str, int]

    def accepts(self, timeout: float) -> bool:
        """Whether a process accepts connections there. Blocks for at most ``timeout`` seconds."""
        with socket.socket(self.family, socket.SOCK_STREAM) as probe:
            probe.settimeout(timeout)
            try:
                probe.connect(self.address)
            except OSError:
                return False
            return True

    def clear(self, *, directory: bool = False) -> None:
        """Removes a stale unix socket; with ``directory``, also its directory if empty."""
        if isinstance(self.address, str):
            with suppress(OSError):  # absent, or not removable: then Monarch reports why it cannot listen
                Path(self.address).unlink()
            with suppress(OSError):  # another host's socket is still there
                if directory:
                    Path(self.address).parent.rmdir()


def listening_at(address: str) -> ListeningAt:
    """Parses ``ipc://path``, ``tcp://host:port`` or ``tcp://name:port@tcp://0.0.0.0:port``, optionally preceded by
    ``<proc id>@``.

    Raises AddressError, also for abstract sockets (``ipc://@name``): every user of the machine can connect to those,
    and a client that connects to a host can run code on it.
    """
    bind = address.rpartition("@")[2]
    if bind.startswith("ipc://") and (path := bind.removeprefix("ipc://")):
        return ListeningAt(socket.AF_UNIX, path)
    try:
        parts = urlsplit(bind)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise AddressError(f"malformed address {address!r}: {error}") from None
    if parts.scheme != "tcp" or not host or not port:
        raise AddressError(
            f"unsupported address {address!r}: use ipc://<path>, tcp://<host>:<port> "
            f"or tcp://<name>:<port>@tcp://0.0.0.0:<port>"
        )
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return ListeningAt(family, (host, port))
