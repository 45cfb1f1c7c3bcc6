from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

import pytest

from meshgate_gateway.control.channel import MAX_HOSTS_PER_MESSAGE, ControlChannel, control_pair
from meshgate_gateway.control.messages import (
    AssignSession,
    ClientConnected,
    EndSession,
    EngineReady,
    HostsReply,
    HostsRequest,
    NewConnection,
)
from meshgate_wire.messages import Host

Test = Callable[[ControlChannel, ControlChannel], Awaitable[None]]
DEADLINE = 60.0


def with_channel(test: Test) -> None:
    async def run() -> None:
        one, two = map(ControlChannel, control_pair())
        try:
            await asyncio.wait_for(test(one, two), DEADLINE)
        finally:
            one.close()
            two.close()

    asyncio.run(run())


def test_messages_arrive_unchanged_and_in_order() -> None:
    sent = [
        EngineReady(),
        AssignSession(session="0" * 32, lease=1.5),
        HostsRequest(mesh="workers"),
        HostsReply(mesh="workers", hosts=(Host(name="workers-0", address="ipc:///a"),)),
        HostsReply(mesh="workers", error="none"),
        NewConnection(head="GET / HTTP/1.1\r\nX: \xfc\r\n\r\n"),
        EndSession(reason="over"),
    ]

    async def test(one: ControlChannel, two: ControlChannel) -> None:
        for message in sent:
            assert one.send(message)
        assert [await two.receive() for _ in sent] == [(message, []) for message in sent]

    with_channel(test)


def test_a_descriptor_is_passed_with_its_message() -> None:
    async def test(one: ControlChannel, two: ControlChannel) -> None:
        near, far = socket.socketpair()
        with near:
            with far:
                one.send(NewConnection(head=""), [far.fileno()])
            received = await two.receive()
            assert received is not None
            _, (descriptor,) = received
            assert not os.get_inheritable(descriptor)
            with socket.socket(fileno=descriptor) as taken:
                taken.sendall(b"from the engine")
                assert near.recv(100) == b"from the engine"

    with_channel(test)


def test_messages_beyond_the_socket_buffer_are_sent_later_in_order_with_their_descriptors() -> None:
    count = 3000

    async def test(one: ControlChannel, two: ControlChannel) -> None:
        near, far = socket.socketpair()
        with near, far:
            for number in range(count):
                descriptors = [far.fileno()] if number == count - 1 else []
                assert one.send(HostsRequest(mesh=f"{number:0>1000}"), descriptors)
        for number in range(count):
            received = await two.receive()
            assert received is not None
            message, descriptors = received
            assert isinstance(message, HostsRequest)
            assert int(message.mesh) == number
        os.close(descriptors[0])

    with_channel(test)


def test_the_peer_reads_all_messages_before_it_sees_the_close() -> None:
    async def test(one: ControlChannel, two: ControlChannel) -> None:
        one.send(ClientConnected())
        one.close()
        assert await two.receive() == (ClientConnected(), [])
        assert await two.receive() is None
        assert not two.send(EngineReady())

    with_channel(test)


def test_a_waiting_receive_returns_none_on_close() -> None:
    async def test(one: ControlChannel, two: ControlChannel) -> None:
        receiving = asyncio.create_task(two.receive())
        await asyncio.wait([receiving], timeout=0)
        one.close()
        assert await receiving is None

    with_channel(test)


def test_a_cancelled_receive_loses_no_message() -> None:
    async def test(one: ControlChannel, two: ControlChannel) -> None:
        receiving = asyncio.create_task(two.receive())
        await asyncio.wait([receiving], timeout=0)
        one.send(EngineReady())
        receiving.cancel()
        await asyncio.wait([receiving])
        if receiving.cancelled():
            assert await two.receive() == (EngineReady(), [])

    with_channel(test)


def test_the_maximum_number_of_hosts_fits_in_a_message_and_a_larger_message_raises() -> None:
    def hosts(count: int) -> tuple[Host, ...]:
        return tuple(
            Host(name="w" * 63, address=f"tcp://{'h' * 63}:26600", identity="i" * 36, node="n" * 253, zone="z" * 63)
            for _ in range(count)
        )

    async def test(one: ControlChannel, two: ControlChannel) -> None:
        reply = HostsReply(mesh="workers", hosts=hosts(MAX_HOSTS_PER_MESSAGE))
        assert one.send(reply)
        assert await two.receive() == (reply, [])
        with pytest.raises(ValueError, match="exceeds the limit"):
            one.send(HostsReply(mesh="workers", hosts=hosts(2 * MAX_HOSTS_PER_MESSAGE)))

    with_channel(test)


@pytest.mark.parametrize("data", [b"x", b"{}", b'{"type":"unheard-of"}', b'{"type":"end"}', b"[" * 1000])
def test_an_invalid_message_raises_and_its_descriptors_are_closed(data: bytes) -> None:
    async def test() -> None:
        raw, end = control_pair()
        channel = ControlChannel(end)
        near, far = socket.socketpair()
        with raw, near:
            with far:
                socket.send_fds(raw, [data], [far.fileno()])
            with pytest.raises(ValueError):
                await channel.receive()
            assert near.recv(1) == b""
        channel.close()

    asyncio.run(test())
