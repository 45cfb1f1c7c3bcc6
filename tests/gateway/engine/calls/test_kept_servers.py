"""The actors that serve kept values: when there are some, what they drop and forget, and what their deaths end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshgate_gateway.engine.failures import RequestFailed
from meshgate_wire import Fragments
from meshgate_wire.messages import Failure, MeshRef, PutValue
from tests.gateway.engine.calls.test_kept_values import (
    KEPT,
    MAKERS,
    ONE,
    TAKERS,
    Keeping,
    delivered,
    forgotten,
)
from tests.gateway.engine.fakes import actor_mesh, proc_mesh, turns, until


async def test_what_keeps_next_makes_room_of_what_was_released_and_waits_for_no_process() -> None:
    keeping = Keeping()
    dropped = asyncio.get_running_loop().create_future()

    async def drop(endpoint: str) -> None:
        if endpoint == "drop":
            await dropped

    keeping.monarch.on_engine_call = lambda endpoint, args: drop(endpoint)

    async def keep_and_put(number: int) -> list[Any]:
        """The payloads of a call that keeps and of a put."""
        prepared = await keeping.keep(number)
        assert prepared.keeping is not None
        put = PutValue(call=1, target=MeshRef(object=MAKERS), keep=number + 1)
        await keeping.kept._put(put, [Fragments((b"pickle",))])
        return [prepared.keeping("payload"), keeping.started[-1][1]]

    keeping.kept.meshes.release(await keeping.kept_mesh())
    label = "makers.make.keep()"
    assert await keep_and_put(9) == [("keep", 9, label, ("room", [KEPT], "payload")), ("room", [KEPT], b"pickle")]
    await until(keeping.drops)
    assert keeping.drops() == [([KEPT], False)]  # also if the call never arrives
    dropped.set_result(None)
    await turns()
    assert await keep_and_put(11) == [("keep", 11, label, "payload"), b"pickle"]


async def test_meshes_that_endpoints_returned_which_have_no_number_are_distinguished() -> None:
    keeping = Keeping()
    keeping.makers.procs.number = keeping.takers.procs.number = 0  # type: ignore[union-attr]
    await keeping.kept_mesh()
    using = asyncio.create_task(keeping.use())
    await until(keeping.deliveries)
    others = actor_mesh(proc_mesh(name="others"))
    keeping.dies(others, 0)
    await turns()
    assert not using.done()
    assert not keeping.failed
    keeping.dies(keeping.takers, 0)
    with pytest.raises(RequestFailed, match="killed"):
        await using
    assert [mesh.procs for mesh in keeping.failed] == [keeping.takers.procs]


async def test_processes_forget_what_the_calls_of_an_actor_that_has_ended_have_not_taken() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    keeping.kept.actors_ended(keeping.takers)
    await delivered(keeping, asyncio.create_task(keeping.use(adverb="broadcast")))
    keeping.takers.dead[1] = "raised"
    for _ in range(2):
        keeping.kept.actors_ended(keeping.takers)
    keeping.kept.actors_ended(keeping.makers)
    assert forgotten(keeping, "forget_calls_of") == [([TAKERS],)]
    keeping.takers.failed = Failure(kind="supervision", message="stopped")
    keeping.kept.actors_ended(keeping.takers)
    assert forgotten(keeping, "forget_calls_of") == [([TAKERS],)] * 2
    keeping.monarch.casts.clear()
    keeping.takers.procs.dead.update({0: "killed", 1: "killed"})  # type: ignore[union-attr]
    keeping.takers.failed = None
    keeping.kept.actors_ended(keeping.takers)
    assert not keeping.monarch.casts


async def test_processes_that_cannot_serve_values_fail_the_call() -> None:
    keeping = Keeping()
    keeping.monarch.hold = True
    starting = asyncio.create_task(keeping.keep())
    await until(lambda: keeping.monarch.meshes)
    keeping.monarch.meshes[-1].ready.set_exception(RuntimeError("no room"))  # type: ignore[union-attr]
    with pytest.raises(RequestFailed, match="cannot keep values in the processes of 'made': no room"):
        await starting
    keeping.monarch.hold = False
    await keeping.keep(9)  # the next one tries again


def silent(keeping: Keeping) -> list[str]:
    """Makes processes answer no message of the engine's. Returns those that they get."""
    asked: list[str] = []

    async def wait(endpoint: str) -> None:
        asked.append(endpoint)
        await asyncio.get_running_loop().create_future()

    keeping.monarch.on_engine_call = lambda endpoint, args: wait(endpoint)
    return asked


async def test_the_death_of_a_process_that_starts_to_serve_values_ends_the_wait_for_it() -> None:
    keeping = Keeping()
    asked = silent(keeping)
    keeping_all = asyncio.create_task(keeping.keep())
    put = PutValue(call=1, target=MeshRef(object=1, region=ONE), keep=9)
    putting_elsewhere = asyncio.ensure_future(keeping.kept._put(put, [Fragments((b"pickle",))]))
    await until(lambda: asked)
    keeping.monarch.on_engine_call = lambda endpoint, args: None
    keeping.dies(keeping.makers, 0)
    with pytest.raises(RequestFailed, match="killed") as raised:
        await keeping_all
    assert (raised.value.failure.kind, raised.value.failure.ranks) == ("supervision", (0,))
    await putting_elsewhere  # where all processes live
    ((pending, _, _),) = keeping.started
    assert pending.ranks == [1]


async def test_a_process_that_dies_as_soon_as_it_is_to_serve_values_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeping = Keeping()
    silent(keeping)
    spawn = keeping.monarch.spawn_engine_actors

    def spawn_and_die(*arguments: Any) -> Any:
        asyncio.get_running_loop().call_soon(keeping.dies, keeping.makers, 0)  # before the wait for it can begin
        return spawn(*arguments)

    monkeypatch.setattr(keeping.monarch, "spawn_engine_actors", spawn_and_die)
    with pytest.raises(RequestFailed, match="killed"):
        await keeping.keep()


async def test_a_process_that_was_only_slow_keeps_values_again() -> None:
    values = Keeping()
    kept = await values.kept_mesh()
    servers = kept.servers
    values.dies(values.makers, 1)
    assert servers.actors.dead == {1: "killed"}
    values.kept.servers.process_back(servers.procs, 1)
    assert servers.actors.dead == {}
