"""The control channel, and the encoding of its messages, on which the stub engine relies too."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from meshgate_gateway import control
from meshgate_gateway.control import (
    CALL_BOUNDS,
    MAX_HOSTS_PER_MESSAGE,
    MAX_MESSAGE,
    SYNC_BOUNDS,
    AssignSession,
    ClientConnected,
    ControlChannel,
    ControlMessage,
    EndSession,
    EngineCounts,
    HostsReply,
    HostsRequest,
    NewConnection,
    Samples,
    control_pair,
    parse_message,
)
from meshgate_wire.messages import Host

HOST = Host(name="workers-0", address="tcp://10.0.0.1:26600")


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (control.AssignSession(session="0" * 32, lease=1.5), "assign"),
        (control.RunEnded(run="night"), "run_ended"),
        (control.NewConnection(head="GET / HTTP/1.1\r\n\r\n"), "connection"),
        (control.HostsReply(mesh="workers", hosts=(HOST,), more=True), "hosts"),
        (control.HostLost(mesh="workers", host="workers-0", reason="OOMKilled", returns=True), "host_lost"),
        (control.HostLost(mesh="workers", host="workers-0", reason="removed", removed=True), "host_lost"),
        (control.HostRestored(mesh="workers", rank=0, host=HOST), "host_back"),
        (control.EndSession(reason="done"), "end"),
        (control.ReportState(), "report_state"),
        (control.EngineCounts(calls={"ok": 2}, call_times=Samples(buckets=(1, 1), seconds=0.5)), "counts"),
        (control.HostsRequest(mesh="workers"), "ask_hosts"),
        (control.ClientConnected(), "connected"),
        (control.ClientDisconnected(), "disconnected"),
        (control.SessionState(connected=False, disconnected_for=1.5), "state"),
        (control.SessionEnded(reason="done"), "ended"),
    ],
)
def test_a_message_is_parsed_from_its_encoding(message: ControlMessage, kind: str) -> None:
    data = message.model_dump_json().encode()
    assert json.loads(data)["type"] == kind
    assert parse_message(data) == message


@pytest.mark.parametrize("data", [b"", b"x", b"{}", b'{"type": "unknown"}', b'{"type": "end"}'])
def test_an_invalid_message_raises(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_message(data)


def test_the_longest_reason_fits_into_a_message() -> None:
    for message in (
        control.EndSession(reason="\x01" * 1_000_000),
        control.HostsReply(mesh="m", error="x" * 1_000_000),
    ):
        assert len(message.model_dump_json()) < MAX_MESSAGE


@pytest.mark.parametrize("bounds", [CALL_BOUNDS, SYNC_BOUNDS])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_the_largest_counts_fit_into_a_control_message() -> None:
    most = 10**30
    samples = Samples(buckets=(most,) * (len(CALL_BOUNDS) + 1), seconds=float(most))
    counts = EngineCounts(
        calls={"ok": most, "failed": most}, call_times=samples, sync_times=samples, bytes_sent=most, lines=most
    )
    assert len(counts.model_dump_json()) < MAX_MESSAGE


@asynccontextmanager
async def with_channel() -> AsyncIterator[tuple[ControlChannel, ControlChannel]]:
    one, two = map(ControlChannel, control_pair())
    try:
        yield one, two
    finally:
        one.close()
        two.close()


async def test_messages_arrive_unchanged_and_in_order() -> None:
    sent = [
        ClientConnected(),
        AssignSession(session="0" * 32, lease=1.5),
        HostsRequest(mesh="workers"),
        HostsReply(mesh="workers", hosts=(Host(name="workers-0", address="ipc:///a"),)),
        HostsReply(mesh="workers", error="none"),
        NewConnection(head="GET / HTTP/1.1\r\nX: \xfc\r\n\r\n"),
        EndSession(reason="over"),
    ]
    async with with_channel() as (one, two):
        for message in sent:
            assert one.send(message)
        assert [await two.receive() for _ in sent] == [(message, []) for message in sent]


async def test_a_descriptor_is_passed_with_its_message() -> None:
    async with with_channel() as (one, two):
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


async def test_messages_beyond_the_socket_buffer_are_sent_later_in_order_with_their_descriptors() -> None:
    count = 3000
    async with with_channel() as (one, two):
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


async def test_the_peer_reads_all_messages_before_it_sees_the_close() -> None:
    async with with_channel() as (one, two):
        one.send(ClientConnected())
        one.close()
        assert await two.receive() == (ClientConnected(), [])
        assert await two.receive() is None
        assert not two.send(ClientConnected())


async def test_a_waiting_receive_returns_none_on_close() -> None:
    async with with_channel() as (one, two):
        receiving = asyncio.create_task(two.receive())
        await asyncio.wait([receiving], timeout=0)
        one.close()
        assert await receiving is None


async def test_a_cancelled_receive_loses_no_message() -> None:
    async with with_channel() as (one, two):
        receiving = asyncio.create_task(two.receive())
        await asyncio.wait([receiving], timeout=0)
        one.send(ClientConnected())
        receiving.cancel()
        await asyncio.wait([receiving])
        if receiving.cancelled():
            assert await two.receive() == (ClientConnected(), [])


async def test_the_maximum_number_of_hosts_fits_in_a_message_and_a_larger_message_raises() -> None:
    def hosts(count: int) -> tuple[Host, ...]:
        return tuple(
            Host(name="w" * 63, address=f"tcp://{'h' * 63}:26600", identity="i" * 36, node="n" * 253, zone="z" * 63)
            for _ in range(count)
        )

    async with with_channel() as (one, two):
        reply = HostsReply(mesh="workers", hosts=hosts(MAX_HOSTS_PER_MESSAGE))
        assert one.send(reply)
        assert await two.receive() == (reply, [])
        with pytest.raises(ValueError, match="exceeds the limit"):
            one.send(HostsReply(mesh="workers", hosts=hosts(2 * MAX_HOSTS_PER_MESSAGE)))


@pytest.mark.parametrize("data", [b"x", b"{}", b'{"type":"unheard-of"}', b'{"type":"end"}', b"[" * 1000])
async def test_an_invalid_message_raises_and_its_descriptors_are_closed(data: bytes) -> None:
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
