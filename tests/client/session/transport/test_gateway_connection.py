from __future__ import annotations

import asyncio
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol

from meshgate.proxies.client import Client
from meshgate.session.dialing import PING_INTERVAL, Route
from meshgate.session.transport.gateway_connection import (
    CLOSE_TIMEOUT,
    PING_TIMEOUT,
    GatewayConnection,
    open_connection,
)
from meshgate_wire.messages import Call, Values, stream_of
from tests.client.counting import one_counter
from tests.client.scripted_gateway import ScriptedGateway
from tests.gateway.virtual_time import run_in_virtual_time


def test_invalid_data_costs_only_the_connection(gateway: ScriptedGateway, client: Client) -> None:
    one = one_counter(client)
    one.add.call_one(0).get(timeout=20)
    link = gateway.session().link
    assert link is not None
    gateway.do(lambda: link.write([b"\xff invalid"]))
    assert one.add.call_one(1).get(timeout=30) == 1
    assert client.statistics().connections == 2
    assert "unknown type 255" in client._connection._reconnector.last_failure


def test_a_text_message_costs_only_the_connection(gateway: ScriptedGateway, client: Client) -> None:
    one = one_counter(client)
    one.add.call_one(0).get(timeout=20)
    link = gateway.session().link
    assert link is not None
    gateway.run(link.send("hello"))
    assert one.add.call_one(1).get(timeout=30) == 1
    assert client.statistics().connections == 2


def test_fragmented_messages_are_joined(gateway: ScriptedGateway, client: Client) -> None:
    one = one_counter(client)
    one.initialized.get(timeout=20)
    session = gateway.session()
    link = session.link
    assert link is not None
    gateway.on[Call] = lambda *_: None
    future = one.add.call_one(1)
    one.initialized.get(timeout=20)

    def write_in_fragments(pieces: Any) -> None:
        data = b"".join(pieces)
        link.protocol.send_binary(data[:3], fin=False)
        link.protocol.send_continuation(data[3:9], fin=False)
        link.protocol.send_continuation(data[9:], fin=True)
        link.send_data()

    link.write = write_in_fragments  # type: ignore[method-assign]
    call = gateway.got(Call)[0]
    values = Values(call=call.call)
    gateway.do(lambda: session.send(values, pickle.dumps(5), stream=stream_of(call.target.object)))
    assert future.get(timeout=20) == 5
    assert client.statistics().connections == 1


class Receiver:
    def connection_opened(self, connection: GatewayConnection) -> None: ...

    def connection_data(self, connection: GatewayConnection, data: bytes) -> None: ...

    def connection_writable(self, connection: GatewayConnection) -> None: ...


async def accept(end: socket.socket) -> ServerProtocol:
    """The gateway's side of the handshake."""
    loop, protocol = asyncio.get_running_loop(), ServerProtocol()
    while not (requests := protocol.events_received()):
        protocol.receive_data(await loop.sock_recv(end, 65_536))
    protocol.send_response(protocol.accept(requests[0]))  # type: ignore[arg-type]
    await loop.sock_sendall(end, b"".join(protocol.data_to_send()))
    return protocol


async def connect_to(near: socket.socket, ping_interval: float = PING_INTERVAL) -> GatewayConnection:
    return await connect_along(Route("ws://gateway", sock=near, through_proxy=False, ping_interval=ping_interval))


async def connect_along(route: Route) -> GatewayConnection:
    return await open_connection(
        route,
        "/",
        {},
        Receiver(),
        max_size=1 << 20,
        is_gateways=lambda response: True,
    )


@pytest.mark.parametrize("on_unix_socket", [False, True])
def test_only_what_may_pass_an_intermediary_is_masked(on_unix_socket: bool, tmp_path: Path) -> None:
    messages = [b"s" * 100, b"s" * 100, b"l" * 100_000]

    async def send() -> tuple[list[bytes], bytes]:
        loop = asyncio.get_running_loop()
        address: Any = str(tmp_path / "gateway.sock") if on_unix_socket else ("127.0.0.1", 0)
        with socket.socket(socket.AF_UNIX if on_unix_socket else socket.AF_INET) as listener:
            listener.setblocking(False)
            listener.bind(address)
            listener.listen()
            url = "ws://gateway" if on_unix_socket else f"ws://127.0.0.1:{listener.getsockname()[1]}"
            route = Route(url, unix_socket=address if on_unix_socket else None, through_proxy=False)
            connecting = asyncio.ensure_future(connect_along(route))
            end, _ = await loop.sock_accept(listener)
        with end:
            protocol = await accept(end)
            connection = await connecting
            for message in messages:
                connection.write([message[:50], memoryview(message)[50:]])
            written, received = b"", []
            while len(received) < len(messages):
                data = await loop.sock_recv(end, 65_536)
                written += data
                protocol.receive_data(data)
                received += [
                    event.data
                    for event in protocol.events_received()
                    if isinstance(event, Frame) and event.opcode is Opcode.BINARY
                ]
            connection.abort()
            await connection.wait_lost()
        return received, written

    received, written = asyncio.run(send())
    assert received == messages
    assert all((message in written) == on_unix_socket for message in messages)
    if not on_unix_socket:
        assert written[2:6] != written[108:112]  # the masks of the first two messages, of 106 bytes each


def test_closing_does_not_wait_for_the_end_of_the_gateways_tcp_connection() -> None:
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)

    async def close() -> None:
        loop = asyncio.get_running_loop()
        accepting = asyncio.ensure_future(accept(far))
        connection = await connect_to(near)
        protocol = await accepting
        started = loop.time()
        closing = asyncio.ensure_future(connection.close())
        while data := await loop.sock_recv(far, 65_536):
            protocol.receive_data(data)
            await loop.sock_sendall(far, b"".join(protocol.data_to_send()))
        await closing
        assert loop.time() == started  # this end of the TCP connection has not been closed

    with near, far:
        run_in_virtual_time(close())


def test_a_gateway_that_vanishes_during_an_upload_is_noticed() -> None:
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)

    async def upload() -> None:
        loop = asyncio.get_running_loop()
        accepting = asyncio.ensure_future(accept(far))
        connection = await connect_to(near)
        await accepting
        connection.write([bytes(8 << 20)])  # the kernel takes a part of it, and there is no space for a ping
        for _ in range(5):
            await asyncio.sleep(PING_INTERVAL + PING_TIMEOUT - 5)
            await loop.sock_recv(far, 65_536)  # slow, but there
        started = loop.time()
        await connection.wait_lost()
        assert loop.time() - started < PING_INTERVAL + PING_TIMEOUT + 6
        assert "nothing could be sent and nothing arrived" in connection.close_description()

    run_in_virtual_time(upload())
    far.close()


def test_a_gateway_that_vanishes_is_noticed_by_the_pings_of_the_route() -> None:
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        accepting = asyncio.ensure_future(accept(far))
        connection = await connect_to(near, ping_interval=3.0)
        await accepting
        started = loop.time()
        await connection.wait_lost()
        assert 3.0 + PING_TIMEOUT <= loop.time() - started < 3.0 + PING_TIMEOUT + CLOSE_TIMEOUT + 1

    with far:
        run_in_virtual_time(wait())
