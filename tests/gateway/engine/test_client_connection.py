"""The engine's side of the websocket, against the library's own client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.client import ClientConnection as WebSocket
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode

from meshgate_gateway.engine import client_connection
from meshgate_gateway.engine.client_connection import ClientConnection, serve_connection
from meshgate_gateway.engine.detached.holders import Applicant, Refusal
from meshgate_wire.proof import Prover
from tests.gateway.engine.fakes import async_test, until


class Receiver:
    """Records what a connection reports."""

    def __init__(self) -> None:
        self.connection: ClientConnection | None = None
        self.data: list[bytes] = []
        self.writable = 0
        self.closed: list[str] = []
        self.applicants: list[Applicant] = []
        self.refusal: Refusal | None = None
        self.traffic = self
        self.bytes_received = self.bytes_sent = 0
        self.admitted: list[Applicant] = []
        self.refused = 0

    def received(self, size: int) -> None:
        self.bytes_received += size

    def sent(self, size: int) -> None:
        self.bytes_sent += size

    def claim(self, applicant: Applicant) -> Refusal | None:
        self.applicants.append(applicant)
        return self.refusal

    def admit(self, applicant: Applicant) -> Refusal | None:
        self.admitted.append(applicant)
        return self.refusal

    def connection_refused(self) -> None:
        self.refused += 1

    def connection_opened(self, connection: ClientConnection) -> None:
        self.connection = connection

    def connection_data(self, connection: ClientConnection, data: bytes | bytearray | memoryview) -> None:
        assert connection is self.connection
        self.data.append(bytes(data))

    def connection_writable(self, connection: ClientConnection) -> None:
        self.writable += 1

    def connection_closed(self, connection: ClientConnection, reason: str) -> None:
        self.closed.append(reason)


async def handshake(
    receiver: Receiver, **headers: str
) -> tuple[ClientConnection, asyncio.Future[WebSocket], socket.socket]:
    """A connection whose request the server has read, as it does before it hands the socket to the engine; the client's
    websocket, and its socket."""
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)
    sent = {f"Meshgate-{name}": value for name, value in headers.items()}
    opening = asyncio.ensure_future(
        connect("ws://gateway/", sock=near, compression=None, proxy=None, additional_headers=sent)
    )
    head = b""
    while b"\r\n\r\n" not in head:
        head += await asyncio.get_running_loop().sock_recv(far, 65_536)
    return await serve_connection(receiver, receiver, far, head, gateway="abc", proof_key="k"), opening, near


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Receiver, ClientConnection, WebSocket]]:
    receiver = Receiver()
    connection, opening, _ = await handshake(receiver)
    websocket = await opening
    assert receiver.connection is connection
    try:
        yield receiver, connection, websocket
    finally:
        await websocket.close()
        await until(lambda: receiver.closed)


@async_test
async def test_binary_messages_go_both_ways_in_order() -> None:
    async with connected() as (receiver, connection, websocket):
        for size in (1, 100_000):
            await websocket.send(bytes(size))
            connection.write([b"head", bytearray(size)])
        await until(lambda: len(receiver.data) == 2)
        assert [len(data) for data in receiver.data] == [1, 100_000]
        assert [len(await websocket.recv()) for _ in range(2)] == [5, 100_004]


@async_test
async def test_an_accepted_connection_is_proven() -> None:
    async with connected() as (_, _, websocket):
        assert websocket.response is not None
        assert Prover("k").prover_of(websocket.response.headers["Meshgate-Proof"], 101) == "abc"


@async_test
async def test_pings_are_answered() -> None:
    async with connected() as (_, _, websocket):
        await asyncio.wait_for(await websocket.ping(), 10)


@pytest.mark.parametrize("message", ["text", [b"in", b"fragments"]], ids=["text", "fragments"])
@async_test
async def test_text_and_fragmented_messages_close_the_connection(message: str | list[bytes]) -> None:
    async with connected() as (receiver, _, websocket):
        await websocket.send(message)
        with pytest.raises(ConnectionClosed) as caught:
            await websocket.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == CloseCode.UNSUPPORTED_DATA
        assert caught.value.rcvd.reason == "text and fragmented messages are not supported"
        assert receiver.data == []


@async_test
async def test_the_peer_gets_the_reason_of_a_close_and_nothing_after_it() -> None:
    async with connected() as (receiver, connection, websocket):
        connection.close(CloseCode.GOING_AWAY, "another connection has taken over this session")
        connection.write([b"late"])
        with pytest.raises(ConnectionClosed, match="another connection has taken over this session"):
            await websocket.recv()
        await until(lambda: receiver.closed)
        assert receiver.closed == ["another connection has taken over this session"]


@async_test
async def test_a_connection_without_data_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_connection, "IDLE_TIMEOUT", 0.05)
    async with connected() as (receiver, connection, _):
        await until(lambda: receiver.closed)
        assert connection.silence >= 0.05
        assert receiver.closed == ["no data received for 0 s"]


@async_test
async def test_the_receiver_can_write_again_once_a_slow_peer_has_read() -> None:
    async with connected() as (receiver, connection, websocket):
        for _ in range(40):
            connection.write([bytes(1_000_000)])
        assert connection.buffered() > 256 * 1024
        assert receiver.writable == 0
        for _ in range(40):
            await websocket.recv()
        await until(lambda: receiver.writable)
        assert connection.buffered() == 0


@async_test
async def test_a_client_that_may_not_connect_gets_the_reason_instead_of_a_websocket() -> None:
    receiver = Receiver()
    receiver.refusal = Refusal("taken_over", "another process has it")
    _, opening, _ = await handshake(receiver, Holder="me")
    with pytest.raises(InvalidStatus) as refused:
        await opening
    assert refused.value.response.status_code == 410
    body = json.loads(refused.value.response.body or b"")
    proof = refused.value.response.headers["Meshgate-Proof"]
    assert Prover("k").prover_of(proof, 410, bytes(refused.value.response.body or b"")) == "abc"
    assert (body["kind"], body["reason"]) == ("taken_over", "another process has it")
    assert receiver.applicants == [Applicant("me", "", takes_over=False)]
    assert (receiver.connection, receiver.admitted, receiver.refused) == (None, [], 1)


@async_test
async def test_a_client_takes_over_with_its_first_message() -> None:
    receiver = Receiver()
    connection, opening, _ = await handshake(receiver, Holder="me", Attach="1")
    websocket = await opening
    assert receiver.admitted == []
    await websocket.send(b"hello")
    await until(lambda: receiver.data)
    assert receiver.admitted == [Applicant("me", "", takes_over=True)]
    assert receiver.connection is connection
    await websocket.close()
    await until(lambda: receiver.closed)
    assert receiver.refused == 0


@async_test
async def test_a_client_that_dies_while_it_takes_over_has_not() -> None:
    receiver = Receiver()
    _, opening, near = await handshake(receiver, Holder="me", Attach="1")
    (await opening).transport.abort()
    near.close()
    await until(lambda: receiver.refused)
    assert (receiver.admitted, receiver.connection, receiver.closed) == ([], None, [])


@async_test
async def test_of_two_clients_that_take_over_at_once_the_one_that_lost_gets_the_reason() -> None:
    receiver = Receiver()
    _, opening, _ = await handshake(receiver, Holder="me", Attach="1")
    websocket = await opening
    receiver.refusal = Refusal("taken_over", "another process was faster")
    await websocket.send(b"hello")
    with pytest.raises(ConnectionClosed, match="another process was faster"):
        await websocket.recv()
    assert (receiver.connection, receiver.data, receiver.refused) == (None, [], 1)
