from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

import pytest

from meshgate_gateway.handoff import (
    Assign,
    Connected,
    Connection,
    ControlChannel,
    End,
    HostsReply,
    HostsRequest,
    Ready,
    control_pair,
)
from meshgate_wire.messages import Host

Test = Callable[[ControlChannel, ControlChannel], Awaitable[None]]
DEADLINE = 20.0


def with_channel(test: Test) -> None:
    async def run() -> None:
        one, two = map(ControlChannel, control_pair())
        try:
            await asyncio.wait_for(test(one, two), DEADLINE)
        finally:
            one.close()
            two.close()

    asyncio.run(run())


def test_messages_arrive_in_order_as_they_were_sent() -> None:
    sent = [
        Ready(),
        Assign(session="0" * 32, lease=1.5),
        HostsRequest(mesh="workers"),
        HostsReply(mesh="workers", hosts=(Host(name="workers-0", address="ipc:///a"),)),
        HostsReply(mesh="workers", error="none"),
        Connection(head="GET / HTTP/1.1\r\nX: \xfc\r\n\r\n"),
        End(reason="over"),
    ]

    async def test(one: ControlChannel, two: ControlChannel) -> None:
        for message in sent:
            assert one.send(message)
        assert [await two.receive() for _ in sent] == [(message, []) for message in sent]

    with_channel(test)


def test_a_connection_changes_hands() -> None:
    async def test(one: ControlChannel, two: ControlChannel) -> None:
        near, far = socket.socketpair()
        with near:
            with far:
                one.send(Connection(head=""), [far.fileno()])
            received = await two.receive()
            assert received is not None
            _, (descriptor,) = received
            assert not os.get_inheritable(descriptor)
            with socket.socket(fileno=descriptor) as taken:
                taken.sendall(b"from the engine")
                assert near.recv(100) == b"from the engine"

    with_channel(test)


def test_what_the_kernel_does_not_take_at_once_is_sent_later_in_order_with_its_descriptors() -> None:
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


def test_a_closed_end_is_seen_by_the_other_after_what_was_sent() -> None:
    async def test(one: ControlChannel, two: ControlChannel) -> None:
        one.send(Connected())
        one.close()
        assert await two.receive() == (Connected(), [])
        assert await two.receive() is None
        assert not two.send(Ready())

    with_channel(test)


def test_a_waiting_receiver_sees_the_end() -> None:
    async def test(one: ControlChannel, two: ControlChannel) -> None:
        receiving = asyncio.create_task(two.receive())
        await asyncio.wait([receiving], timeout=0)
        one.close()
        assert await receiving is None

    with_channel(test)


def test_a_cancelled_receive_loses_nothing() -> None:
    async def test(one: ControlChannel, two: ControlChannel) -> None:
        receiving = asyncio.create_task(two.receive())
        await asyncio.wait([receiving], timeout=0)
        one.send(Ready())
        receiving.cancel()
        await asyncio.wait([receiving])
        if receiving.cancelled():
            assert await two.receive() == (Ready(), [])

    with_channel(test)


def test_the_addresses_of_two_thousand_hosts_fit_and_more_are_refused() -> None:
    async def test(one: ControlChannel, two: ControlChannel) -> None:
        hosts = [Host(name=f"workers-{rank}", address=f"tcp://10.0.0.{rank % 256}:26600") for rank in range(4000)]
        assert one.send(HostsReply(mesh="workers", hosts=tuple(hosts[:2000])))
        received = await two.receive()
        assert received is not None
        assert isinstance(received[0], HostsReply)
        assert len(received[0].hosts) == 2000
        with pytest.raises(ValueError, match="exceeds the limit"):
            one.send(HostsReply(mesh="workers", hosts=tuple(hosts)))

    with_channel(test)


@pytest.mark.parametrize("data", [b"x", b"{}", b'{"type":"unheard-of"}', b'{"type":"end"}', b"[" * 1000])
def test_what_is_no_message_is_refused_and_its_descriptors_closed(data: bytes) -> None:
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
