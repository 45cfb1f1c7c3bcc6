"""What the laptop lets go, and who names it afterwards."""

from __future__ import annotations

from meshgate_wire.messages import (
    Call,
    Done,
    Failed,
    MeshRef,
    ObjectFailed,
    OpenChannel,
    PortSend,
    Release,
    SendTo,
    Stop,
)
from tests.gateway.engine.in_memory import Laptop, on_a_loop


@on_a_loop
async def test_who_names_a_channel_that_was_released_is_refused_and_holds_up_nobody() -> None:
    laptop = Laptop()
    actors, channel = laptop.spawn_up(), laptop.number()
    laptop.send(OpenChannel(object=channel), stream=channel)
    laptop.send(Release(objects=(channel,)), stream=channel)
    laptop.send(PortSend(port=channel), b"value", stream=channel)
    laptop.send(SendTo(target=MeshRef(object=actors), endpoint="step", port=channel), b"arguments", stream=actors)
    call = Call(call=2, target=MeshRef(object=actors), endpoint="step", adverb="broadcast")
    laptop.send(call, b"arguments", stream=actors)
    await laptop.settle(until=lambda: laptop.monarch.casts)
    await laptop.end()


@on_a_loop
async def test_a_mesh_that_was_stopped_and_released_leaves_the_session_going() -> None:
    laptop = Laptop()
    hosts = laptop.attach()
    procs = laptop.spawn_procs(hosts)
    laptop.send(Stop(call=1, target=MeshRef(object=procs)), stream=procs)
    laptop.send(Release(objects=(procs,)), stream=procs)
    await laptop.settle(until=lambda: laptop.of(Done))
    laptop.spawn_actors(laptop.spawn_procs(hosts))
    await laptop.turns()
    assert not laptop.of(Failed)
    assert not laptop.of(ObjectFailed)
    await laptop.end()
