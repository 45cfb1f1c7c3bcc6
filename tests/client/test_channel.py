from __future__ import annotations

import asyncio
import gc
import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from meshgate.channel import Channel, Port, PortReceiver
from meshgate.client import Client
from meshgate.dialing import UrlDialer
from meshgate.errors import ActorError, GatewayError, InvalidRequestError
from meshgate.settings import ClientSettings
from meshgate_wire import Fragments
from meshgate_wire.messages import OpenChannel, PortMessage, PortSend, Release, stream_of
from tests.client.fake_gateway import TOKEN, FakeGateway, FakeSession, unpickle


@pytest.fixture
def loop_back(gateway: FakeGateway) -> FakeGateway:
    """A gateway whose ports give back to the laptop what the laptop sends to them."""

    def give_back(session: FakeSession, header: PortSend, buffers: Sequence[Fragments]) -> None:
        message = PortMessage(port=header.port, rank=3)
        session.send(message, pickle.dumps(unpickle(header, buffers)), stream=stream_of(header.port))

    gateway.on[PortSend] = give_back
    return gateway


def deliver(gateway: FakeGateway, port: Port[Any], value: object, **given: Any) -> None:
    """Sends ``value`` through the port, as an actor would."""
    message = PortMessage(port=port._known.number, **given)
    session = gateway.session()
    gateway.do(lambda: session.send(message, pickle.dumps(value), stream=stream_of(message.port)))


def test_what_is_sent_is_received_in_order(loop_back: FakeGateway, client: Client) -> None:
    port, receiver = Channel.open()
    for i in range(100):
        port.send(i)
    assert [receiver.recv().get(timeout=20) for _ in range(100)] == list(range(100))


def test_a_ranked_receiver_tells_the_rank(loop_back: FakeGateway, client: Client) -> None:
    port, receiver = Channel.open_ranked()
    port.send("x")
    assert receiver.recv().get(timeout=20) == (3, "x")


def test_a_message_without_a_rank_is_no_good_to_a_ranked_receiver(gateway: FakeGateway, client: Client) -> None:
    port, receiver = Channel.open_ranked()
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    deliver(gateway, port, 1)
    with pytest.raises(ValueError, match="without a rank"):
        receiver.recv().get(timeout=20)


def test_an_exception_that_was_sent_is_raised(gateway: FakeGateway, client: Client) -> None:
    port, receiver = Channel.open()
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    deliver(gateway, port, ZeroDivisionError("no"), rank=1, exception=True)
    deliver(gateway, port, 5)
    with pytest.raises(ActorError) as caught:
        receiver.recv().get(timeout=20)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.rank == 1
    assert receiver.recv().get(timeout=20) == 5


def test_a_future_that_nobody_looks_at_takes_no_message(loop_back: FakeGateway, client: Client) -> None:
    port, receiver = Channel.open()
    receiver.recv()
    repr(receiver.recv())
    port.send(1)
    assert receiver.recv().get(timeout=20) == 1


def test_messages_go_to_who_looks_first(loop_back: FakeGateway, client: Client) -> None:
    port, receiver = Channel.open()
    made_first, made_second = receiver.recv(), receiver.recv()
    port.send(1)
    port.send(2)
    assert made_second.get(timeout=20) == 1
    assert made_first.get(timeout=20) == 2


def test_a_timeout_keeps_the_place_in_the_queue(loop_back: FakeGateway, client: Client) -> None:
    port, receiver = Channel.open()
    waiting = receiver.recv()
    with pytest.raises(TimeoutError):
        waiting.get(timeout=0.01)
    port.send(1)
    port.send(2)
    assert receiver.recv().get(timeout=20) == 2
    assert waiting.get(timeout=20) == 1


def test_messages_can_be_awaited(loop_back: FakeGateway, client: Client) -> None:
    port, receiver = Channel.open()

    async def main() -> list[int]:
        port.send(1)
        port.send(2)
        return [await receiver.recv(), await receiver.recv()]

    assert asyncio.run(main()) == [1, 2]


def test_a_slow_receiver_slows_the_sender(gateway: FakeGateway, client: Client) -> None:
    port, receiver = Channel.open()
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    session = gateway.session()
    message = PortMessage(port=port._known.number)
    megabyte = pickle.dumps(b"x" * 1_000_000)

    def send_much() -> None:
        for _ in range(50):
            session.wire.send(message, (megabyte,), stream=stream_of(message.port))
        session.flush()

    gateway.do(send_much)
    hosts = client.attach_hosts("workers", 2)
    hosts.initialized.get(timeout=20)  # other streams go on
    assert gateway.do(lambda: session.wire.queued_bytes) > 30_000_000
    assert [len(receiver.recv().get(timeout=30)) for _ in range(50)] == [1_000_000] * 50
    hosts.initialized.get(timeout=20)
    assert gateway.do(lambda: session.wire.queued_bytes) == 0


def test_a_channel_that_nobody_holds_is_released(gateway: FakeGateway, client: Client) -> None:
    port, receiver = Channel.open(once=True)
    number = port._known.number
    assert isinstance(receiver, PortReceiver)
    del port, receiver
    gc.collect()
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    assert gateway.got(OpenChannel)[0].once is True
    assert gateway.got(Release) == [Release(objects=(number,))]


def test_the_end_of_the_session_ends_the_waiting(loop_back: FakeGateway, settings: ClientSettings) -> None:
    client = Client.connect(UrlDialer(loop_back.url, TOKEN), settings=settings)
    port, receiver = Channel.open(client=client)
    port.send(1)
    first, second = receiver.recv(), receiver.recv()
    assert first.get(timeout=20) == 1
    with pytest.raises(TimeoutError):
        second.get(timeout=0)
    client.close()
    for future in (second, receiver.recv()):
        with pytest.raises(GatewayError, match="closed its session"):
            future.get(timeout=20)


def test_what_came_before_the_end_can_still_be_received(loop_back: FakeGateway, settings: ClientSettings) -> None:
    client = Client.connect(UrlDialer(loop_back.url, TOKEN), settings=settings)
    port, receiver = Channel.open(client=client)
    port.send(1)
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    port.send(2)
    assert receiver.recv().get(timeout=20) == 1
    client.close()
    assert receiver.recv().get(timeout=20) == 2


def test_the_laptop_sends_no_exceptions(client: Client) -> None:
    port, _ = Channel.open()
    with pytest.raises(InvalidRequestError, match="send it as a value"):
        port.exception(ValueError())


def test_a_channel_needs_a_session() -> None:
    with pytest.raises(GatewayError, match="there is no session"):
        Channel.open()
