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

from meshgate_gateway.http.messages import HeadParser, MalformedRequest, Request, Response

HEAD = (
    b"GET /v1/sessions/0?x=1 HTTP/1.1\r\nHost: gateway\r\nUPGRADE: h2c, WebSocket\r\n"
    b"authorization: Bearer secret\r\nCookie: a=b\r\nX-Name: M\xfcller\r\n\r\n"
)


def parse(data: bytes) -> Request:
    request = HeadParser().feed(data)
    assert request is not None
    return request


def test_a_head_is_parsed_into_a_request() -> None:
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
def test_any_bytes_are_a_request_malformed_or_incomplete(data: bytes) -> None:
    with contextlib.suppress(MalformedRequest):
        request = HeadParser().feed(data)
        assert request is None or b"\r\n\r\n" in data


BODY = b"POST /v1/runs HTTP/1.1\r\nHost: gateway\r\ncontent-length:  5 \r\nAccept: */*\r\n\r\n12345"


@given(st.lists(st.integers(0, len(BODY)), max_size=3))
def test_a_body_may_come_in_any_pieces(cuts: list[int]) -> None:
    parser, bounds = HeadParser(), [0, *sorted(cuts), len(BODY)]
    results = [parser.feed(BODY[start:end]) for start, end in itertools.pairwise(bounds)]
    found = [result for result in results if result is not None]
    assert {result.body for result in found} == {b"12345"}
    assert (found[0].method, found[0].header("Accept")) == ("POST", "*/*")
    assert b"content-length" in found[0].head


def test_a_post_may_have_no_body() -> None:
    assert parse(b"POST /v1/runs/a/stop HTTP/1.1\r\nHost: gateway\r\n\r\n").body == b""


def test_the_head_excludes_credentials() -> None:
    head = parse(HEAD).head
    assert b"secret" not in head
    assert b"a=b" not in head
    assert head.startswith(b"GET /v1/sessions/0?x=1 HTTP/1.1\r\nHost: gateway\r\n")
    assert head.endswith(b"X-Name: M\xfcller\r\n\r\n")


def test_the_repr_of_a_request_excludes_head_and_headers() -> None:
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


def test_a_complete_websocket_handshake_is_recognized() -> None:
    assert handshake().is_websocket


@pytest.mark.parametrize("name", HANDSHAKE)
@pytest.mark.parametrize("value", [None, "h2c", "12", "\u00e9", "x, websocket, "])
def test_a_handshake_with_an_invalid_header_is_rejected_with_its_name(name: str, value: str | None) -> None:
    request = handshake(**{name: value})
    assert not request.is_websocket
    assert request.websocket_problem == f"the header {name} is missing or invalid"


def test_a_request_without_upgrade_is_not_a_websocket_handshake() -> None:
    assert not parse(b"GET / HTTP/1.1\r\n\r\n").is_websocket


def test_a_repeated_header_is_malformed() -> None:
    request = parse(b"GET / HTTP/1.1\r\nA: b\r\na: c\r\n\r\n")
    with pytest.raises(MalformedRequest, match="2 times"):
        request.header("A")


def test_the_limits_are_100_headers_and_16_kib() -> None:
    line = b"A: " + b"b" * 150 + b"\r\n"
    assert parse(b"GET / HTTP/1.1\r\n" + line * 100 + b"\r\n")
    with pytest.raises(MalformedRequest, match="more than 100 headers"):
        parse(b"GET / HTTP/1.1\r\n" + line * 101 + b"\r\n")
    with pytest.raises(MalformedRequest, match="16384 bytes"):
        parse(b"GET / HTTP/1.1\r\n" + (b"A: " + b"b" * 400 + b"\r\n") * 50 + b"\r\n")


def test_an_unfinished_head_is_rejected_at_the_limit() -> None:
    parser = HeadParser()
    for _ in range(4):
        parser.feed(b"x" * 4096)
    with pytest.raises(MalformedRequest) as error:
        parser.feed(b"x")
    assert error.value.status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


@pytest.mark.parametrize("path", [b"//[", b"//[x]/v1/job", b"http://[/healthz"])
def test_a_path_that_no_url_may_have_is_malformed(path: bytes) -> None:
    with pytest.raises(MalformedRequest, match="the path of the request is not valid") as error:
        parse(b"GET " + path + b" HTTP/1.1\r\n\r\n")
    assert error.value.status == HTTPStatus.BAD_REQUEST


def test_an_error_does_not_repeat_the_input() -> None:
    with pytest.raises(MalformedRequest) as error:
        parse(b"GET / HTTP/1.1\r\nAuthorization Bearer secret\r\n\r\n")
    assert "secret" not in str(error.value)


class _Socket:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def test_an_http_client_can_read_a_response() -> None:
    sent = Response.error(HTTPStatus.GONE, "it is over", headers={"Retry-After": "1"}, output="é\n")
    with http.client.HTTPResponse(_Socket(sent.encode())) as response:  # type: ignore[arg-type]
        response.begin()
        assert (response.status, response.reason) == (410, "Gone")
        assert response.getheader("Retry-After") == "1"
        assert response.getheader("Connection") == "close"
        assert json.loads(response.read()) == {"error": "it is over", "output": "é\n"}


def test_a_response_to_head_ends_after_the_headers() -> None:
    assert Response(HTTPStatus.OK, {"a": 1}).encode(with_body=False).endswith(b"\r\n\r\n")
