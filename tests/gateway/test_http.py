from __future__ import annotations

import contextlib
import http.client
import io
import itertools
import json
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_gateway.http import HeadParser, MalformedRequest, Request, Response

HEAD = (
    b"GET /v1/sessions/0?x=1 HTTP/1.1\r\nHost: gateway\r\nUPGRADE: h2c, WebSocket\r\n"
    b"authorization: Bearer secret\r\nCookie: a=b\r\nX-Name: M\xfcller\r\n\r\n"
)


def parse(data: bytes) -> Request:
    request = HeadParser().feed(data)
    assert request is not None
    return request


def test_a_head_is_a_request() -> None:
    request = parse(HEAD)
    assert (request.method, request.path) == ("GET", "/v1/sessions/0?x=1")
    assert request.header("host") == "gateway"
    assert request.header("Authorization") == "Bearer secret"
    assert request.header("absent") is None


@given(st.lists(st.integers(0, len(HEAD)), max_size=6))
def test_a_head_may_come_in_any_pieces(cuts: list[int]) -> None:
    parser, bounds = HeadParser(), [0, *sorted(cuts), len(HEAD)]
    parsed = [parser.feed(HEAD[a:b]) for a, b in itertools.pairwise(bounds) if a < b]
    assert parsed[:-1] == [None] * (len(parsed) - 1)
    assert parsed[-1] == parse(HEAD)


@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda data: b"GET / HTTP/1.1\r\n" + data + b"\r\n\r\n"))
def test_any_bytes_are_a_request_a_refusal_or_not_enough(data: bytes) -> None:
    with contextlib.suppress(MalformedRequest):
        request = HeadParser().feed(data)
        assert request is None or b"\r\n\r\n" in data


def test_what_is_passed_on_holds_no_credentials() -> None:
    head = parse(HEAD).head
    assert b"secret" not in head
    assert b"a=b" not in head
    assert head.startswith(b"GET /v1/sessions/0?x=1 HTTP/1.1\r\nHost: gateway\r\n")
    assert head.endswith(b"X-Name: M\xfcller\r\n\r\n")


def test_neither_head_nor_headers_show_when_a_request_is_printed() -> None:
    assert "secret" not in repr(parse(HEAD))


HANDSHAKE = {
    "Connection": "keep-alive, Upgrade",
    "Upgrade": "WebSocket",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version": "13",
}


def handshake(**other: str | None) -> Request:
    headers = {**HANDSHAKE, **{name.replace("_", "-"): value for name, value in other.items()}}
    lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
    return parse("\r\n".join(["GET / HTTP/1.1", *lines, "", ""]).encode())


def test_a_whole_handshake_of_a_websocket_is_one() -> None:
    assert handshake().is_websocket


@pytest.mark.parametrize("name", HANDSHAKE)
@pytest.mark.parametrize("value", [None, "h2c", "12", "\u00e9", "x, websocket, "])
def test_a_handshake_with_one_header_amiss_is_none_and_the_header_is_told(name: str, value: str | None) -> None:
    request = handshake(**{name: value})
    assert not request.is_websocket
    assert request.websocket_problem == f"the header {name} is absent or wrong"


def test_what_asks_for_no_websocket_is_none() -> None:
    assert not parse(b"GET / HTTP/1.1\r\n\r\n").is_websocket


def test_a_header_that_must_be_single_is_refused_when_it_is_not() -> None:
    request = parse(b"GET / HTTP/1.1\r\nA: b\r\na: c\r\n\r\n")
    with pytest.raises(MalformedRequest, match="2 times"):
        request.header("A")


def test_a_hundred_headers_of_16_kib_are_the_limit() -> None:
    line = b"A: " + b"b" * 150 + b"\r\n"
    assert parse(b"GET / HTTP/1.1\r\n" + line * 100 + b"\r\n")
    with pytest.raises(MalformedRequest, match="more than 100 headers"):
        parse(b"GET / HTTP/1.1\r\n" + line * 101 + b"\r\n")
    with pytest.raises(MalformedRequest, match="16384 bytes"):
        parse(b"GET / HTTP/1.1\r\n" + (b"A: " + b"b" * 400 + b"\r\n") * 50 + b"\r\n")


def test_a_head_without_end_is_refused_at_the_limit() -> None:
    parser = HeadParser()
    for _ in range(4):
        parser.feed(b"x" * 4096)
    with pytest.raises(MalformedRequest) as refused:
        parser.feed(b"x")
    assert refused.value.status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


def test_a_refusal_does_not_repeat_the_input() -> None:
    with pytest.raises(MalformedRequest) as refused:
        parse(b"GET / HTTP/1.1\r\nAuthorization Bearer secret\r\n\r\n")
    assert "secret" not in str(refused.value)


class _Socket:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def test_an_answer_is_what_an_http_client_reads() -> None:
    sent = Response.error(HTTPStatus.GONE, "it is over", headers={"Retry-After": "1"}, output="é\n")
    with http.client.HTTPResponse(_Socket(sent.encode())) as response:  # type: ignore[arg-type]
        response.begin()
        assert (response.status, response.reason) == (410, "Gone")
        assert response.getheader("Retry-After") == "1"
        assert response.getheader("Connection") == "close"
        assert json.loads(response.read()) == {"error": "it is over", "output": "é\n"}


def test_an_answer_to_head_ends_with_its_headers() -> None:
    assert Response(HTTPStatus.OK, {"a": 1}).encode(with_body=False).endswith(b"\r\n\r\n")
