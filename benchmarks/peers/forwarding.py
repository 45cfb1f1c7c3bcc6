"""``python -m benchmarks.peers.forwarding --host ADDRESS HOST...``: the gateway of ``benchmarks.beside``.

It has no sessions and no engines: it authenticates each request with the job's token (``MESHGATE_TOKEN``), and forwards
the connection to the server beside the engines, with a key made of that token. It finds that server by asking the job's
hosts. So it keeps nothing that another one in its place would need.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import http.client
import os
import signal
import socket
from collections.abc import Sequence
from http import HTTPStatus
from typing import cast
from urllib.parse import urlsplit

import uvloop
from pydantic import SecretStr

from meshgate_gateway.http.auth import Denied, TokenAuthenticator, credentials_for
from meshgate_gateway.http.messages import Request, Response
from meshgate_gateway.http.server import Server, listen

PORT = 8650
ASK_TIMEOUT = 2.0


def engines_key(token: str) -> str:
    """What the server beside the engines accepts. User code that reads it there can open sessions of the job inside the
    cluster, but does not learn the token, which does so from anywhere."""
    return hmac.new(token.encode(), b"meshgate engines", hashlib.sha256).hexdigest()


def has_engines(host: str, key: str) -> bool:
    """Whether the job's server beside its engines runs on ``host``."""
    connection = http.client.HTTPConnection(host, PORT, timeout=ASK_TIMEOUT)
    try:
        connection.request("GET", "/v1/job", headers={"Authorization": f"Bearer {key}"})
        return connection.getresponse().status == HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


class Forwarding:
    """Responds to requests by forwarding them to that of ``hosts`` which has the engines."""

    def __init__(self, token: str, hosts: Sequence[str]) -> None:
        self._authenticator = TokenAuthenticator(SecretStr(token))
        self._key = SecretStr(engines_key(token))
        self._hosts = hosts

    async def respond(self, request: Request, connection: socket.socket) -> Response | None:
        path = urlsplit(request.path).path
        if path == "/readyz":
            return Response(HTTPStatus.OK, {}) if await self._find() else _no_engines()
        caller = await self._authenticator.authenticate(request)
        if isinstance(caller, Denied):
            return caller.response()
        host = await self._find()
        if host is None:
            return _no_engines()
        first, rest = request.head.split(b"\r\n", 1)
        added = credentials_for(request, caller.caller, self._key)
        head = b"\r\n".join([first, *(f"{name}: {value}".encode("latin-1") for name, value in added.items()), rest])
        await _forward(connection, host, head + request.body)
        return None

    async def _find(self) -> str | None:
        key = self._key.get_secret_value()
        answers = await asyncio.gather(*(asyncio.to_thread(has_engines, host, key) for host in self._hosts))
        return next((host for host, has in zip(self._hosts, answers, strict=True) if has), None)


def _no_engines() -> Response:
    return Response.error(HTTPStatus.SERVICE_UNAVAILABLE, "no host of the job has its engines", for_job=True)


class _Side(asyncio.Protocol):
    """One of two connections; what it receives goes to the other."""

    other: _Side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.other.transport.write(data)

    def pause_writing(self) -> None:
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.other.transport.close()


async def _forward(connection: socket.socket, host: str, head: bytes) -> None:
    """Forwards until one of the two connections ends. Raises OSError."""
    loop = asyncio.get_running_loop()
    outer, inner = _Side(), _Side()
    outer.other, inner.other = inner, outer
    # Neither side sends anything before it has received the request, or the response to it.
    await loop.create_connection(lambda: inner, host, PORT)
    await loop.connect_accepted_socket(lambda: outer, connection.dup())
    inner.transport.write(head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True, help="the address to listen on")
    parser.add_argument("hosts", nargs="+", help="the addresses of the job's hosts")
    options = parser.parse_args()
    forwarding = Forwarding(os.environ["MESHGATE_TOKEN"], options.hosts)

    # The first process of a container has no default for it. Connections end with this process, which drivers notice.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

    async def serve() -> None:
        await Server([listen(options.host, PORT)], forwarding.respond).serve()

    uvloop.run(serve())


if __name__ == "__main__":
    main()
