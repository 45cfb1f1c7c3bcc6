"""How long the engine keeps values: for the client, its calls, and processes and messages with references to them."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from meshgate_gateway.engine.calls.kept_meshes import ReferringProcess, _size
from meshgate_gateway.engine.calls.pending_calls import Response
from meshgate_gateway.engine.failures import RequestFailed
from meshgate_gateway.engine.objects.records import KeptMesh
from meshgate_wire import Fragments
from meshgate_wire.messages import Argument, Call, Failure, MeshRef, PutValue, ReadKept, Values
from tests.gateway.engine.calls.test_kept_values import (
    DESCRIPTION,
    KEPT,
    MAKERS,
    ONE,
    TAKERS,
    Keeping,
    delivered,
)
from tests.gateway.engine.fakes import turns, until


async def test_the_bytes_of_all_values_are_counted_by_rank_without_those_that_are_lost() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    put = PutValue(call=1, target=MeshRef(object=1, region=ONE), keep=9)
    await keeping.kept._put(put, [Fragments((b"pickle",))])
    ((pending, _, _),) = keeping.started
    assert pending.on_end is not None
    pending.on_end(Response(Values(call=1), (DESCRIPTION,)))
    procs: Any = keeping.makers.procs
    assert keeping.kept.meshes.kept_bytes() == {id(procs): {0: 100, 1: 200}}
    procs.dead[1] = "killed"
    assert keeping.kept.meshes.kept_bytes() == {id(procs): {0: 100}}


async def test_released_values_are_dropped_when_no_call_is_getting_them() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    using = asyncio.create_task(keeping.use())
    await until(keeping.deliveries)
    keeping.kept.meshes.release(kept)
    await turns()
    assert not keeping.drops()
    await delivered(keeping, using)
    await until(keeping.drops)
    assert keeping.drops() == [([KEPT], False)]
    assert keeping.kept.meshes.kept_bytes() == {}


async def test_values_that_are_released_before_they_are_there_are_dropped_then() -> None:
    keeping = Keeping()
    prepared = await keeping.keep()
    kept = keeping.objects.get(KEPT)
    assert isinstance(kept, KeptMesh)
    keeping.kept.meshes.release(kept)
    await turns()
    assert not keeping.drops()
    prepared.ended(Response(Values(call=1), (DESCRIPTION, DESCRIPTION)), None)
    await until(keeping.drops)


async def test_another_holder_releases_each_value_after_the_last_message_that_names_it() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    await keeping.kept_mesh(number=9)
    argument = Argument(kind="kept", ref=MeshRef(object=9))
    using = Call(call=8, target=MeshRef(object=TAKERS), endpoint="take", adverb="call", arguments=(argument,))
    keeping_more = Call(call=7, target=MeshRef(object=MAKERS), endpoint="make", adverb="call", keep=10)
    handled: list[tuple[int, Any]] = []
    waiting = [(TAKERS, using), (9, ReadKept(call=6, target=MeshRef(object=9))), (MAKERS, keeping_more)]
    keeping.kept.meshes.holder_changed(waiting, lambda stream, callback: handled.append((stream, callback)))
    await until(keeping.drops)
    assert keeping.drops() == [([KEPT], False)]
    assert sorted(stream for stream, _ in handled) == [MAKERS, TAKERS, 9]
    await keeping.kept_mesh(number=10)
    for stream, callback in sorted(handled, key=lambda each: each[0]):
        assert (keeping.objects.get(9) is None, keeping.objects.get(10) is None) == (False, stream > MAKERS)
        callback()
    await until(lambda: len(keeping.drops()) > 1)
    assert keeping.drops()[1:] == [([10, 9], False)]
    assert keeping.objects.get(9) is None


async def test_another_holder_releases_nothing_of_a_call_that_has_failed() -> None:
    keeping = Keeping()
    handled: list[Any] = []
    header = Call(call=7, target=MeshRef(object=MAKERS), endpoint="make", adverb="call", keep=10)
    keeping.kept.meshes.holder_changed([(MAKERS, header)], lambda stream, callback: handled.append(callback))
    keeping.objects.add(10, Failure(kind="invalid", message="no"))
    for callback in handled:
        callback()
    assert keeping.objects.failure(10) is not None
    assert not keeping.drops()


async def test_a_reply_without_a_description_kept_nothing() -> None:
    keeping = Keeping()
    prepared = await keeping.keep()
    prepared.ended(Response(Values(call=1), (DESCRIPTION, pickle.dumps(4))), None)
    with pytest.raises(RequestFailed, match="kept nothing"):
        await keeping.use()
    await until(keeping.drops)
    assert keeping.drops() == [([KEPT], True)]  # what the other rank has kept
    assert keeping.kept.meshes.kept_bytes() == {}
    assert _size(b"\x80\x04cos\nsystem\n.") is None  # nothing that a process sends is imported here


async def test_values_stay_until_the_calls_that_have_references_to_them_have_ended() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    prepared = [await keeping.use(reference=True) for _ in range(2)]
    keeping.objects.release(KEPT)
    keeping.kept.meshes.release(kept)
    await turns()
    assert not keeping.drops()
    for each in prepared:
        fetching = asyncio.create_task(keeping.kept.fetch(2, 0, KEPT, 1))
        before = len(keeping.deliveries())
        await until(lambda before=before: len(keeping.deliveries()) > before)
        keeping.monarch.ports[-1].put(b"done", 0)
        assert (await fetching)[:1] == b"+"
        each.ended(None, None)
    await until(keeping.drops)
    assert await keeping.kept.fetch(2, 0, KEPT, 1) == (
        b"-it was released, with release() or while nothing but a message on its way had a reference to it. Keep the "
        b"kept mesh, or the reference, until the actor that takes it has it"
    )


async def test_a_mesh_whose_call_fails_after_its_release_is_forgotten_with_its_last_use() -> None:
    keeping = Keeping()
    making = await keeping.keep()
    kept = keeping.objects.get(KEPT)
    assert isinstance(kept, KeptMesh)
    using = asyncio.create_task(keeping.use(reference=True))
    await until(lambda: kept.uses)
    keeping.objects.release(KEPT)
    keeping.kept.meshes.release(kept)
    making.ended(Response(Values(call=1), (b"no description", b"no description")), None)
    with pytest.raises(RequestFailed, match="kept nothing"):
        await using
    assert not keeping.kept.meshes._leaving


def process(keeping: Keeping, mesh: int = 2, rank: int = 0) -> tuple[ReferringProcess, list[bytes]]:
    """A process that has references, and what the engine says to it."""
    heard: list[bytes] = []
    return keeping.kept.meshes.holders.connected(mesh, rank, heard.append), heard


async def test_values_stay_while_a_process_has_a_reference_to_them() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    (first, heard), (second, _) = process(keeping), process(keeping, rank=1)
    prepared = await keeping.use(reference=True)
    keeping.objects.release(KEPT)
    keeping.kept.meshes.release(kept)
    first.received(b"+%d\n" % KEPT)
    second.received(b"+%d\n" % KEPT)
    assert heard == [b"+\n"]
    prepared.ended(None, None)
    await turns()
    assert not keeping.drops()
    assert keeping.kept.meshes.kept_bytes() == {id(keeping.makers.procs): {0: 100, 1: 100}}
    await delivered_to_reference(keeping)
    first.received(b"-%d\n" % KEPT)
    await turns()
    assert not keeping.drops()
    second.end()
    await until(keeping.drops)
    first.received(b"+%d\n" % KEPT)  # too late
    assert heard == [b"+\n", b"+\n"]
    first.end()
    await turns()
    assert keeping.drops() == [([KEPT], False)]
    assert (kept.holders, keeping.kept.meshes._leaving, keeping.kept.meshes.holders.processes) == (0, {}, {})


async def delivered_to_reference(keeping: Keeping) -> None:
    fetching = asyncio.create_task(keeping.kept.fetch(2, 0, KEPT, 1))
    before = len(keeping.deliveries())
    await until(lambda: len(keeping.deliveries()) > before)
    keeping.monarch.ports[-1].put(b"done", 0)
    assert (await fetching)[:1] == b"+"


async def test_what_is_released_at_once_is_dropped_although_processes_refer_to_it() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    holder, _ = process(keeping)
    holder.received(b"+%d\n" % KEPT)
    keeping.objects.release(KEPT)
    keeping.kept.meshes.release(kept, at_once=True)
    await until(keeping.drops)
    holder.received(b"-%d\n" % KEPT)
    await turns()
    assert keeping.drops() == [([KEPT], False)]


async def test_a_process_learns_that_what_it_has_passed_on_has_arrived() -> None:
    keeping = Keeping()
    (sender, heard), (receiver, _) = process(keeping), process(keeping, rank=1)
    receiver.received(b"=2 0 7\n")
    assert heard == [b"7\n"]
    sender.end()
    receiver.received(b"=2 0 8\n")
    assert heard == [b"7\n"]


async def test_values_stay_until_a_message_without_an_answer_has_arrived_everywhere() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    prepared = await keeping.use(adverb="broadcast", reference=True)
    ((*_, passed),) = prepared.objects
    keeping.objects.release(KEPT)
    keeping.kept.meshes.release(kept)
    receiver, _ = process(keeping)
    receiver.received(b"=%d %d %d\n" % passed)
    await turns()
    assert not keeping.drops()
    receiver.received(b"=%d %d %d\n" % passed)
    await until(keeping.drops)
    receiver.received(b"=%d %d %d\n" % passed)
    assert (kept.holders, keeping.kept.meshes.holders.casts) == (0, {})


async def test_a_message_that_is_not_sent_or_whose_actors_end_keeps_no_values() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    prepared = await keeping.use(adverb="broadcast", reference=True)
    assert kept.holders == 1
    prepared.ended(None, None)
    assert kept.holders == 0
    ref = Argument(kind="kept", ref=MeshRef(object=KEPT), reference=True)
    for dead in ({}, {1: "killed"}):
        keeping.takers.dead.update(dead)
        found = await keeping.lookup.arguments((ref,))
        await keeping.kept.deliver_cast(keeping.takers, "take", MeshRef(object=TAKERS), found, None)
        assert kept.holders == 1 + len(dead)
        keeping.kept.actors_ended(keeping.takers)
    assert kept.holders == 2
    keeping.takers.dead[0] = "killed"
    keeping.kept.actors_ended(keeping.takers)
    assert kept.holders == 0
    found = await keeping.lookup.arguments((ref,))
    await keeping.kept.deliver_cast(keeping.takers, "take", MeshRef(object=TAKERS), found, 0)
    assert kept.holders == 0


async def test_values_stay_while_what_is_put_refers_to_them() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    ref = Argument(kind="kept", ref=MeshRef(object=KEPT), reference=True)
    put = PutValue(call=1, target=MeshRef(object=TAKERS), keep=9, arguments=(ref,))
    await keeping.kept._put(put, [Fragments((b"pickle",))])
    assert kept.uses == 1
    ((pending, _, _),) = keeping.started
    assert pending.on_end is not None
    pending.on_end(Response(Values(call=1), (DESCRIPTION, DESCRIPTION)))
    assert kept.uses == 0
    with pytest.raises(RequestFailed, match="already exists"):
        await keeping.kept._put(put, [Fragments((b"pickle",))])
    assert kept.uses == 0
