"""The engine's side of the websocket, against the library's own client; and connections that come and go, between a
client and a whole engine."""

from __future__ import annotations

import asyncio
import json
import re
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
from meshgate_wire import ProtocolError
from meshgate_wire.proof import Prover
from tests.gateway.engine.fakes import until
from tests.gateway.engine.in_memory import EngineClient


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
        self.timer: asyncio.TimerHandle | None = None
        self.admitted: list[Applicant] = []
        self.refused = 0

    def changed(self) -> None: ...

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


async def test_binary_messages_go_both_ways_in_order() -> None:
    async with connected() as (receiver, connection, websocket):
        for size in (1, 100_000):
            await websocket.send(bytes(size))
            connection.write([b"head", bytearray(size)])
        await until(lambda: len(receiver.data) == 2)
        assert [len(data) for data in receiver.data] == [1, 100_000]
        assert [len(await websocket.recv()) for _ in range(2)] == [5, 100_004]


async def test_an_accepted_connection_is_proven() -> None:
    async with connected() as (_, _, websocket):
        assert websocket.response is not None
        assert Prover("k").prover_of(websocket.response.headers["Meshgate-Proof"], 101) == "abc"


async def test_pings_are_answered() -> None:
    async with connected() as (_, _, websocket):
        await asyncio.wait_for(await websocket.ping(), 10)


async def test_fragments_are_joined() -> None:
    async with connected() as (receiver, _, websocket):
        await websocket.send([b"in", b"fragments", bytes(100_000)])
        await websocket.send(b"whole")
        await websocket.send([b"", b"in", b"", b"fragments"])
        await until(lambda: len(receiver.data) == 3)
        assert receiver.data == [b"infragments" + bytes(100_000), b"whole", b"infragments"]


async def test_fragments_of_a_message_that_is_too_large_close_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_connection, "MAX_MESSAGE", 10)
    async with connected() as (receiver, _, websocket):
        await websocket.send([b"12345", b"67890", b"1"])
        with pytest.raises(ConnectionClosed) as caught:
            await websocket.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == CloseCode.MESSAGE_TOO_BIG
        assert receiver.data == []


async def test_a_text_message_closes_the_connection() -> None:
    async with connected() as (receiver, _, websocket):
        await websocket.send("text")
        with pytest.raises(ConnectionClosed) as caught:
            await websocket.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == CloseCode.UNSUPPORTED_DATA
        assert caught.value.rcvd.reason == "text messages are not supported"
        assert receiver.data == []


async def test_the_peer_gets_the_reason_of_a_close_and_nothing_after_it() -> None:
    async with connected() as (receiver, connection, websocket):
        connection.close(CloseCode.GOING_AWAY, "another connection has taken over this session")
        connection.write([b"late"])
        with pytest.raises(ConnectionClosed, match="another connection has taken over this session"):
            await websocket.recv()
        await until(lambda: receiver.closed)
        assert receiver.closed == ["another connection has taken over this session"]


async def test_the_websocket_is_closed_when_the_bytes_of_the_client_end() -> None:
    receiver = Receiver()
    _, opening, near = await handshake(receiver)
    websocket = await opening
    near.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionClosed) as caught:
        await websocket.recv()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == CloseCode.GOING_AWAY
    await until(lambda: receiver.closed)
    assert receiver.closed == ["the connection to the client has ended"]


async def test_a_connection_without_data_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_connection, "IDLE_TIMEOUT", 0.05)
    async with connected() as (receiver, connection, _):
        await until(lambda: receiver.closed)
        assert connection.silence >= 0.05
        (reason,) = receiver.closed
        assert re.fullmatch(r"no data received for \d+ s", reason)


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


async def test_a_client_that_dies_while_it_takes_over_has_not() -> None:
    receiver = Receiver()
    _, opening, near = await handshake(receiver, Holder="me", Attach="1")
    (await opening).transport.abort()
    near.close()
    await until(lambda: receiver.refused)
    assert (receiver.admitted, receiver.connection, receiver.closed) == ([], None, [])


async def test_of_two_clients_that_take_over_at_once_the_one_that_lost_gets_the_reason() -> None:
    receiver = Receiver()
    _, opening, _ = await handshake(receiver, Holder="me", Attach="1")
    websocket = await opening
    receiver.refusal = Refusal("taken_over", "another process was faster")
    await websocket.send(b"hello")
    with pytest.raises(ConnectionClosed, match="another process was faster"):
        await websocket.recv()
    assert (receiver.connection, receiver.data, receiver.refused) == (None, [], 1)


# --- one connection after another ---------------------------------------------------------------------------


async def test_a_new_connection_takes_over_and_the_old_one_is_ignored() -> None:
    client = EngineClient()
    newer = _Connection()
    client.engine.link.connection_opened(newer)  # type: ignore[arg-type]
    assert client.closed == ["another connection has taken over this session"]
    client.engine.link.connection_data(client, b"late")  # type: ignore[arg-type]
    client.engine.link.connection_closed(client, "late")  # type: ignore[arg-type]
    assert client.connected == [True, False, True]
    await client.engine.close("the test is over")


async def test_an_unknown_message_closes_the_connection_but_not_the_session() -> None:
    client = EngineClient()
    client.engine.link.connection_data(client, b"\xff")  # type: ignore[arg-type]
    await client.turns()
    assert len(client.closed) == 1
    assert client.connected == [True, False]
    assert not client.engine.ended.is_set()
    await client.engine.close("the test is over")


async def test_a_violation_of_the_protocol_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: object) -> None:
        raise ProtocolError("a header that is not JSON", resumable=False)

    client = EngineClient()
    monkeypatch.setattr(client.engine.link.session, "receive_data", fail)
    client.engine.link.connection_data(client, b"data")  # type: ignore[arg-type]
    await asyncio.wait_for(client.engine.ended.wait(), 10)
    assert client.closed == ["a header that is not JSON"]
    assert client.engine.end_reason == "the client violated the protocol: a header that is not JSON"


class _Connection:
    """A connection of which nothing is expected."""

    run = ""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def write(self, pieces: object) -> None: ...

    def buffered(self) -> int:
        return 0

    def call_later(self, delay: float, callback: object) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay, callback)  # type: ignore[arg-type]

    def close(self, code: int, reason: str) -> None:
        self.closed.append(reason)
