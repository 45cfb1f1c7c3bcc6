from __future__ import annotations

from meshgate.session.objects import ObjectTable
from meshgate_wire.messages import Failure

FAILURE = Failure(kind="supervision", message="no memory")


def family() -> tuple[ObjectTable, int, int, int]:
    """A table with hosts, processes on them, and actors in these."""
    objects = ObjectTable()
    hosts = objects.create("hosts", "workers", "attach")
    procs = objects.create("procs", "trainers", "spawn_procs", (hosts.number,))
    actors = objects.create("actors", "counters", "spawn", (procs.number,))
    return objects, hosts.number, procs.number, actors.number


def test_numbers_are_positive_and_never_reused() -> None:
    _, *numbers = family()
    assert numbers == [1, 2, 3]


def test_a_failure_affects_descendants_only() -> None:
    objects, hosts, procs, actors = family()
    assert objects.failure_of(actors) is None
    objects.fail(procs, FAILURE)
    found = objects.failure_of(actors)
    assert found is not None
    assert (found[0].number, found[1]) == (procs, FAILURE)
    assert objects.failure_of(hosts) is None


def test_the_first_failure_of_an_object_counts() -> None:
    objects, hosts, *_ = family()
    objects.fail(hosts, FAILURE)
    objects.fail(hosts, Failure(kind="internal", message="later"))
    assert objects.failure_of(hosts) == (objects.get(hosts), FAILURE)


def test_the_failure_of_the_step_itself_counts_whichever_is_reported_first() -> None:
    because_of_it = FAILURE.model_copy(update={"kind": "step", "step": "spawn_procs"})
    objects, _, procs, actors = family()
    objects.fail(procs, FAILURE)
    objects.fail(actors, because_of_it)
    assert objects.failure_of(actors) == (objects.get(procs), FAILURE)
    objects, _, procs, actors = family()
    objects.fail(actors, because_of_it)
    assert objects.failure_of(actors) == (objects.get(actors), because_of_it)


def test_what_could_not_be_created_failed_for_this_reason_although_it_was_stopped() -> None:
    objects, _, procs, actors = family()
    objects.stop(actors, "stopped by client")
    objects.fail(procs, FAILURE)
    assert objects.failure_of(actors) == (objects.get(procs), FAILURE)


def test_a_stopped_object_fails_its_descendants() -> None:
    objects, hosts, procs, actors = family()
    remote = objects.get(procs)
    assert remote is not None
    remote.stopped = "stopped by client"
    found = objects.failure_of(actors)
    assert found is not None
    assert found[1].message.endswith("procs mesh 'trainers' was stopped: stopped by client")
    assert found[1].message.startswith("actor mesh is stopped due to proc mesh shutdown: ")  # as in Monarch
    assert objects.failure_of(hosts) is None


def test_an_unreferenced_object_can_be_released_once_it_is_stopped() -> None:
    objects, hosts, procs, actors = family()
    assert not objects.unreference(actors)
    assert objects.stop(procs, "done") == [actors]
    assert objects.remove(actors)
    assert not objects.remove(actors)
    assert objects.unreference(procs)
    assert not objects.unreference(hosts)


def test_a_failed_object_can_be_released_once_it_is_unreferenced() -> None:
    objects, _, procs, actors = family()
    assert objects.stop(actors, "done") == []
    assert objects.unreference(actors)
    objects, _, procs, actors = family()
    objects.fail(procs, FAILURE)
    assert objects.unreference(actors)
    assert objects.unreference(procs)
    assert not objects.unreference(4711)


def test_unknown_and_removed_objects_have_no_failure() -> None:
    objects, hosts, *_ = family()
    objects.fail(hosts, FAILURE)
    objects.remove(hosts)
    assert objects.failure_of(hosts) is None
    assert objects.failure_of(4711) is None
    objects.fail(4711, FAILURE)


def test_an_object_derives_from_itself_and_its_ancestors() -> None:
    objects, hosts, procs, actors = family()
    assert objects.derives_from(actors, hosts)
    assert objects.derives_from(actors, actors)
    assert not objects.derives_from(hosts, actors)
    assert objects.derives_from(procs, procs)


def test_objects_made_from_all_earlier_ones_have_each_ancestor_once() -> None:
    objects = ObjectTable()
    made = [objects.create("procs", "trainers", "spawn_procs")]
    for _ in range(100):  # with repetitions the last would have 2**100 ancestors
        made.append(objects.create("actors", "counters", "spawn", [each.number for each in made]))
    assert set(made[-1].ancestors) == set(made[:-1])
    assert len(made[-1].ancestors) == 100
    assert objects.derives_from(made[-1].number, made[0].number)
    assert not objects.derives_from(made[-1].number, 4711)
    objects.fail(made[0].number, FAILURE)
    found = objects.failure_of(made[-1].number)
    assert found is not None
    assert found[0] is made[0]


def test_the_gateways_objects_have_negative_numbers() -> None:
    objects = ObjectTable()
    adopted = objects.adopt(-1, "actors", "returned")
    assert objects.get(-1) is adopted
    assert "which an endpoint returned" in adopted.step


def test_ranks_lost_by_actors_are_lost_to_their_processes_too() -> None:
    objects, hosts, procs, actors = family()
    objects.lose_ranks(actors, (1, 2), "out of memory")
    objects.lose_ranks(99, (0,), "of an object that is gone")
    assert objects.lost_ranks(actors) == objects.lost_ranks(procs) == {1: "out of memory", 2: "out of memory"}
    assert objects.lost_ranks(hosts) == {}
