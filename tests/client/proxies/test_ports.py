from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from meshgate.actors.api import MonarchActorError
from meshgate.errors import ActorError, GatewayError, InvalidRequestError
from meshgate.proxies.client import Channel, Client
from meshgate.proxies.ports import Port
from meshgate.session.dialing import UrlDialer
from meshgate.session.settings import ClientSettings
from meshgate_wire import Fragments
from meshgate_wire.messages import PortMessage, PortSend, Release, stream_of
from tests.client.scripted_gateway import TOKEN, ScriptedGateway, ScriptedSession, unpickle
from tests.waiting import wait_for


@pytest.fixture
def loop_back(gateway: ScriptedGateway) -> ScriptedGateway:
    """A gateway whose ports send every message back to the laptop."""

    def send_back(session: ScriptedSession, header: PortSend, buffers: Sequence[Fragments]) -> None:
        message = PortMessage(port=header.port, rank=3)
        session.send(message, pickle.dumps(unpickle(header, buffers)), stream=stream_of(header.port))

    gateway.on[PortSend] = send_back
    return gateway


def deliver(gateway: ScriptedGateway, port: Port[Any], value: object, **fields: Any) -> None:
    """Sends ``value`` through the port, as an actor would."""
    message = PortMessage(port=port._remote.number, **fields)
    session = gateway.session()
    gateway.do(lambda: session.send(message, pickle.dumps(value), stream=stream_of(message.port)))


def test_messages_arrive_in_order(loop_back: ScriptedGateway, client: Client) -> None:
    port, receiver = Channel.open()
    for i in range(100):
        port.send(i)
    assert [receiver.recv().get(timeout=20) for _ in range(100)] == list(range(100))


def test_a_ranked_receiver_returns_the_rank(loop_back: ScriptedGateway, client: Client) -> None:
    port, receiver = Channel.open_ranked()
    port.send("x")
    assert receiver.recv().get(timeout=20) == (3, "x")


def test_a_ranked_receiver_rejects_a_message_without_a_rank(gateway: ScriptedGateway, client: Client) -> None:
    port, receiver = Channel.open_ranked()
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    deliver(gateway, port, 1)
    with pytest.raises(ValueError, match="without a rank"):
        receiver.recv().get(timeout=20)


def test_a_sent_exception_is_raised_itself(gateway: ScriptedGateway, client: Client) -> None:
    port, receiver = Channel.open()
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    deliver(gateway, port, ZeroDivisionError("no"), rank=1, exception=True)
    deliver(gateway, port, 5)
    with pytest.raises(ZeroDivisionError, match=r"^no$") as caught:
        receiver.recv().get(timeout=20)
    assert "test_a_sent_exception_is_raised_itself" in [entry.name for entry in caught.traceback]
    assert receiver.recv().get(timeout=20) == 5


def test_an_endpoints_exception_sent_to_a_port_is_an_actor_error(gateway: ScriptedGateway, client: Client) -> None:
    port, receiver = Channel.open()
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    deliver(gateway, port, MonarchActorError(ZeroDivisionError("no"), "failed"), rank=1, exception=True)
    with pytest.raises(ActorError) as caught:
        receiver.recv().get(timeout=20)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.rank == 1


def test_an_unused_future_takes_no_message(loop_back: ScriptedGateway, client: Client) -> None:
    port, receiver = Channel.open()
    receiver.recv()
    repr(receiver.recv())
    port.send(1)
    assert receiver.recv().get(timeout=20) == 1


def test_messages_go_to_the_future_that_is_used_first(loop_back: ScriptedGateway, client: Client) -> None:
    port, receiver = Channel.open()
    created_first, created_second = receiver.recv(), receiver.recv()
    port.send(1)
    port.send(2)
    assert created_second.get(timeout=20) == 1
    assert created_first.get(timeout=20) == 2


def test_a_timeout_gives_up_the_futures_place_in_the_queue(loop_back: ScriptedGateway, client: Client) -> None:
    port, receiver = Channel.open()
    waiting = receiver.recv()
    with pytest.raises(TimeoutError):
        waiting.get(timeout=0.01)
    port.send(1)
    port.send(2)
    assert receiver.recv().get(timeout=20) == 1
    assert waiting.get(timeout=20) == 2


def test_messages_can_be_awaited(loop_back: ScriptedGateway, client: Client) -> None:
    port, receiver = Channel.open()

    async def main() -> list[int]:
        port.send(1)
        port.send(2)
        return [await receiver.recv(), await receiver.recv()]

    assert asyncio.run(main()) == [1, 2]


def test_a_slow_receiver_slows_the_sender(gateway: ScriptedGateway, client: Client) -> None:
    port, receiver = Channel.open()
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    session = gateway.session()
    message = PortMessage(port=port._remote.number)
    megabyte = pickle.dumps(b"x" * 1_000_000)

    def send_50_megabytes() -> None:
        for _ in range(50):
            session.wire.send(message, (megabyte,), stream=stream_of(message.port))
        session.flush()

    gateway.do(send_50_megabytes)
    hosts = client.attach_hosts("workers", 2)
    hosts.initialized.get(timeout=20)  # other streams continue
    assert gateway.do(lambda: session.wire.queued_bytes) > 30_000_000
    assert [len(receiver.recv().get(timeout=30)) for _ in range(50)] == [1_000_000] * 50
    hosts.initialized.get(timeout=20)
    assert gateway.do(lambda: session.wire.queued_bytes) == 0


def test_the_end_of_the_session_fails_waiting_futures(loop_back: ScriptedGateway, settings: ClientSettings) -> None:
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


def test_messages_that_arrived_before_the_end_can_still_be_received(
    loop_back: ScriptedGateway, settings: ClientSettings
) -> None:
    client = Client.connect(UrlDialer(loop_back.url, TOKEN), settings=settings)
    port, receiver = Channel.open(client=client)
    port.send(1)
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    port.send(2)
    assert receiver.recv().get(timeout=20) == 1
    client.close()
    assert receiver.recv().get(timeout=20) == 2


def test_a_dropped_channel_gives_up_the_credit_of_its_unread_messages(gateway: ScriptedGateway, client: Client) -> None:
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    wire = client._connection._session
    port, receiver = Channel.open()
    stream = stream_of(port._remote.number)
    for _ in range(2):
        deliver(gateway, port, bytes(3_000_000))
    wait_for(lambda: wire._windows.held > 6_000_000, "both messages")
    del port, receiver
    wait_for(lambda: not wire._windows.held and stream not in wire._manual, "the credit")


def test_a_channel_of_an_earlier_driver_closes_when_its_inbox_is_dropped(
    gateway: ScriptedGateway, client: Client
) -> None:
    unnamed, named = (client.objects.create("port", name, "Channel.open()").number for name in ("", "numbers"))
    inboxes = [client.open_inbox(unnamed, ""), client.open_inbox(named, "numbers")]
    inboxes.clear()
    port, _ = Channel.open()
    port.send("posted after the release")
    wait_for(lambda: gateway.got(PortSend), "the message")
    assert gateway.got(Release) == [Release(objects=(unnamed,))]


def test_the_laptop_cannot_send_exceptions(client: Client) -> None:
    port, _ = Channel.open()
    with pytest.raises(InvalidRequestError, match="send it as a value"):
        port.exception(ValueError())


def test_a_port_asks_for_undeliverable_values_to_be_dropped(gateway: ScriptedGateway, client: Client) -> None:
    port, _ = Channel.open()
    port.send("first")
    port.return_undeliverable = False
    port.send("second")
    wait_for(lambda: len(gateway.got(PortSend)) == 2, "both values")
    assert [header.return_undeliverable for header in gateway.got(PortSend)] == [True, False]
