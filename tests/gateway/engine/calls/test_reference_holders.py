"""Which values the engine keeps for processes and messages with references to them."""

from __future__ import annotations

import asyncio

import pytest

from meshgate_gateway.engine.calls.pending_calls import Response
from meshgate_gateway.engine.calls.reference_holders import ReferringProcess
from meshgate_gateway.engine.failures import RequestFailed
from meshgate_wire import Fragments
from meshgate_wire.messages import Argument, MeshRef, PutValue, Values
from tests.gateway.engine.calls.test_kept_values import DESCRIPTION, KEPT, TAKERS, Keeping
from tests.gateway.engine.fakes import async_test, turns, until


def process(keeping: Keeping, mesh: int = 2, rank: int = 0) -> tuple[ReferringProcess, list[bytes]]:
    """A process that has references, and what the engine says to it."""
    heard: list[bytes] = []
    return keeping.kept.holders.connected(mesh, rank, heard.append), heard


@async_test
async def test_values_stay_while_a_process_has_a_reference_to_them() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    (first, heard), (second, _) = process(keeping), process(keeping, rank=1)
    prepared = await keeping.use(reference=True)
    keeping.objects.release(KEPT)
    keeping.kept.release(kept)
    first.received(b"+%d\n" % KEPT)
    second.received(b"+%d\n" % KEPT)
    assert heard == [b"+\n"]
    prepared.ended(None, None)
    await turns()
    assert not keeping.drops()
    assert keeping.kept.kept_bytes() == {id(keeping.makers.procs): {0: 100, 1: 100}}
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
    assert (kept.holders, keeping.kept._leaving, keeping.kept.holders.processes) == (0, {}, {})


async def delivered_to_reference(keeping: Keeping) -> None:
    fetching = asyncio.create_task(keeping.kept.fetch(2, 0, KEPT, 1))
    before = len(keeping.deliveries())
    await until(lambda: len(keeping.deliveries()) > before)
    keeping.monarch.ports[-1].put(b"done", 0)
    assert (await fetching)[:1] == b"+"


@async_test
async def test_what_is_released_at_once_is_dropped_although_processes_refer_to_it() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    holder, _ = process(keeping)
    holder.received(b"+%d\n" % KEPT)
    keeping.objects.release(KEPT)
    keeping.kept.release(kept, at_once=True)
    await until(keeping.drops)
    holder.received(b"-%d\n" % KEPT)
    await turns()
    assert keeping.drops() == [([KEPT], False)]


@async_test
async def test_a_process_learns_that_what_it_has_passed_on_has_arrived() -> None:
    keeping = Keeping()
    (sender, heard), (receiver, _) = process(keeping), process(keeping, rank=1)
    receiver.received(b"=2 0 7\n")
    assert heard == [b"7\n"]
    sender.end()
    receiver.received(b"=2 0 8\n")
    assert heard == [b"7\n"]


@async_test
async def test_values_stay_until_a_message_without_an_answer_has_arrived_everywhere() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    prepared = await keeping.use(adverb="broadcast", reference=True)
    ((*_, passed),) = prepared.objects
    keeping.objects.release(KEPT)
    keeping.kept.release(kept)
    receiver, _ = process(keeping)
    receiver.received(b"=%d %d %d\n" % passed)
    await turns()
    assert not keeping.drops()
    receiver.received(b"=%d %d %d\n" % passed)
    await until(keeping.drops)
    receiver.received(b"=%d %d %d\n" % passed)
    assert (kept.holders, keeping.kept.holders.casts) == (0, {})


@async_test
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


@async_test
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
