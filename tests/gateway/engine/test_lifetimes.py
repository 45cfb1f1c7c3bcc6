"""Meshes that were stopped, and what is kept of them."""

from __future__ import annotations

import asyncio
import gc
import weakref

from meshgate_gateway.engine.objects import Procs
from meshgate_wire.messages import Call, Done, Failed, MeshRef, ObjectFailed, Region, Release, Stop
from tests.gateway.engine.in_memory import Laptop, Mesh, on_a_loop


def stop(laptop: Laptop, number: int, call: int = 1) -> None:
    laptop.send(Stop(call=call, target=MeshRef(object=number)), stream=number)


def release(laptop: Laptop, *numbers: int) -> None:
    for number in numbers:
        laptop.send(Release(objects=(number,)), stream=number)


def kept(laptop: Laptop) -> list[int]:
    return [number for number, _ in laptop.engine.objects.items()]


@on_a_loop
async def test_a_notebook_that_spawns_and_stops_all_day_leaves_nothing() -> None:
    laptop = Laptop()
    hosts = laptop.attach()
    held: list[weakref.ref[object]] = []
    for at in range(50):
        procs = laptop.spawn_procs(hosts)
        actors = laptop.spawn_actors(procs)
        await laptop.settle(until=lambda actors=actors: laptop.engine.objects.known(actors))
        held += [weakref.ref(laptop.engine.objects.known(number).inner) for number in (actors,)]  # type: ignore[union-attr]
        stop(laptop, procs, at)
        release(laptop, actors, procs)
        await laptop.settle(until=lambda at=at: len(laptop.of(Done)) == at + 1)
    await laptop.turns()
    assert kept(laptop) == [hosts]
    gc.collect()
    assert [mesh() for mesh in held] == [None] * 50
    await laptop.end()


@on_a_loop
async def test_a_released_mesh_is_kept_until_it_has_stopped() -> None:
    laptop = Laptop()
    going, stopped = asyncio.Event(), asyncio.Event()

    async def slowly(mesh: Mesh) -> None:
        going.set()
        await stopped.wait()

    laptop.monarch.stopping = slowly
    actors = laptop.spawn_up()
    procs = actors - 1
    await laptop.settle(until=lambda: laptop.engine.objects.known(actors))
    release(laptop, actors)
    stop(laptop, procs)
    release(laptop, procs)
    await laptop.settle(until=going.is_set)
    await laptop.turns()
    known = laptop.engine.objects.known(procs)
    assert isinstance(known, Procs)
    assert laptop.engine.meshes.describe(procs, 0).mesh == "actors"
    stopped.set()
    await laptop.settle(until=lambda: laptop.of(Done))
    assert kept(laptop) == [procs - 1]
    await laptop.end()


@on_a_loop
async def test_a_mesh_of_which_a_part_was_stopped_is_kept() -> None:
    laptop = Laptop()
    procs = laptop.spawn_procs(laptop.attach())
    part = Region(labels=("hosts",), offset=0, sizes=(1,), strides=(1,))
    laptop.send(Stop(call=1, target=MeshRef(object=procs, region=part)), stream=procs)
    release(laptop, procs)
    await laptop.settle(until=lambda: laptop.of(Done))
    assert procs in kept(laptop)
    await laptop.end()


@on_a_loop
async def test_actors_that_are_stopped_alone_go_alone() -> None:
    laptop = Laptop()
    actors = laptop.spawn_up()
    stop(laptop, actors)
    release(laptop, actors)
    await laptop.settle(until=lambda: laptop.of(Done))
    assert kept(laptop) == [actors - 2, actors - 1]
    await laptop.end()


@on_a_loop
async def test_who_names_what_was_released_is_refused_and_holds_up_nobody() -> None:
    laptop = Laptop()
    hosts = laptop.attach()
    procs = laptop.spawn_procs(hosts)
    stop(laptop, procs)
    release(laptop, procs)
    await laptop.settle(until=lambda: laptop.of(Done))
    late = laptop.spawn_actors(procs)
    call = Call(call=2, target=MeshRef(object=procs), endpoint="step", adverb="call")
    laptop.send(call, b"arguments", stream=procs)
    await laptop.settle(until=lambda: laptop.of(ObjectFailed) and laptop.of(Failed))
    assert (laptop.of(ObjectFailed)[0].object, laptop.of(Failed)[0].call) == (late, 2)
    assert "was released" in laptop.of(Failed)[0].failure.message
    release(laptop, late)
    await laptop.turns()
    assert kept(laptop) == [hosts]
    await laptop.end()
