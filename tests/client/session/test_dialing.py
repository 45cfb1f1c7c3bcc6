from __future__ import annotations

import asyncio
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshgate.errors import (
    AuthenticationError,
    ConnectionFailedError,
    EngineDiedError,
    GatewayError,
    GatewayLostError,
    SessionExpiredError,
    VersionMismatchError,
)
from meshgate.session.dialing import UrlDialer, call_in_thread, describe_response, error_of_response


@pytest.mark.parametrize(
    ("url", "used"),
    [
        ("ws://127.0.0.1:80", "ws://127.0.0.1:80"),
        ("http://localhost", "ws://localhost"),
        ("https://gateway.example/job/1/", "wss://gateway.example/job/1"),
        ("wss://gateway?x=1#y", "wss://gateway"),
    ],
)
def test_http_and_websocket_urls_are_accepted(url: str, used: str) -> None:
    assert asyncio.run(UrlDialer(url, "t").dial()).url == used


@pytest.mark.parametrize("url", ["gateway:80", "ftp://gateway", "", "ws://"])
def test_other_urls_are_rejected(url: str) -> None:
    with pytest.raises(ValueError, match="is not the URL of a gateway"):
        UrlDialer(url, "t")


@pytest.mark.parametrize(
    ("url", "through_proxy"),
    [("ws://127.0.0.1:1", False), ("ws://localhost:1", False), ("ws://[::1]:1", False), ("wss://g", True)],
)
def test_a_gateway_on_this_machine_is_reached_without_a_proxy(url: str, through_proxy: bool) -> None:
    assert asyncio.run(UrlDialer(url, "t").dial()).through_proxy is through_proxy


@pytest.mark.parametrize("url", ["wss://user:secret@gateway", "ws://secret@127.0.0.1:80"])
def test_credentials_in_a_url_are_rejected_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match=r"contains a user name or a password.*set MESHGATE_TOKEN") as caught:
        UrlDialer(url, "t")
    assert "secret" not in str(caught.value)


def test_a_token_sent_unencrypted_over_the_network_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"ws://gateway: the token and all data are sent unencrypted.*wss://"):
        UrlDialer("http://gateway", "t")
    UrlDialer("ws://gateway", "")  # without a token there is nothing to steal


def test_the_token_appears_only_in_the_headers() -> None:
    dialer = UrlDialer("wss://gateway", "secret")
    route = asyncio.run(dialer.dial())
    assert route.headers == {"Authorization": "Bearer secret"}
    assert route.ssl is not None
    assert "secret" not in f"{dialer}{dialer!r}{route.url}"


@pytest.mark.parametrize("character", ["\n", "\x7f", "\u201d"])
def test_a_token_that_cannot_be_sent_is_not_repeated(character: str) -> None:
    problem = rf"it contains the character {re.escape(repr(character))}: set it again"
    with pytest.raises(ValueError, match=problem) as raised:
        UrlDialer("wss://gateway", f"secret{character}")
    assert "secret" not in str(raised.value)
    with pytest.raises(ConnectionFailedError, match=problem) as failed:
        asyncio.run(UrlDialer("wss://gateway", lambda: f"secret{character}").dial())
    assert "secret" not in str(failed.value)


def test_only_a_dialer_that_knows_the_process_reports_the_gateway_as_gone() -> None:
    assert asyncio.run(UrlDialer("wss://g", "t").gone()) is None
    assert asyncio.run(UrlDialer("wss://g", "t", alive=lambda: True).gone()) is None
    assert asyncio.run(UrlDialer("wss://g", "t", alive=lambda: False).gone()) == "its process has exited"


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
def test_a_final_response_is_an_error(status: int, body: dict[str, Any], expected: type[Exception]) -> None:
    error = error_of_response(status, json.dumps(body).encode(), "the gateway", proven=True, resuming=True)
    assert type(error) is expected


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("ws://g", "Set MESHGATE_TOKEN to the job's token"),
        ("wss://g/v1/jobs/team-a/trainer", "Ask the operator of that gateway for access"),  # it accepts no job's token
    ],
)
def test_the_error_of_a_refused_identity_says_what_gives_access(url: str, remedy: str) -> None:
    error = error_of_response(403, b'{"error": "alice may not"}', f"the gateway at {url}", proven=True)
    assert str(error) == f"the gateway at {url} rejected this client: alice may not. {remedy}"


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_temporary_response_is_not_an_error(status: int) -> None:
    assert error_of_response(status, b"<html>nginx</html>", "the gateway", proven=False) is None
    assert error_of_response(status, b'{"error": "busy"}', "the gateway", proven=True) is None


OTHER_SERVERS = [b"", b"[]", b"\xff", b"null", b"{}", b'{"message": "Forbidden"}', b"default backend - 404"]
OTHER_SERVERS += [b'{"error": "no healthy upstream"}', b'{"error": "over", "kind": "expired", "reason": "over"}']
OTHER_SERVERS += [b"[" * 100_000]


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 410, 426])
@pytest.mark.parametrize("body", OTHER_SERVERS, ids=range(len(OTHER_SERVERS)))
def test_a_response_of_another_server_is_described_and_never_ends_a_session(status: int, body: bytes) -> None:
    error = error_of_response(status, body, "the gateway at ws://g", proven=False)
    assert type(error) is ConnectionFailedError
    assert f"the gateway at ws://g: the server there responded with HTTP {status}" in str(error)
    assert "is not a meshgate gateway, is older than this client" in str(error)
    assert describe_response(status, body, proven=False).startswith(f"HTTP {status} from another server")
    assert error_of_response(status, body, "the gateway at ws://g", proven=False, resuming=True) is None


def test_the_page_of_an_ingress_that_requires_a_certificate_says_what_to_set() -> None:
    body = b"<html>\r\n<head><title>400 No required SSL certificate was sent</title></head>"  # nginx
    error = error_of_response(400, body, "the gateway", proven=False)
    assert "HTTP 400 (No required SSL certificate was sent): set MESHGATE_CLIENT_CERT and MESHGATE_CLIENT" in str(error)
    assert error_of_response(400, body, "the gateway", proven=False, resuming=True) is None
    described = describe_response(400, body, proven=False)
    assert described == "HTTP 400 from another server in its place: No required SSL certificate was sent"


def test_a_gateway_of_before_proofs_still_says_which_side_to_upgrade() -> None:
    body = b'{"error": "upgrade the gateway", "protocol": 2}'
    error = error_of_response(426, body, "the gateway", proven=False)
    assert type(error) is VersionMismatchError
    assert error_of_response(426, body, "the gateway", proven=False, resuming=True) is None


def test_the_unix_socket_is_used_while_it_exists(tmp_path: Path) -> None:
    path = str(tmp_path / "gateway")
    dialer = UrlDialer("ws://127.0.0.1:1", "t", unix_socket=path)
    assert asyncio.run(dialer.dial()).unix_socket is None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        assert asyncio.run(dialer.dial()).unix_socket == path


def test_a_dialer_that_needs_a_thread_while_the_program_ends_fails_as_any_other_attempt() -> None:
    async def dial() -> str:
        executor = ThreadPoolExecutor()
        asyncio.get_running_loop().set_default_executor(executor)
        assert await call_in_thread(str.upper, "a") == "A"
        executor.shutdown()  # as the interpreter does before it calls atexit handlers
        return await call_in_thread(str.upper, "a")

    with pytest.raises(ConnectionFailedError, match="this program is ending"):
        asyncio.run(dial())
