"""The websockets of callers that want jobs: who is let in, and what ends a conversation."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from urllib.parse import urlsplit

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from meshgate_gateway.http.auth import Denied, Origin, bearer_token
from meshgate_gateway.http.messages import Request
from meshgate_gateway.http.server import Server, listen
from meshgate_gateway.http.text_websocket import TextWebSocket
from meshgate_gateway.provisioning.conversations import Conversations
from meshgate_wire.proof import ANY_GATEWAY, NONCE_HEADER, PROOF_HEADER, Prover, new_nonce
from tests.gateway.captured_logs import capture_logs


async def authenticate(request: Request) -> str | Denied:
    token = bearer_token(request)
    return token if token is not None else Denied("no token was presented")


async def echo(connection: TextWebSocket, caller: str, origin: Origin) -> None:
    while (text := await connection.receive()) is not None:
        await connection.send(f"{caller} at {origin.address}: {text}")


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[str, Conversations[str]]]:
    """The address of conversations that echo, without its scheme."""
    conversations = Conversations(authenticate, echo)
    listener = listen("127.0.0.1", 0)
    server = Server([listener], lambda request, conn: conversations.open(urlsplit(request.path).path, request, conn))
    task = asyncio.create_task(server.serve())
    try:
        yield f"//127.0.0.1:{listener.getsockname()[1]}", conversations
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await conversations.close()
        await server.close()


def dial(address: str, **headers: str) -> connect:
    return connect(f"ws:{address}/v1/jobs", additional_headers=headers, proxy=None)


def get(address: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address.removeprefix("//"), timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Authorization": "Bearer alice"})
        response = connection.getresponse()
        return response.status, response.read().decode()


async def test_an_authenticated_caller_converses() -> None:
    async with serving() as (address, _), dial(address, Authorization="Bearer alice") as connection:
        await connection.send("hello")
        assert await connection.recv() == "alice at 127.0.0.1: hello"


async def test_a_caller_sees_that_a_gateway_has_opened_the_websocket() -> None:
    async with serving() as (address, _):
        nonce = new_nonce()
        async with dial(address, Authorization="Bearer alice", **{NONCE_HEADER: nonce}) as connection:
            prover = Prover.of_request(nonce, "alice")
            assert prover is not None
            assert connection.response is not None
            assert prover.prover_of(connection.response.headers.get(PROOF_HEADER), 101) == ANY_GATEWAY


async def test_a_denied_caller_gets_the_reason_and_is_recorded() -> None:
    with capture_logs() as events:
        async with serving() as (address, _):
            with pytest.raises(InvalidStatus) as caught:
                await dial(address)
        assert caught.value.response.status_code == HTTPStatus.UNAUTHORIZED
        assert b"no token was presented" in (caught.value.response.body or b"")
    (recorded,) = (event for event in events if event["event"] == "audit")
    assert (recorded["outcome"], recorded["reason"]) == ("refused", "no token was presented")


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("/v1/jobs", HTTPStatus.BAD_REQUEST, "/v1/jobs needs a websocket handshake"),
        ("/v1/job", HTTPStatus.NOT_FOUND, "not /v1/job"),
    ],
)
async def test_other_requests_are_rejected_with_the_reason(path: str, status: HTTPStatus, reason: str) -> None:
    async with serving() as (address, _):
        answered, body = await asyncio.to_thread(get, address, path)
        assert (answered, reason in body) == (status, True)


async def test_closing_ends_open_conversations() -> None:
    async with serving() as (address, conversations), dial(address, Authorization="Bearer alice") as connection:
        await connection.send("hello")
        await connection.recv()
        await conversations.close()
        with pytest.raises(ConnectionClosed):
            await connection.recv()
