"""Opens a port-forward: in SPDY as kubectl does, or in a websocket.

A thread with its own event loop copies bytes between the connection to the API server and one end of a socket pair, and
ends when either side closes. A forward therefore ends with its user and does not depend on the user's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from urllib.parse import urlsplit

from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.http11 import Response

from meshgate.jobs.kubernetes.port_forward.local_end import ForwardFailed, LocalEnd
from meshgate.jobs.kubernetes.port_forward.spdy_end import SpdyEnd, UpgradeRefused, connect_spdy
from meshgate.jobs.kubernetes.port_forward.websocket_end import WebsocketEnd, connect_websocket
from meshgate_kubernetes.api.client import PortForwardRequest
from meshgate_kubernetes.api.rejections import rejection_error

log = logging.getLogger("meshgate.jobs.kubernetes")

OPEN_TIMEOUT = 10.0


def open_forward(request: PortForwardRequest) -> Future[socket.socket]:
    """Opens a forward. The future gets its socket once the API server has accepted it, or ForwardFailed."""
    opened: Future[socket.socket] = Future()
    user_end, forward_end = socket.socketpair()
    arguments = (request, user_end, forward_end, opened)
    threading.Thread(target=_run, args=arguments, name="meshgate-port-forward", daemon=True).start()
    return opened


def _run(
    request: PortForwardRequest, user_end: socket.socket, forward_end: socket.socket, opened: Future[socket.socket]
) -> None:
    try:
        asyncio.run(_forward(request, user_end, forward_end, opened))
    except InvalidStatus as error:
        status = error.response.status_code
        reason = _rejection(request, error.response)
        _fail(opened, ForwardFailed(f"the API server rejected the port-forward: {reason}", status))
    except ForwardFailed as error:
        _fail(opened, error)
    except (TimeoutError, asyncio.TimeoutError):
        _fail(opened, ForwardFailed(f"the port-forward failed: no answer within {OPEN_TIMEOUT:g} s"))
    except (OSError, WebSocketException, EOFError) as error:
        _fail(opened, ForwardFailed(f"the port-forward failed: {error}"))
    finally:
        forward_end.close()
        if not opened.done() or opened.cancelled() or opened.exception() is not None:
            user_end.close()


def _rejection(request: PortForwardRequest, response: Response) -> str:
    url = urlsplit(request.url)
    body = bytes(response.body or b"")
    error = rejection_error(response.status_code, body, host=url.netloc, source="this user", request=f"GET {url.path}")
    return str(error)


def _fail(opened: Future[socket.socket], error: ForwardFailed) -> None:
    if opened.done():
        log.debug("%s", error)
    else:
        opened.set_exception(error)


async def _forward(
    request: PortForwardRequest, user_end: socket.socket, forward_end: socket.socket, opened: Future[socket.socket]
) -> None:
    loop = asyncio.get_running_loop()
    local = LocalEnd()
    remote = await asyncio.wait_for(_connect(request, local), OPEN_TIMEOUT)
    try:
        await loop.create_connection(lambda: local, sock=forward_end)
        local.start(remote)
        if opened.set_running_or_notify_cancel():
            opened.set_result(user_end)
            await local.ended
    finally:
        local.close()
        with suppress(OSError, WebSocketException):
            await remote.close()


async def _connect(request: PortForwardRequest, local: LocalEnd) -> SpdyEnd | WebsocketEnd:
    """SPDY is faster, but some proxies pass only websockets. A websocket is also what reports why a request that the
    API server rejects is rejected."""
    if request.proxy is None:
        try:
            return await connect_spdy(request, local)
        except UpgradeRefused as error:
            log.debug("forwarding in a websocket, because SPDY is refused: %s", error)
    return await connect_websocket(request, local)
