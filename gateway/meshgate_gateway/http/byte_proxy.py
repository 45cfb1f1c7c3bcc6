"""Forwards an accepted connection to another HTTP server, byte by byte, in both directions."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from meshgate_gateway.http.messages import Request

CONNECT_TIMEOUT = 5.0
LINGER = 2.0
_READ_SIZE = 1 << 17


async def proxy_bytes(connection: socket.socket, request: Request, path: str, host: str, port: int) -> None:
    """Sends ``request``, with ``path`` in place of its own, to ``host``; then copies bytes both ways until one side
    ends. Owns ``connection``."""
    upstream = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    upstream.setblocking(False)
    upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, upstream, suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(upstream, (host, port)), CONNECT_TIMEOUT)
        await forward_bytes(connection, request, path, upstream)


async def forward_bytes(connection: socket.socket, request: Request, path: str, upstream: socket.socket) -> None:
    """As ``proxy_bytes``, to a server that ``upstream`` is connected to. Owns both sockets."""
    with connection, upstream, suppress(OSError):
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(upstream, _head(request, path))
        directions = ((connection, upstream), (upstream, connection))
        copying = [asyncio.create_task(_copy(source, target)) for source, target in directions]
        try:
            await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(copying, timeout=LINGER)
        finally:
            for task in copying:
                task.cancel()
            await asyncio.gather(*copying, return_exceptions=True)


async def _copy(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while data := await loop.sock_recv(source, _READ_SIZE):
            await loop.sock_sendall(target, data)
        target.shutdown(socket.SHUT_WR)


def _head(request: Request, path: str) -> bytes:
    """The request head for ``path``, including the credentials, which ``Request.head`` omits."""
    first, _, rest = request.head.partition(b"\r\n")
    method, _, version = first.split(b" ", 2)
    credentials = request.header("Authorization")
    authorization = f"Authorization: {credentials}\r\n".encode("latin-1") if credentials is not None else b""
    return b" ".join((method, path.encode("latin-1"), version)) + b"\r\n" + authorization + rest
