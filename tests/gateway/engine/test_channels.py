"""What waits for a program that does not take it, and what a program sends ahead of what the engine can do."""

from __future__ import annotations

from meshgate_gateway.engine.channels import QUEUED_OF_A_CHANNEL
from meshgate_wire import Limits
from meshgate_wire.messages import Call, MeshRef, OpenChannel, PortMessage, Release, Values
from tests.gateway.engine.in_memory import Laptop, on_a_loop

PIECE = bytes(100_000)
MANY = 1000  # pieces: 100 MB, many windows


async def opened(laptop: Laptop) -> int:
    number = laptop.number()
    laptop.send(OpenChannel(object=number), stream=number)
    await laptop.turns()
    return number


@on_a_loop
async def test_a_port_whose_messages_nobody_takes_is_read_no_further_than_a_bound() -> None:
    laptop = Laptop(takes=False)
    await opened(laptop)
    (port,) = laptop.monarch.ports
    for _ in range(MANY):
        port.put(PIECE)
    await laptop.turns(MANY * 5)
    most = Limits().window + QUEUED_OF_A_CHANNEL + 2 * len(PIECE)
    assert port.taken * len(PIECE) < most
    assert laptop.engine.session.statistics().queued_bytes < QUEUED_OF_A_CHANNEL + 2 * len(PIECE)
    before = port.taken
    laptop.takes = True
    laptop.take_all()
    await laptop.settle(until=lambda: len(laptop.of(PortMessage)) == MANY)
    assert before < port.taken == MANY
    await laptop.end()


@on_a_loop
async def test_a_full_channel_holds_up_neither_calls_nor_another_channel() -> None:
    laptop = Laptop(takes=False)
    full, empty = await opened(laptop), await opened(laptop)
    for _ in range(MANY):
        laptop.monarch.ports[0].put(PIECE)
    await laptop.turns(MANY * 5)
    laptop.monarch.ports[1].put(b"small")
    actors = laptop.spawn_actors(laptop.spawn_procs(laptop.attach()))
    call = Call(call=1, target=MeshRef(object=actors), endpoint="step", adverb="call")
    laptop.send(call, b"arguments", stream=actors)
    await laptop.settle(until=lambda: laptop.monarch.casts)
    for rank in range(2):
        laptop.monarch.ports[-1].put(b"value", rank)
    await laptop.settle(until=lambda: laptop.of(Values))
    assert {message.port for message in laptop.of(PortMessage)} == {full, empty}
    await laptop.end()


@on_a_loop
async def test_a_full_channel_that_is_released_is_read_no_more() -> None:
    laptop = Laptop(takes=False)
    number = await opened(laptop)
    (port,) = laptop.monarch.ports
    for _ in range(MANY):
        port.put(PIECE)
    await laptop.turns(MANY * 5)
    laptop.send(Release(objects=(number,)), stream=number)
    await laptop.turns()
    before = port.taken
    laptop.take_all()
    await laptop.turns(MANY)
    assert port.taken == before
    await laptop.end()


@on_a_loop
async def test_calls_that_wait_for_their_actors_keep_their_credit() -> None:
    laptop = Laptop()
    hosts, procs = laptop.attach(), laptop.number()
    actors = laptop.spawn_actors(procs)
    for number in range(MANY):
        call = Call(call=number, target=MeshRef(object=actors), endpoint="step", adverb="broadcast")
        laptop.send(call, PIECE, stream=actors)
    await laptop.turns()
    assert laptop.engine.session.statistics().queued_bytes == 0
    held = MANY * len(PIECE) - laptop.session.queued_bytes
    assert held < Limits().window + 2 * len(PIECE)
    # What they wait for comes on another stream: this one is full.
    laptop.spawn_procs(hosts, number=procs)
    await laptop.settle(until=lambda: len(laptop.monarch.casts) == MANY)
    assert laptop.session.queued_bytes == 0
    await laptop.end()
