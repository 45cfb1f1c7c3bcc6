"""Meshes that actors make, and what becomes of them in the program."""

from __future__ import annotations

from tests.conformance.actors import Owner, Supervisor
from tests.conformance.cases import Kit


def a_mesh_that_an_actor_spawned_is_returned(kit: Kit) -> None:
    inner = kit.one(Owner).spawn_here.call_one().get()
    assert inner.add.call_one(1).get() == 6


def an_actor_spawns_on_the_programs_procs(kit: Kit) -> None:
    procs = kit.procs()
    made = kit.one(Owner).spawn_on.call_one(procs).get()
    assert [value for _, value in made.add.call(1).get().items()] == [10] * 4


def an_actor_spawns_processes_on_its_host(kit: Kit) -> None:
    assert kit.one(Owner).spawn_procs_here.call_one().get() == 1


def a_returned_mesh_fails_with_its_process(kit: Kit) -> None:
    owner = kit.one(Owner)
    inner = owner.spawn_here.call_one().get()
    assert inner.add.call_one(1).get() == 6
    try:
        inner.leave.call_one().get(timeout=60)
    except TimeoutError as error:
        raise AssertionError("the call was never answered") from error
    except Exception as error:  # noqa: BLE001 - which one it is is the assertion
        assert "SupervisionError" in {kind.__name__ for kind in type(error).__mro__}, repr(error)


def a_mesh_is_sent_through_a_port(kit: Kit) -> None:
    port, receiver = kit.api.Channel.open()
    kit.one(Owner).send_spawned.call_one(port).get()
    assert receiver.recv().get().add.call_one(1).get() == 8


def a_returned_mesh_is_passed_to_another_actor(kit: Kit) -> None:
    inner = kit.one(Owner).spawn_here.call_one().get()
    assert kit.one(Owner).call.call_one(inner, "through").get() == ["through"]


def several_meshes_are_returned_at_once(kit: Kit) -> None:
    first, second = kit.one(Owner).spawn_two.call_one().get()
    assert (first.add.call_one(1).get(), second.add.call_one(1).get()) == (2, 3)


def an_actor_owns_processes_of_its_own(kit: Kit) -> None:
    owner = kit.one(Owner)
    workers = owner.spawn_workers.call_one(2).get()
    assert [value for _, value in workers.rank.call().get().items()] == [0, 1]
    assert owner.pid.call_one().get() not in [pid for _, pid in workers.pid.call().get().items()]


def an_actor_supervises_the_actors_that_it_spawned(kit: Kit) -> None:
    supervisor = kit.one(Supervisor)
    assert supervisor.lose_a_worker.call_one().get(timeout=60) >= 1
    assert supervisor.alive.call_one().get(timeout=60)
