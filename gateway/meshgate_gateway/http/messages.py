"""HTTP/1.1 messages: parses requests, within limits, and encodes responses. No I/O.

Only a POST may have a body, whose length its head must give. Of other requests only the head is ever read: one with a
body is rejected, and the bytes after a websocket handshake are for the engine. ``websockets`` checks the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import urlsplit

from websockets import http11
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake, InvalidHeader, InvalidUpgrade
from websockets.server import ServerProtocol
from websockets.streams import StreamReader

from meshgate_wire.proof import ANY_GATEWAY, PROOF_HEADER, Prover

MAX_HEAD = 16 * 1024
MAX_BODY = 48 * 1024
MAX_HEADERS = 100
END_OF_HEAD = b"\r\n\r\n"
METHOD = re.compile(rb"[A-Z]{1,20}")
CONTENT_LENGTH = re.compile(rb"\r\nContent-Length:[ \t]*(\d{1,12})[ \t]*(?=\r\n)", re.IGNORECASE)
CALLER_HEADER = "Meshgate-Caller"
"""For whom a provisioning gateway forwards a request, percent-encoded. Counts only beside the job's token."""
PROOF_KEY_HEADER = "Meshgate-Proof-Key"
"""What proves the response to that caller, who has not presented the job's token and does not know it."""
IDENTITY_HEADER = "Meshgate-Identity"
"""Which identity the gateway of a job has confirmed, percent-encoded. Counts only beside the key of the engines."""
CREDENTIALS = tuple(
    f"{name}:".lower().encode()
    for name in ("Authorization", "Proxy-Authorization", "Cookie", CALLER_HEADER, PROOF_KEY_HEADER, IDENTITY_HEADER)
)


class MalformedRequest(Exception):
    """A client error with its response ``status``. The message is for the client and repeats none of its input."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """A request. ``head`` is its head as received, without the credentials."""

    method: str
    path: str
    head: bytes = field(repr=False)
    headers: Headers = field(repr=False)
    body: bytes = field(default=b"", repr=False)

    def header(self, name: str) -> str | None:
        """The value of a header; None if absent. Raises MalformedRequest if the header is repeated."""
        values = self.headers.get_all(name)
        if len(values) > 1:
            raise MalformedRequest(HTTPStatus.BAD_REQUEST, f"the header {name} occurs {len(values)} times")
        return values[0] if values else None

    @property
    def is_websocket(self) -> bool:
        """Whether it is a complete websocket handshake."""
        return self.websocket_problem is None

    @property
    def websocket_problem(self) -> str | None:
        """Which header makes the websocket handshake invalid; None if it is valid."""
        try:
            ServerProtocol().process_request(http11.Request(self.path, self.headers))
        except (InvalidHeader, InvalidUpgrade) as error:
            return f"the header {error.name} is missing or invalid"
        except InvalidHandshake:
            return "the handshake is invalid"
        except UnicodeError:  # websockets before 17 does not check the key before it encodes it
            return "the header Sec-WebSocket-Key is missing or invalid"
        return None


class HeadParser:
    """Collects bytes until they form a request: its head and, of a POST, its body."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._end = -1  # of the head; what follows is the body

    def feed(self, data: bytes) -> Request | None:
        """The request once it is complete, until then None. Raises MalformedRequest."""
        searched = max(0, len(self._data) - len(END_OF_HEAD))
        self._data += data
        if self._end < 0:
            self._end = self._data.find(END_OF_HEAD, searched)
        end = self._end
        if end > MAX_HEAD or (end < 0 and len(self._data) > MAX_HEAD):
            raise MalformedRequest(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head of the request exceeds {MAX_HEAD} bytes"
            )
        if end < 0:
            return None
        head = bytes(self._data[: end + len(END_OF_HEAD)])
        length = 0
        if head.startswith(b"POST ") and (given := CONTENT_LENGTH.search(head)) is not None:
            length = int(given[1])
            if length > MAX_BODY:
                raise MalformedRequest(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body of the request exceeds {MAX_BODY} bytes"
                )
        if len(self._data) > len(head) + length:
            raise MalformedRequest(
                HTTPStatus.BAD_REQUEST, f"data follows the {'body' if length else 'head'} of the request"
            )
        if len(self._data) < len(head) + length:
            return None
        return _parse(head, bytes(self._data[len(head) :]))


def _parse(head: bytes, body: bytes) -> Request:
    if head.count(b"\n") - 2 > MAX_HEADERS:
        raise MalformedRequest(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the request has more than {MAX_HEADERS} headers"
        )
    method, _, rest = head.partition(b" ")
    if not METHOD.fullmatch(method):
        raise MalformedRequest(HTTPStatus.BAD_REQUEST, "the request has no method")
    reader = StreamReader()
    if method == b"POST":
        rest = CONTENT_LENGTH.sub(b"", rest, count=1)  # websockets knows no bodies; a second one is an error
    reader.feed_data(b"GET " + rest)  # some versions of websockets accept no other method
    parsing = http11.Request.parse(reader.read_line)
    try:
        next(parsing)
    except StopIteration as done:
        parsed: http11.Request = done.value
    except Exception as error:  # of many types, and some messages repeat the input
        raise MalformedRequest(HTTPStatus.BAD_REQUEST, "the request is not HTTP/1.1, or has a body") from error
    else:
        raise MalformedRequest(HTTPStatus.BAD_REQUEST, "the lines of the request do not end in CRLF")
    if not parsed.path.isascii():
        raise MalformedRequest(HTTPStatus.BAD_REQUEST, "the path of the request is not ASCII")
    try:
        urlsplit(parsed.path)  # as the routes do, and it refuses paths such as //[
    except ValueError as error:
        raise MalformedRequest(HTTPStatus.BAD_REQUEST, "the path of the request is not valid") from error
    lines = (line for line in head.split(b"\r\n") if not line.lower().startswith(CREDENTIALS))
    return Request(method.decode(), parsed.path, b"\r\n".join(lines), parsed.headers, body)


@dataclass(frozen=True, slots=True)
class Response:
    """A response with a JSON object as its body, or with ``text`` instead, whose Content-Type is among ``headers``. The
    connection is closed after it. ``for_job``: a provisioning gateway answers in place of a job's gateway."""

    status: HTTPStatus
    body: Mapping[str, object]
    headers: Mapping[str, str] = field(default_factory=dict)
    text: str | None = None
    for_job: bool = False

    @classmethod
    def error(
        cls, status: HTTPStatus, error: str, *, headers: Mapping[str, str] | None = None, **more: object
    ) -> Response:
        """An error response: ``{"error": message, ...}``."""
        return cls(status, {"error": error, **more}, headers or {})

    def encode(self, *, with_body: bool = True, prover: Prover | None = None, gateway: str = "") -> bytes:
        """The bytes to send, with the proof that they are those of ``gateway`` if there is a ``prover``. Without the
        body (for HEAD), Content-Length still states its length."""
        body = json.dumps(self.body).encode() + b"\n" if self.text is None else self.text.encode()
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Connection": "close",
            **self.headers,
        }
        if prover is not None:
            sent = body if with_body else b""
            headers[PROOF_HEADER] = prover.prove(ANY_GATEWAY if self.for_job else gateway, self.status, sent)
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}", *(f"{k}: {v}" for k, v in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body if with_body else b"")
