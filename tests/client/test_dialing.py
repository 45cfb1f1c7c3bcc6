from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from meshgate.dialing import UrlDialer, refusal
from meshgate.errors import (
    AuthenticationError,
    ConnectionFailedError,
    EngineDiedError,
    GatewayError,
    GatewayLostError,
    SessionExpiredError,
    VersionMismatchError,
)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("ws://127.0.0.1:80", "ws://127.0.0.1:80"),
        ("http://gateway", "ws://gateway"),
        ("https://gateway.example/job/1/", "wss://gateway.example/job/1"),
        ("wss://gateway?x=1#y", "wss://gateway"),
    ],
)
def test_urls_of_either_kind_are_taken(given: str, used: str) -> None:
    assert asyncio.run(UrlDialer(given, "t").dial()).url == used


@pytest.mark.parametrize("given", ["gateway:80", "ftp://gateway", "", "ws://"])
def test_what_is_no_url_of_a_gateway_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="is not the URL of a gateway"):
        UrlDialer(given, "t")


@pytest.mark.parametrize(
    ("url", "through"),
    [("ws://127.0.0.1:1", False), ("ws://localhost:1", False), ("ws://[::1]:1", False), ("ws://g", True)],
)
def test_a_gateway_on_this_machine_is_not_reached_through_a_proxy(url: str, through: bool) -> None:
    assert asyncio.run(UrlDialer(url, "t").dial()).through_proxy is through


def test_the_token_is_in_the_headers_and_nowhere_else() -> None:
    dialer = UrlDialer("wss://gateway", "secret")
    route = asyncio.run(dialer.dial())
    assert route.headers == {"Authorization": "Bearer secret"}
    assert route.ssl is not None
    assert "secret" not in f"{dialer}{dialer!r}{route.url}"


def test_only_a_dialer_that_can_know_says_that_the_gateway_is_gone() -> None:
    assert asyncio.run(UrlDialer("ws://g", "t").gone()) is None
    assert asyncio.run(UrlDialer("ws://g", "t", alive=lambda: True).gone()) is None
    assert asyncio.run(UrlDialer("ws://g", "t", alive=lambda: False).gone()) == "its process has ended"


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (401, {"error": "no token"}, AuthenticationError),
        (403, {"error": "not yours"}, AuthenticationError),
        (426, {"error": "protocol 2"}, VersionMismatchError),
        (410, {"error": "over", "reason": "the lease was over", "kind": "expired"}, SessionExpiredError),
        (410, {"error": "over", "kind": "died", "reason": "killed", "output": "x"}, EngineDiedError),
        (410, {"error": "over", "kind": "ended", "reason": "the job was killed"}, GatewayError),
        (410, {"error": "over", "kind": "unknown", "reason": "not known here"}, GatewayLostError),
        (404, {"error": "no such path"}, ConnectionFailedError),
    ],
)
def test_a_final_answer_is_an_error(status: int, body: dict[str, Any], expected: type[Exception]) -> None:
    assert type(refusal(status, json.dumps(body).encode(), "the gateway")) is expected


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_an_answer_that_may_change_is_none(status: int) -> None:
    assert refusal(status, b"<html>nginx</html>", "the gateway") is None
    assert refusal(status, b'{"error": "busy"}', "the gateway") is None


NOT_OURS = [b"", b"[]", b"\xff", b"null", b"{}", b'{"message": "Forbidden"}', b"default backend - 404"]


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 410, 426])
@pytest.mark.parametrize("body", NOT_OURS)
def test_an_answer_that_is_not_a_gateways_own_is_told_as_such_and_never_ends_a_session(
    status: int, body: bytes
) -> None:
    told = refusal(status, body, "the gateway at ws://g")
    assert type(told) is ConnectionFailedError
    assert f"the gateway at ws://g: what answered there, with HTTP {status}, is not a meshgate gateway" in str(told)
    assert refusal(status, body, "the gateway at ws://g", resuming=True) is None


def test_the_unix_socket_is_the_way_while_it_is_there(tmp_path: Path) -> None:
    path = str(tmp_path / "gateway")
    dialer = UrlDialer("ws://127.0.0.1:1", "t", unix_socket=path)
    assert asyncio.run(dialer.dial()).unix_socket is None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        assert asyncio.run(dialer.dial()).unix_socket == path
