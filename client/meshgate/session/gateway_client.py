"""Requests to a gateway, by HTTP and by a websocket that may be cut.

Those that it answers with JSON take the same route as a session's websocket.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import random
import re
import socket
import time
from collections.abc import Callable, Container, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from ssl import SSLEOFError
from typing import Any, Generic, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ValidationError
from websockets.exceptions import InvalidMessage, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from meshgate.errors import ConnectionFailedError, GatewayError, InvalidRequestError, JobError
from meshgate.session.certificates import CertificateError, find_proxy
from meshgate.session.dialing import Dialer, Route, UrlDialer, describe_response, error_of_response
from meshgate_wire.proof import NONCE_HEADER, PROOF_HEADER, Prover, new_nonce

ANSWER_TIMEOUT = 20.0  # seconds
MAX_RESPONSE = 64 * 2**20
REPLY_TIMEOUT = 30.0
RECONNECT_TIMEOUT = 60.0
FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0
CUTS = 6  # of one question in a row, before the gateway counts as unreachable: an ingress may cut any connection

ReplyT = TypeVar("ReplyT")
RejectedT = TypeVar("RejectedT", bound=BaseModel)
AnswerT = TypeVar("AnswerT", bound=BaseModel)

_CUT = (
    *(ConnectionResetError, http.client.RemoteDisconnected, http.client.IncompleteRead),
    *(InvalidMessage, SSLEOFError),  # in the handshakes of a websocket and of TLS
)
_PROXY = re.compile(r"http://(?:([^@]*)@)?([^/@?#]+?)(?::(\d+))?/?", re.IGNORECASE)


def request_json(
    dialer: Dialer, path: str, body: bytes | None = None, *, refusals: Container[int] = frozenset()
) -> Any:
    """The JSON that the gateway answers to ``GET path`` with, or to ``POST path`` if there is a ``body``.

    Raises InvalidRequestError with the gateway's reason if it answers with a status of ``refusals``,
    ConnectionFailedError if it cannot be reached or its answer is no JSON, and the error that a rejection means.
    """
    try:
        status, answer, proven = get(_route(dialer), path, body)
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


def _route(dialer: Dialer) -> Route:
    with ThreadPoolExecutor(1) as thread:  # the caller may be inside an event loop, as in a notebook
        return thread.submit(asyncio.run, dialer.dial()).result()


def get(route: Route, path: str, body: bytes | None = None) -> tuple[int, bytes, bool]:
    """The status and the body of the response to ``GET path``, or to ``POST path`` with a ``body``, and whether a
    gateway has made it."""
    url, nonce = urlsplit(route.url), new_nonce()
    prover = Prover.of_request(nonce, route.token)
    try:
        with contextlib.closing(_connect(route)) as connection:
            headers = {**route.headers, NONCE_HEADER: nonce}
            connection.request("GET" if body is None else "POST", url.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            answer = response.read(MAX_RESPONSE)
            proof = response.getheader(PROOF_HEADER)
    except (OSError, http.client.HTTPException) as error:
        why = route.certificates and route.certificates.explain(route.url, error, through_proxy=route.through_proxy)
        if not why:
            raise
        raise CertificateError(why) from error
    return response.status, answer, prover is not None and prover.prover_of(proof, response.status, answer) is not None


def _connect(route: Route) -> http.client.HTTPConnection:
    url = urlsplit(route.url)
    secure = url.scheme == "wss"
    host, port = url.hostname or "localhost", url.port or (443 if secure else 80)
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_TIMEOUT)
    if route.sock is not None:
        connected = route.sock
        connected.setblocking(True)
        connected.settimeout(ANSWER_TIMEOUT)
    elif route.unix_socket is not None:
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(ANSWER_TIMEOUT)
        try:
            connected.connect(route.unix_socket)
        except BaseException:
            connected.close()
            raise
    elif route.through_proxy and (proxy := find_proxy(route.url)):
        connected = _tunnel(proxy, host, port)
    else:
        connected = socket.create_connection((host, port), ANSWER_TIMEOUT)
    if secure:
        assert route.ssl is not None
        connected = route.ssl.wrap_socket(connected, server_hostname=host)
    connection.sock = connected
    return connection


def _tunnel(url: str, host: str, port: int) -> socket.socket:
    """A connection to ``host`` through the proxy at ``url``. Raises OSError, which names the proxy but no password."""
    name, found = f"the proxy {url.rpartition('@')[2]}", _PROXY.fullmatch(url)
    if found is None:
        raise OSError(f"{name} is not supported: its URL must be of the form http://HOST:PORT")
    user, proxy, proxy_port = found.groups()
    connection = http.client.HTTPConnection(proxy, int(proxy_port or 80), timeout=ANSWER_TIMEOUT)
    login = base64.b64encode(unquote(user or "").encode()).decode()
    connection.set_tunnel(host, port, {"Proxy-Authorization": f"Basic {login}"} if login else {})
    try:
        connection.connect()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise OSError(f"{name} does not connect to {host}:{port}: {error}") from error
    return connection.sock


class _Connection(ClientConnection):
    def handshake(self, *arguments: Any, **options: Any) -> None:
        """As the base class, but a redirect is a refusal: the request is for the gateway alone."""
        try:
            super().handshake(*arguments, **options)
        except InvalidStatus as error:
            error.response.headers.pop("Location", None)  # some releases of websockets would go there
            raise


class CreatesNoJobs(JobError):
    """The gateway is that of one job, and not a provisioning gateway."""


class NoReply(ConnectionFailedError):
    """The gateway may have received the request; what it has done is unknown."""


class GatewayClient(Generic[ReplyT, RejectedT]):
    """One gateway and a token for it, or a function that returns the present one. ``parse`` reads its replies and
    raises ValidationError; ``rejected`` is the type of the one that rejects a request; ``creates_none`` says what to
    change if it creates no jobs; ``renews_token`` is as for a UrlDialer."""

    def __init__(
        self,
        url: str,
        token: str | Callable[[], str],
        parse: Callable[[str | bytes], ReplyT],
        rejected: type[RejectedT],
        creates_none: str,
        renews_token: Callable[[], bool] = lambda: True,
    ) -> None:
        self._dialer = UrlDialer(url, token, renews_token=renews_token)
        self._url, self._token = self._dialer.url, token
        self._parse, self._rejected, self._creates_none = parse, rejected, creates_none

    def _get(self, path: str, token: str | None = None) -> dict[str, Any]:
        """``token``: instead of this client's."""
        dialer = self._dialer if token is None else UrlDialer(self._url, token)
        for attempt in range(CUTS):
            try:
                found: dict[str, Any] = request_json(dialer, path)
                return found
            except ConnectionFailedError as error:
                if attempt == CUTS - 1 or not isinstance(error.__cause__, _CUT):
                    raise
            time.sleep(min(FIRST_DELAY * 2**attempt, LONGEST_DELAY))
        raise AssertionError("the last attempt returns or raises")

    def _ask(self, request: BaseModel, timeout: float) -> Iterator[ReplyT]:
        """The gateway's replies until it closes the connection; each comes within ``timeout`` seconds."""
        with self._connected() as connection:
            with suppress(WebSocketException):  # if it is closed already, recv() says so
                connection.send(request.model_dump_json())
            while True:
                try:
                    yield self._parse(connection.recv(timeout))
                except WebSocketException:
                    return
                except TimeoutError:
                    raise NoReply(f"{self._dialer} did not reply within {timeout:g} s") from None
                except ValidationError as error:
                    raise JobError(
                        f"{self._dialer} gave a reply that this version of meshgate cannot read "
                        f"({error.errors()[0]['msg']}); install the same version on both sides"
                    ) from None

    def _answer(
        self,
        request: BaseModel,
        expected: type[AnswerT],
        timeout: float = REPLY_TIMEOUT,
        progress: Callable[[ReplyT], object] = lambda reply: None,
    ) -> AnswerT | RejectedT:
        """The first reply that is ``expected`` or rejects the request; ``progress`` takes those before it. Raises as
        ``_ask_with_retries``."""
        with closing(self._ask_with_retries(request, timeout)) as replies:
            for reply in replies:
                if isinstance(reply, (expected, self._rejected)):
                    return reply
                progress(reply)
        raise AssertionError("the replies do not end before one of these")

    def _ask_with_retries(self, request: BaseModel, timeout: float = REPLY_TIMEOUT) -> Generator[ReplyT, None, None]:
        """The gateway's replies across lost connections: the request is sent again, and the gateway continues with the
        job as it is then. Raises ConnectionFailedError if the gateway cannot be reached, and NoReply if it
        stays unreachable or rejects this client later, or does not reply."""
        reached, cuts, delay = False, 0, FIRST_DELAY
        last_reply = last_contact = time.monotonic()
        while True:
            began, reason = time.monotonic(), "it closes each connection"
            try:
                for reply in self._ask(request, timeout):
                    reached, delay = True, FIRST_DELAY
                    last_reply = last_contact = time.monotonic()
                    yield reply
            except ConnectionFailedError as error:
                cuts += 1
                if not reached and (cuts == CUTS or not isinstance(error.__cause__, _CUT)):
                    raise
                reason = str(error)
            except (GatewayError, CreatesNoJobs) as error:  # the new connection is rejected, such as for its token
                if not reached:
                    raise
                raise NoReply(f"lost the connection to {self._dialer} and could not reconnect: {error}") from error
            else:
                reached = True
                # An ingress may cut each connection, but a gateway that closes each at once is of no use.
                if time.monotonic() - began > LONGEST_DELAY:
                    last_contact, delay = time.monotonic(), FIRST_DELAY
            if time.monotonic() - last_contact > RECONNECT_TIMEOUT:
                raise NoReply(
                    f"lost the connection to {self._dialer} and could not reconnect within "
                    f"{RECONNECT_TIMEOUT:g} s: {reason}"
                )
            if time.monotonic() - last_reply > timeout + RECONNECT_TIMEOUT:
                raise NoReply(
                    f"{self._dialer} did not reply within {timeout + RECONNECT_TIMEOUT:g} s, over several connections"
                )
            time.sleep(random.uniform(0, delay))
            delay = min(2 * delay, LONGEST_DELAY)

    @contextmanager
    def _connected(self) -> Iterator[ClientConnection]:
        route, nonce = _route(self._dialer), new_nonce()
        prover = Prover.of_request(nonce, route.token)
        assert prover is not None
        try:
            connection = connect(
                f"{route.url}/v1/jobs",
                ssl=route.ssl,
                proxy=True if route.through_proxy else None,
                additional_headers={**route.headers, NONCE_HEADER: nonce},
                compression=None,
                close_timeout=2,
                create_connection=_Connection,
            )
        except InvalidStatus as error:
            status, body = error.response.status_code, bytes(error.response.body or b"")
            proof = error.response.headers.get(PROOF_HEADER)
            if status == HTTPStatus.NOT_FOUND and prover.prover_of(proof, status, body) is not None:
                raise CreatesNoJobs(f"{self._dialer} serves one job and creates none. {self._creates_none}") from None
            raise self._rejection(status, body, proof, prover) from None
        except (OSError, WebSocketException) as error:
            certificates = route.certificates
            why = certificates and certificates.explain(route.url, error, through_proxy=route.through_proxy)
            raise ConnectionFailedError(f"cannot reach {self._dialer}: {why or error}") from error
        with connection:
            response = connection.response
            assert response is not None
            proof = response.headers.get(PROOF_HEADER)
            if prover.prover_of(proof, response.status_code, bytes(response.body or b"")) is None:
                raise self._rejection(response.status_code, b"", proof, prover)
            yield connection

    def _rejection(self, status: int, body: bytes, proof: str | None, prover: Prover) -> Exception:
        proven = prover.prover_of(proof, status, body) is not None
        error = error_of_response(status, body, str(self._dialer), proven=proven)
        described = describe_response(status, body, proven=proven)
        return error or ConnectionFailedError(f"cannot reach {self._dialer}: {described}")
