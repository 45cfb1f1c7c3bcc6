"""Requests that a gateway answers with JSON, by the same route as a session's websocket."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from meshgate.errors import ConnectionFailedError, InvalidRequestError
from meshgate.session.dialing import Dialer, Route, describe_response, error_of_response
from meshgate_wire.proof import NONCE_HEADER, PROOF_HEADER, Prover, new_nonce

TIMEOUT = 20.0  # seconds
MAX_RESPONSE = 64 * 2**20


def get_json(dialer: Dialer, path: str) -> Any:
    """The JSON that the gateway answers to ``GET path`` with. Raises as ``request_json``."""
    return request_json(dialer, path)


def request_json(
    dialer: Dialer, path: str, body: bytes | None = None, *, refusals: Container[int] = frozenset()
) -> Any:
    """The JSON that the gateway answers to ``GET path`` with, or to ``POST path`` if there is a ``body``.

    Raises InvalidRequestError with the gateway's reason if it answers with a status of ``refusals``,
    ConnectionFailedError if it cannot be reached or its answer is no JSON, and the error that a rejection means.
    """
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may be inside an event loop, as in a notebook
            route = thread.submit(asyncio.run, dialer.dial()).result()
        status, answer, proven = get(route, path, body)
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionFailedError(f"cannot reach {dialer}: {error or type(error).__name__}") from error
    if status != 200 or not proven:
        rejected = error_of_response(status, answer, str(dialer), proven=proven)
        described = describe_response(status, answer, proven=proven)
        if proven and status in refusals:
            rejected = InvalidRequestError(str(json.loads(answer).get("error")))
        raise rejected or ConnectionFailedError(f"{dialer} did not answer {path}: {described}")
    try:
        return json.loads(answer)
    except ValueError as error:
        raise ConnectionFailedError(f"{dialer} answered {path} with something other than JSON") from error


def get(route: Route, path: str, body: bytes | None = None) -> tuple[int, bytes, bool]:
    """The status and the body of the response to ``GET path``, or to ``POST path`` with a ``body``, and whether a
    gateway has made it."""
    url, nonce = urlsplit(route.url), new_nonce()
    prover = Prover.of_request(nonce, route.token)
    with contextlib.closing(_connect(route)) as connection:
        headers = {**route.headers, NONCE_HEADER: nonce}
        connection.request("GET" if body is None else "POST", url.path.rstrip("/") + path, body, headers)
        response = connection.getresponse()
        answer = response.read(MAX_RESPONSE)
        proof = response.getheader(PROOF_HEADER)
    return response.status, answer, prover is not None and prover.prover_of(proof, response.status, answer) is not None


def _connect(route: Route) -> http.client.HTTPConnection:
    url = urlsplit(route.url)
    secure = url.scheme == "wss"
    host, port = url.hostname or "localhost", url.port or (443 if secure else 80)
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT)
    if route.sock is not None:
        connected = route.sock
        connected.setblocking(True)
        connected.settimeout(TIMEOUT)
    elif route.unix_socket is not None:
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(TIMEOUT)
        try:
            connected.connect(route.unix_socket)
        except BaseException:
            connected.close()
            raise
    else:
        connected = socket.create_connection((host, port), TIMEOUT)
    if secure:
        assert route.ssl is not None
        connected = route.ssl.wrap_socket(connected, server_hostname=host)
    connection.sock = connected
    return connection
