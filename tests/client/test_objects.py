from __future__ import annotations

from meshgate.objects import Objects
from meshgate_wire.messages import Failure, Host

FAILURE = Failure(kind="supervision", message="no memory")


def family() -> tuple[Objects, int, int, int]:
    """Hosts, processes on them, actors in these."""
    objects = Objects()
    hosts = objects.create("hosts", "workers", "attach")
    procs = objects.create("procs", "trainers", "spawn_procs", (hosts.number,))
    actors = objects.create("actors", "counters", "spawn", (procs.number,))
    return objects, hosts.number, procs.number, actors.number


def test_numbers_are_positive_and_never_repeat() -> None:
    _, *numbers = family()
    assert numbers == [1, 2, 3]


def test_trouble_is_found_where_it_is() -> None:
    objects, hosts, procs, actors = family()
    assert objects.trouble(actors) is None
    objects.failed(procs, FAILURE)
    found = objects.trouble(actors)
    assert found is not None
    assert (found[0].number, found[1]) == (procs, FAILURE)
    assert objects.trouble(hosts) is None


def test_the_first_failure_of_an_object_counts() -> None:
    objects, hosts, *_ = family()
    objects.failed(hosts, FAILURE)
    objects.failed(hosts, Failure(kind="internal", message="later"))
    assert objects.trouble(hosts) == (objects.get(hosts), FAILURE)


def test_what_was_stopped_is_in_trouble_for_all_that_stands_on_it() -> None:
    objects, hosts, procs, actors = family()
    known = objects.get(procs)
    assert known is not None
    known.stopped = "stopped by client"
    found = objects.trouble(actors)
    assert found is not None
    assert found[1].message == "procs mesh 'trainers' was stopped: stopped by client"
    assert objects.trouble(hosts) is None


def test_what_works_is_kept_though_nobody_holds_it_and_goes_when_it_is_stopped() -> None:
    objects, hosts, procs, actors = family()
    assert not objects.drop(actors)
    assert objects.stop(procs, "done") == [actors]
    assert objects.release(actors)
    assert not objects.release(actors)
    assert objects.drop(procs)
    assert not objects.drop(hosts)


def test_what_was_stopped_or_failed_or_stands_on_that_goes_when_it_is_dropped() -> None:
    objects, _, procs, actors = family()
    assert objects.stop(actors, "done") == []
    assert objects.drop(actors)
    objects, _, procs, actors = family()
    objects.failed(procs, FAILURE)
    assert objects.drop(actors)
    assert objects.drop(procs)
    assert not objects.drop(4711)


def test_unknown_and_released_objects_are_in_no_trouble() -> None:
    objects, hosts, *_ = family()
    objects.failed(hosts, FAILURE)
    objects.release(hosts)
    assert objects.trouble(hosts) is None
    assert objects.trouble(4711) is None
    objects.failed(4711, FAILURE)
    assert objects.hosts_of(4711) == ()


def test_what_stands_on_what() -> None:
    objects, hosts, procs, actors = family()
    assert objects.stands_on(actors, hosts)
    assert objects.stands_on(actors, actors)
    assert not objects.stands_on(hosts, actors)
    assert objects.named("counters") == [actors]
    assert objects.stands_on(procs, procs)


def test_hosts_are_known_to_all_that_stands_on_them() -> None:
    objects, hosts, _, actors = family()
    assert objects.hosts_of(actors) == ()
    known = objects.get(hosts)
    assert known is not None
    known.hosts = (Host(name="workers-0"),)
    assert objects.hosts_of(actors) == (Host(name="workers-0"),)


def test_the_gateways_objects_have_negative_numbers() -> None:
    objects = Objects()
    adopted = objects.adopt(-1, "actors", "given")
    assert objects.get(-1) is adopted
    assert "which an endpoint returned" in adopted.step
