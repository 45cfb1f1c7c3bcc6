"""Where a host listens, read out of Monarch's address syntax: what it takes to see that it can be reached."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["AddressError", "ListeningAt", "listening_at"]


class AddressError(ValueError):
    """The address is not one that a host can serve."""


@dataclass(frozen=True, slots=True)
class ListeningAt:
    """A stream socket's family and address, from the same machine."""

    family: int
    address: str | tuple[str, int]

    def accepts(self, timeout: float) -> bool:
        """Whether something accepts connections there now. Blocks for at most ``timeout`` seconds."""
        with socket.socket(self.family, socket.SOCK_STREAM) as probe:
            probe.settimeout(timeout)
            try:
                probe.connect(self.address)
            except OSError:
                return False
            return True

    def clear(self, *, directory: bool = False) -> None:
        """Removes what a host here leaves in the file system; with ``directory``, that of the socket if empty."""
        if isinstance(self.address, str):
            with suppress(OSError):  # absent, or not ours to remove: then Monarch says why it cannot listen
                Path(self.address).unlink()
            with suppress(OSError):  # another host's socket is still there
                if directory:
                    Path(self.address).parent.rmdir()


def listening_at(address: str) -> ListeningAt:
    """``ipc://path``, ``tcp://host:port`` or ``tcp://name:port@tcp://0.0.0.0:port``, each with or without
    ``<proc id>@`` before it.

    Raises AddressError, for abstract sockets (``ipc://@name``) as well: any user of the machine may connect to
    those, and who connects to a host runs code on it.
    """
    bind = address.rpartition("@")[2]
    if bind.startswith("ipc://") and (path := bind.removeprefix("ipc://")):
        return ListeningAt(socket.AF_UNIX, path)
    try:
        parts = urlsplit(bind)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise AddressError(f"the address {address!r} is malformed: {error}") from None
    if parts.scheme != "tcp" or not host or not port:
        raise AddressError(
            f"the address {address!r} is none a host can serve: use ipc://<path>, tcp://<host>:<port> "
            f"or tcp://<name>:<port>@tcp://0.0.0.0:<port>"
        )
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return ListeningAt(family, (host, port))
