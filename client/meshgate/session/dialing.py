"""How a gateway is reached, and what its HTTP responses mean.

A ``Dialer`` finds a route for each connection: a URL through an ingress, or a port-forward with a new
socket each time. It may also know that the gateway itself is gone, which a cut connection alone does not show.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import ssl as ssl_module
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import socket
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from meshgate.caller import warn_caller
from meshgate.errors import (
    AuthenticationError,
    ConnectionFailedError,
    EngineDiedError,
    GatewayError,
    GatewayLostError,
    InvalidRequestError,
    MeshgateError,
    SessionExpiredError,
    SessionTakenOverError,
    VersionMismatchError,
)
from meshgate.session.certificates import SET_CLIENT_CERT, Certificates

PING_INTERVAL = 15.0  # seconds; the shortest idle timeout seen in load balancers is 30
_SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}
T = TypeVar("T")
_FORWARDED = "/v1/jobs/"  # in the URL of a job behind a provisioning gateway, which accepts no job's token
RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_NOT_IN_A_HEADER = re.compile(r"[\x00-\x1f\x7f]|[^\x00-\xff]")
_TITLE = re.compile(rb"<title>[\d\s]*([^<]{1,200})</title>", re.IGNORECASE)  # without the status


@dataclass(frozen=True, slots=True)
class Route:
    """How to reach a gateway for one connection.

    If ``sock``, a connected socket, or ``unix_socket``, a path, is given, it is used instead of dialling ``url``.
    ``ping_interval``: the seconds between two pings, by which a silent end of the gateway is noticed.
    """

    url: str  # ws:// or wss://, without the path of the session
    sock: socket | None = None
    unix_socket: str | None = None
    ssl: ssl_module.SSLContext | None = None
    certificates: Certificates | None = None  # those in ``ssl``, to explain its errors
    headers: Mapping[str, str] = field(default_factory=dict)
    through_proxy: bool = True
    renews_token: bool = False  # whether others renew the token, so that the next connection may have another one
    ping_interval: float = PING_INTERVAL

    @property
    def token(self) -> str | None:
        """The token that requests along this route present."""
        return self.headers.get("Authorization", "").partition(" ")[2] or None


async def call_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Like ``asyncio.to_thread``, for dialers. Raises ConnectionFailedError while the interpreter exits, when there are
    no more threads: a session that has just been closed may still dial."""
    try:
        called = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    except RuntimeError as error:
        raise ConnectionFailedError(f"this program is ending: {error}") from error
    return await called


_sockets: weakref.WeakKeyDictionary[asyncio.BaseProtocol, Any] = weakref.WeakKeyDictionary()


def close_in_forked_children(protocol: asyncio.BaseProtocol, transport: asyncio.BaseTransport) -> None:
    """Makes the connection end with this process. A forked child that lives on would keep it open, so that the gateway
    would take the session for that of a laptop that sleeps."""
    _sockets[protocol] = transport.get_extra_info("socket")


def _close_in_forked_child() -> None:
    # Only the descriptors: a shutdown, and what the event loop or TLS would do, affects the parent's connections, too.
    # Their numbers stay taken, because the sockets, once collected, close whatever has them.
    if not _sockets:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for sock in list(_sockets.values()):
        with contextlib.suppress(OSError):  # the number is -1 once the socket is closed
            os.dup2(nothing, sock.fileno(), inheritable=False)
    os.close(nothing)
    _sockets.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_forked_child)


class Dialer(Protocol):
    """Finds the route to one gateway. Called on the connection's event loop."""

    async def dial(self) -> Route:
        """The route for the next attempt. Raises OSError if there is none at present."""

    async def gone(self) -> str | None:
        """Why the gateway will never answer again, if that is certain; otherwise None."""

    def __str__(self) -> str:
        """The gateway's name in error messages."""


class UrlDialer:
    """Reaches a gateway at a ``ws://`` or ``wss://`` (``http://``, ``https://``) URL.

    ``token`` may be a function that returns it, for one that is renewed: it is called for each connection, in a thread,
    and may raise OSError or ConnectionFailedError. ``renews_token`` returns whether others renew that token: then a
    session waits for the next one. ``ca`` is a file of certificates to trust besides the system's, and ``cert`` and
    ``key`` are files with a client certificate and its key, for an ingress that requires one; by default,
    ``$MESHGATE_CA``, ``$MESHGATE_CLIENT_CERT`` and ``$MESHGATE_CLIENT_KEY``. They are read for each connection. For a
    gateway on this machine, ``alive`` returns whether its process runs, and ``unix_socket`` is a faster route.
    ``here``: it is on this machine, at an address that other machines can reach, too.
    """

    def __init__(
        self,
        url: str,
        token: str | Callable[[], str],
        *,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        alive: Callable[[], bool] | None = None,
        unix_socket: str | None = None,
        here: bool = False,
        renews_token: Callable[[], bool] = lambda: True,
    ) -> None:
        parts = urlsplit(url)
        scheme = _SCHEMES.get(parts.scheme, "")
        if not is_gateway_url(url):
            raise ValueError(f"{url!r} is not the URL of a gateway: expected ws://host:port or wss://host[:port]")
        if parts.username is not None:
            raise ValueError(
                f"the URL of the gateway at {parts.hostname} contains a user name or a password, which would be "
                "sent in place of the token: remove it, and set MESHGATE_TOKEN"
            )
        self.url = parts._replace(scheme=scheme, path=parts.path.rstrip("/"), query="", fragment="").geturl()
        if not callable(token) and (problem := self._unsendable(token)):
            raise ValueError(problem)
        self._token, self._renews_token = token, renews_token
        self._alive = alive
        self._unix_socket = unix_socket
        self._through_proxy = not here and not _is_loopback(parts.hostname or "")
        if scheme == "ws" and token and self._through_proxy:
            warn_caller(
                f"{self.url}: the token and all data are sent unencrypted, so everyone on the way can use this "
                "job. Use wss:// behind an ingress with TLS, or a tunnel: kubectl port-forward, or ssh -L"
            )
        self.certificates = Certificates(ca, cert, key) if scheme == "wss" else None

    async def dial(self) -> Route:
        token = await call_in_thread(self._token) if callable(self._token) else self._token
        if problem := self._unsendable(token):
            raise ConnectionFailedError(problem)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        route = Route(
            self.url,
            ssl=None if self.certificates is None else self.certificates.context(),
            certificates=self.certificates,
            headers=headers,
            through_proxy=self._through_proxy,
            renews_token=callable(self._token) and self._renews_token(),
        )
        return replace(route, unix_socket=self._unix_socket) if _exists(self._unix_socket) else route

    def _unsendable(self, token: str) -> str:
        """Why this token cannot be sent, or an empty string. The errors of HTTP libraries would repeat it."""
        if not (wrong := _NOT_IN_A_HEADER.search(token)):
            return ""
        return (
            f"the token for {self} cannot be sent, because it contains the character {wrong[0]!r}: set it again, "
            "without what may have been copied along with it"
        )

    @property
    def on_this_machine(self) -> bool:
        """Whether it is the gateway of a job whose hosts are processes of this machine."""
        return self._alive is not None

    async def gone(self) -> str | None:
        if self._alive is None or self._alive():
            return None
        return "its process has exited"

    def __str__(self) -> str:
        return f"the gateway at {self.url}"


def is_gateway_url(url: str) -> bool:
    """Whether ``url`` can be the URL of a gateway."""
    try:
        parts = urlsplit(url)
        return parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an unclosed bracket, an invalid port
        return False


def _exists(unix_socket: str | None) -> bool:
    """A cleaner of temporary files may have removed the socket; then the URL is used."""
    return unix_socket is not None and Path(unix_socket).is_socket()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def describe_response(status: int, body: bytes, *, proven: bool = True) -> str:
    """The HTTP response that a gateway, or an ingress in front of it (not ``proven``), sent instead of accepting a
    connection."""
    text = _text(body)
    by = "" if proven else " from another server in its place"
    return f"HTTP {status}{by}: {text}" if text else f"HTTP {status}{by}"


def error_of_response(
    status: int, body: bytes, gateway: str, *, proven: bool, resuming: bool = False
) -> MeshgateError | None:
    """The error behind an HTTP response; None if another attempt may succeed.

    Only a response that is ``proven`` to be the gateway's can end a session (``resuming``): while the gateway restarts,
    an ingress responds in its place, with any status and any text.
    """
    response = _json_object(body)
    text = _text(body)
    if not proven:
        return None if resuming or status in RETRIED_STATUS else _not_a_gateway(status, text, gateway, response)
    if status in (401, 403):
        hint = (
            ". Ask the operator of that gateway for access"
            if _FORWARDED in gateway
            else ". Set MESHGATE_TOKEN to the job's token"
        )
        return AuthenticationError(f"{gateway} rejected this client: {text}{'' if 'MESHGATE_TOKEN' in text else hint}")
    if status == 426:
        return VersionMismatchError(f"{gateway}: {text}")
    if status == 410:
        reason = str(response.get("reason") or text)
        return _session_over(gateway, str(response.get("kind")), reason, str(response.get("output") or ""))
    if status in RETRIED_STATUS:
        return None
    return ConnectionFailedError(f"{gateway} refused the connection with HTTP {status}: {text}")


def _not_a_gateway(status: int, text: str, gateway: str, response: Mapping[str, Any]) -> MeshgateError:
    if status == 426 and "protocol" in response:  # a gateway of before proofs
        return VersionMismatchError(f"{gateway}: {text}")
    said = f" ({text[:200]})" if text else ""
    if "certificate" in text.lower():  # nginx, which accepts the connection first
        return ConnectionFailedError(f"{gateway}: the ingress responded with HTTP {status}{said}: {SET_CLIENT_CERT}")
    return ConnectionFailedError(
        f"{gateway}: the server there responded with HTTP {status}{said} and is not a meshgate gateway, is older than "
        "this client, or did not receive this client's token. Check the URL and the gateway's version, and that any "
        "ingress or proxy in between forwards to the gateway, admits its clients and leaves their headers as they are"
    )


def _session_over(gateway: str, kind: str, reason: str, output: str) -> MeshgateError:
    if kind == "taken_over":
        return SessionTakenOverError(f"{gateway}: {reason}")
    if kind == "not_detached":
        return InvalidRequestError(f"cannot attach through {gateway}: {reason}")
    if kind == "expired":
        return SessionExpiredError(f"{gateway} has ended this session: {reason}")
    if kind == "ended":
        return GatewayError(f"{gateway} has ended this session: {reason}")
    if kind == "unknown":
        return GatewayLostError(f"{gateway} does not know this session any more, and its meshes are lost: {reason}")
    return EngineDiedError(reason, output)


def _text(body: bytes) -> str:
    """What the response says: a gateway's error, or the title of the page that an ingress has sent."""
    if (error := _json_object(body).get("error")) or (title := _TITLE.search(body[: 1 << 12])) is None:
        return str(error or "").strip()
    return title[1].decode(errors="replace").strip()


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body[: 1 << 20])
    except (ValueError, RecursionError):  # any server may answer, with anything
        return {}
    return value if isinstance(value, dict) else {}
