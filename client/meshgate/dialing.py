"""How a gateway is reached, and what its refusals mean.

A :class:`Dialer` finds the way for each connection anew: a URL through an ingress, or a port-forward whose socket is
new each time. It also knows, where anything does, whether the gateway itself is gone, which a cut connection alone
never tells.
"""

from __future__ import annotations

import ipaddress
import json
import ssl as ssl_module
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import socket
from typing import Any, Protocol
from urllib.parse import urlsplit

from meshgate.errors import (
    AuthenticationError,
    ConnectionFailedError,
    EngineDiedError,
    GatewayError,
    GatewayLostError,
    MeshgateError,
    SessionExpiredError,
    VersionMismatchError,
)

__all__ = ["Dialer", "Route", "UrlDialer", "answered", "is_gateway_url", "refusal"]

_SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}
RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Route:
    """The way to a gateway for one connection.

    Instead of dialling ``url``: ``sock``, a connected socket, or ``unix_socket``, the path of one to connect to.
    """

    url: str  # ws:// or wss://, without the path of the session
    sock: socket | None = None
    unix_socket: str | None = None
    ssl: ssl_module.SSLContext | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    through_proxy: bool = True


class Dialer(Protocol):
    """Finds the way to one gateway. Called on the connection's own event loop."""

    async def dial(self) -> Route:
        """The way for the next attempt. Raises OSError where there is none at present."""

    async def gone(self) -> str | None:
        """Why the gateway will never answer again, if that is certain; None if it is there or nobody knows."""

    def __str__(self) -> str:
        """The gateway, for messages to people."""


class UrlDialer:
    """A gateway behind a ``ws://`` or ``wss://`` (``http://``, ``https://``) URL.

    ``ca`` is a file of certificates to trust besides the system's. ``alive`` tells whether the gateway's process
    lives, where that process is on this machine; ``unix_socket`` is the shorter way there is then.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        ca: str | Path | None = None,
        alive: Callable[[], bool] | None = None,
        unix_socket: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        scheme = _SCHEMES.get(parts.scheme, "")
        if not is_gateway_url(url):
            raise ValueError(f"{url!r} is not the URL of a gateway: expected ws://host:port or wss://host[:port]")
        self.url = parts._replace(scheme=scheme, path=parts.path.rstrip("/"), query="", fragment="").geturl()
        self._token = token
        self._alive = alive
        self._unix_socket = unix_socket
        self._through_proxy = not _is_loopback(parts.hostname or "")
        self._ssl: ssl_module.SSLContext | None = None
        if scheme == "wss":
            self._ssl = ssl_module.create_default_context()
            if ca is not None:
                self._ssl.load_verify_locations(ca)

    async def dial(self) -> Route:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        route = Route(self.url, ssl=self._ssl, headers=headers, through_proxy=self._through_proxy)
        return replace(route, unix_socket=self._unix_socket) if _is_there(self._unix_socket) else route

    async def gone(self) -> str | None:
        if self._alive is None or self._alive():
            return None
        return "its process has ended"

    def __str__(self) -> str:
        return f"the gateway at {self.url}"


def is_gateway_url(url: str) -> bool:
    """Whether ``url`` can be the URL of a gateway."""
    try:
        parts = urlsplit(url)
        return parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an unclosed bracket, a port that is none
        return False


def _is_there(unix_socket: str | None) -> bool:
    """A directory of temporary files may have been tidied; then the URL does."""
    return unix_socket is not None and Path(unix_socket).is_socket()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def answered(status: int, body: bytes) -> str:
    """What a gateway, or an ingress before it, answered instead of taking a connection."""
    text = str(_said(body).get("error") or "").strip()
    return f"HTTP {status}: {text}" if text else f"HTTP {status}"


def refusal(status: int, body: bytes, gateway: str, *, resuming: bool = False) -> MeshgateError | None:
    """The error behind an HTTP answer to the handshake; None where trying again may help.

    Only a gateway's own answer, a JSON object that says its ``error``, can end a session (``resuming``): what stands
    before it says 404 or 403 of its own accord while it is restarted.
    """
    said = _said(body)
    text = str(said.get("error") or "").strip()
    if not text:
        return None if resuming or status in RETRIED_STATUS else _not_a_gateway(status, gateway)
    if status in (401, 403):
        hint = "" if "MESHGATE_TOKEN" in text else ". Set MESHGATE_TOKEN to the job's token"
        return AuthenticationError(f"{gateway} refuses this client: {text}{hint}")
    if status == 426:
        return VersionMismatchError(f"{gateway}: {text}")
    if status == 410:
        return _over(gateway, str(said.get("kind")), str(said.get("reason") or text), str(said.get("output") or ""))
    if status in RETRIED_STATUS:
        return None
    return ConnectionFailedError(f"{gateway} refused the connection with HTTP {status}: {text}")


def _not_a_gateway(status: int, gateway: str) -> MeshgateError:
    return ConnectionFailedError(
        f"{gateway}: what answered there, with HTTP {status}, is not a meshgate gateway. Check the URL, and whether an "
        "ingress or a proxy on the way leads to the gateway and lets its clients through"
    )


def _over(gateway: str, kind: str, reason: str, output: str) -> MeshgateError:
    if kind == "expired":
        return SessionExpiredError(f"{gateway} has ended this session: {reason}")
    if kind == "ended":
        return GatewayError(f"{gateway} has ended this session: {reason}")
    if kind == "unknown":
        return GatewayLostError(f"{gateway} knows nothing of this session any more, what it held is lost: {reason}")
    return EngineDiedError(reason, output)


def _said(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body[: 1 << 20])
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
