"""The accumulator port of the adapter, without Monarch; tests/end_to_end runs the adapter with it."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest

from meshgate_gateway.engine.monarch.release_0_7 import Messages
from meshgate_gateway.engine.monarch.release_0_8 import DRAIN_EVERY, Client, Receiver
from meshgate_wire.messages import Host


class NativeReceiver:
    """Counts how often the state was received."""

    def __init__(self) -> None:
        self.drained = 0

    def recv(self, ranked: bool) -> NativeReceiver:
        assert not ranked
        return self

    def spawn_handle(self) -> NativeReceiver:
        self.drained += 1
        return self


def receiving() -> tuple[Messages, Receiver]:
    messages = Messages(asyncio.get_running_loop(), "no state")
    return messages, Receiver(messages, NativeReceiver())


async def test_messages_arrive_in_order_from_another_thread() -> None:
    messages, receiver = receiving()
    thread = threading.Thread(target=lambda: [messages("no state", number) for number in range(100)])
    thread.start()
    assert [await receiver.next_message() for _ in range(100)] == list(range(100))
    thread.join()


async def test_the_state_never_changes() -> None:
    messages, _ = receiving()
    assert messages.initial_state == messages("no state", 1) == "no state"
    assert messages.reducer is None


async def test_a_cancelled_receive_takes_no_message() -> None:
    messages, receiver = receiving()
    receiver.next_message().cancel()
    messages("no state", "kept")
    await asyncio.sleep(0)
    assert await receiver.next_message() == "kept"


async def test_a_message_that_came_first_is_there_at_once() -> None:
    messages, receiver = receiving()
    messages("no state", 1)
    assert receiver.next_message().result() == 1


async def test_states_that_monarch_queues_are_drained() -> None:
    messages, receiver = receiving()
    for number in range(2 * DRAIN_EVERY):
        messages("no state", number)
        await receiver.next_message()
    assert receiver._native.drained == 2


async def test_the_port_does_not_keep_its_receiver_alive() -> None:
    messages, _ = receiving()
    native = NativeReceiver()
    other = Receiver(messages, native)
    dropped = weakref.ref(native)
    del other, native
    gc.collect()
    assert dropped() is None


def test_a_host_without_an_identity_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    service_identity = SimpleNamespace(service_proc_id_from_uuid=lambda uuid: f"service<{uuid}>")
    monkeypatch.setitem(sys.modules, "monarch._src.job", SimpleNamespace(service_identity=service_identity))
    client = object.__new__(Client)
    with_identity = Host(name="workers-0", address="tcp://10.0.0.1:1", identity="service<base58>")
    assert client._service_address(with_identity) == "service<base58>@tcp://10.0.0.1:1"
    with pytest.raises(ValueError, match=r"workers-0 .* has no identity, .* give its address as IDENTITY@ADDRESS"):
        client._service_address(with_identity.model_copy(update={"identity": ""}))
