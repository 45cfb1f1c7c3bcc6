from __future__ import annotations

import asyncio

import pytest

from meshgate_gateway.engine.failures import RequestFailed
from meshgate_gateway.engine.objects import table
from meshgate_gateway.engine.objects.records import Channel
from meshgate_gateway.engine.objects.regions import hosts_region, rank_region
from meshgate_gateway.engine.objects.table import Lookup, ObjectTable
from meshgate_wire import Fragments
from meshgate_wire.messages import Argument, Failure, Host, MeshRef, Region
from tests.gateway.engine.fakes import FakeMonarch, actor_mesh, host_mesh, proc_mesh, turns

BROKEN = Failure(kind="supervision", message="out of memory", step="spawn_procs({}, name='p')", mesh="p")
HOSTS, PROCS, ACTORS, PORT = 1, 2, 3, 4


async def test_a_request_waits_for_an_object_that_is_not_created_yet() -> None:
    objects, channel = ObjectTable(), Channel("port")
    waiting = [asyncio.ensure_future(objects.wait(7)) for _ in range(2)]
    await turns()
    assert objects.require(7) is None
    objects.add(7, channel)
    assert await asyncio.gather(*waiting) == [channel, channel]


def test_the_failure_of_an_object_is_kept_as_it_was_reported() -> None:
    objects = ObjectTable()
    objects.add(7, BROKEN)
    objects.add(8, Channel("port"))
    assert [objects.failure(number) for number in (7, 8, 9)] == [BROKEN, None, None]


async def test_a_waiter_that_is_cancelled_leaves_the_others_waiting() -> None:
    objects, channel = ObjectTable(), Channel("port")
    gone, waiting = asyncio.ensure_future(objects.wait(7)), asyncio.ensure_future(objects.wait(7))
    await turns()
    gone.cancel()
    await turns()
    objects.add(7, channel)
    assert await waiting is channel


async def test_what_waits_for_an_object_that_fails_gets_that_step_as_the_cause() -> None:
    objects = ObjectTable()
    waiting = asyncio.ensure_future(objects.wait(7))
    await turns()
    objects.add(7, BROKEN)
    with pytest.raises(RequestFailed) as caught:
        await waiting
    failure = caught.value.failure
    assert (failure.kind, failure.step, failure.message) == ("step", BROKEN.step, "out of memory")


def test_the_cause_of_a_cause_stays_the_first_failed_step() -> None:
    objects = ObjectTable()
    objects.add(1, BROKEN)
    with pytest.raises(RequestFailed) as first:
        objects.require(1)
    objects.add(2, first.value.failure)
    with pytest.raises(RequestFailed) as second:
        objects.require(2)
    assert second.value.failure == first.value.failure


def test_a_failure_replaces_an_object_and_hides_it() -> None:
    objects = ObjectTable()
    objects.add(1, Channel("port"))
    objects.add(1, BROKEN)
    assert objects.get(1) is None
    assert objects.values() == []
    assert objects.items() == []


async def test_a_request_that_waits_for_a_released_object_fails() -> None:
    objects = ObjectTable()
    waiting = asyncio.ensure_future(objects.wait(7))
    await turns()
    objects.release(7)
    with pytest.raises(RequestFailed, match="object 7 was released while a message still refers to it"):
        await waiting


async def test_what_waits_for_an_object_gets_it_although_a_release_follows_at_once() -> None:
    """The program dropped its proxies: the releases queue behind the creation, and are handled in the same turn."""
    objects, channel = ObjectTable(), Channel("port")
    made, failed = (asyncio.ensure_future(objects.wait(number)) for number in (7, 8))
    await turns()
    objects.add(7, channel)
    objects.add(8, BROKEN)
    for number in (7, 8):
        objects.release(number)
    assert await made is channel
    with pytest.raises(RequestFailed, match="out of memory"):
        await failed


def test_a_number_is_defined_once() -> None:
    objects = ObjectTable()
    objects.add(1, Channel("port"))
    with pytest.raises(RequestFailed, match="object 1 already exists"):
        objects.add(1, Channel("port"))
    objects.release(1)
    with pytest.raises(RequestFailed, match="object 1 already exists"):
        objects.add(1, Channel("port"))


def test_the_late_failure_of_a_released_object_is_ignored() -> None:
    objects = ObjectTable()
    objects.add(1, Channel("port"))
    objects.release(1)
    objects.add(1, BROKEN)
    with pytest.raises(RequestFailed, match="object 1 was released"):
        objects.require(1)


def test_only_the_latest_released_numbers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_RELEASED", 2)
    objects = ObjectTable()
    for number in (1, 2, 3):
        objects.release(number)
    assert objects.require(1) is None
    with pytest.raises(RequestFailed):
        objects.require(2)


def test_references_from_workers_get_negative_numbers_until_they_are_released() -> None:
    objects = ObjectTable()
    first, second = objects.add_reference("mesh a"), objects.add_reference("mesh b")
    assert (first, second) == (-1, -2)
    assert objects.reference(-2) == "mesh b"
    objects.release(-2)
    with pytest.raises(RequestFailed, match="object -2 did not arrive from a worker, or was released"):
        objects.reference(-2)


class Known:
    """One object of each kind."""

    def __init__(self) -> None:
        self.monarch, self.objects = FakeMonarch(), ObjectTable()
        self.lookup = Lookup(self.objects, self.monarch)
        self.hosts = host_mesh()
        self.procs = proc_mesh(self.hosts)
        self.actors = actor_mesh(self.procs)
        for number, made in ((HOSTS, self.hosts), (PROCS, self.procs), (ACTORS, self.actors), (PORT, Channel("port"))):
            self.objects.add(number, made)


async def test_a_reference_without_a_region_is_the_whole_mesh() -> None:
    known = Known()
    assert await known.lookup.hosts(MeshRef(object=HOSTS)) == (known.hosts, known.hosts.mesh)
    assert await known.lookup.procs(MeshRef(object=PROCS, region=known.procs.region)) == (
        known.procs,
        known.procs.mesh,
    )
    assert known.lookup.actors(known.actors, MeshRef(object=ACTORS)) == (known.actors, known.actors.actors, [0, 1])


async def test_a_slice_is_made_once() -> None:
    known = Known()
    second = hosts_region(1, 1)
    _, mesh = await known.lookup.procs(MeshRef(object=PROCS, region=second))
    assert mesh.region == second
    assert (await known.lookup.procs(MeshRef(object=PROCS, region=second)))[1] is mesh
    _, actors, ranks = known.lookup.actors(known.actors, MeshRef(object=ACTORS, region=second))
    assert (actors.region, ranks) == (second, [1])
    assert known.lookup.actors(known.actors, MeshRef(object=ACTORS, region=second))[1] is actors


async def test_a_reference_of_another_kind_or_out_of_bounds_is_rejected() -> None:
    known = Known()
    with pytest.raises(RequestFailed, match="object 2 is not a host mesh"):
        await known.lookup.hosts(MeshRef(object=PROCS))
    with pytest.raises(RequestFailed, match="object 1 is not a proc mesh"):
        await known.lookup.procs(MeshRef(object=HOSTS))
    with pytest.raises(RequestFailed, match="object 1 is not an actor mesh"):
        known.lookup.actors(known.hosts, MeshRef(object=HOSTS))
    with pytest.raises(RequestFailed, match="object 1 is not a port"):
        await known.lookup.channel(HOSTS)
    with pytest.raises(RequestFailed, match="is not part of mesh 'procs'"):
        await known.lookup.procs(MeshRef(object=PROCS, region=hosts_region(3)))


async def test_hosts_that_were_stopped_are_attached_to_again_and_their_slices_made_again() -> None:
    known = Known()
    first = hosts_region(1)
    _, before = await known.lookup.hosts(MeshRef(object=HOSTS, region=first))
    known.hosts.must_attach = True
    _, after = await known.lookup.hosts(MeshRef(object=HOSTS, region=first))
    await known.lookup.hosts(MeshRef(object=HOSTS))
    assert before is not after
    assert known.monarch.attached == [("workers", ["tcp://10.0.0.0:1", "tcp://10.0.0.1:1"])]


async def test_parts_of_a_mesh_that_has_a_lost_host_are_attached_to_by_themselves() -> None:
    objects, monarch, hosts = ObjectTable(), FakeMonarch(), host_mesh(4)
    lookup = Lookup(objects, monarch)
    objects.add(HOSTS, hosts)
    hosts.must_attach = True
    hosts.host_lost("workers-1", "OOMKilled", returns=True)
    every_other = Region(labels=("hosts",), offset=0, sizes=(2,), strides=(2,))
    _, part = await lookup.hosts(MeshRef(object=HOSTS, region=every_other))
    assert part.region == hosts_region(2)
    assert (await lookup.hosts(MeshRef(object=HOSTS, region=every_other)))[1] is part
    assert (await lookup.hosts(MeshRef(object=HOSTS, region=rank_region(3))))[1].region == rank_region(0)
    for region in (None, hosts.region, hosts_region(2), rank_region(1)):
        with pytest.raises(RequestFailed, match=r"mesh 'workers' has lost hosts \(workers-1: OOMKilled\)"):
            await lookup.hosts(MeshRef(object=HOSTS, region=region))
    with pytest.raises(RequestFailed, match="is not part of mesh 'workers'"):
        await lookup.hosts(MeshRef(object=HOSTS, region=hosts_region(5)))
    attached = [[int(address[-3]) for address in addresses] for _, addresses in monarch.attached]
    assert attached == [[0, 2, 3], [0, 2], [3]]
    hosts.host_restarted(1, Host(name="workers-1", address="tcp://10.0.0.9:1"), same_address=False)
    _, whole = await lookup.hosts(MeshRef(object=HOSTS))
    assert (await lookup.hosts(MeshRef(object=HOSTS, region=every_other)))[1].region == every_other
    assert (whole, len(monarch.attached[-1][1]), len(monarch.attached)) == (hosts.mesh, 4, 4)


async def test_a_mesh_that_has_lost_all_hosts_cannot_be_attached_to() -> None:
    hosts, monarch = host_mesh(1), FakeMonarch()
    hosts.must_attach = True
    hosts.host_lost("workers-0", "OOMKilled", returns=False)
    with pytest.raises(RequestFailed, match="workers-0: OOMKilled"):
        Lookup(ObjectTable(), monarch).attached(hosts)
    assert not monarch.attached


async def test_arguments_become_monarchs_own_objects() -> None:
    known = Known()
    kinds = (("hosts", HOSTS), ("procs", PROCS), ("port", PORT), ("actors", ACTORS))
    arguments = [Argument(kind=kind, ref=MeshRef(object=number)) for kind, number in kinds]  # type: ignore[arg-type]
    assert await known.lookup.arguments(arguments) == [
        known.hosts.mesh,
        known.procs.mesh,
        ("port", "port"),
        ("actors", known.actors.actors),
    ]


async def test_actors_that_could_not_be_spawned_fail_what_they_are_an_argument_of_with_the_reason() -> None:
    known = Known()
    known.actors.unique_name = ""
    known.actors.actors.ready = ready = asyncio.get_running_loop().create_future()
    known.actors.up = up = asyncio.get_running_loop().create_future()
    passing = asyncio.ensure_future(known.lookup.arguments([Argument(kind="actors", ref=MeshRef(object=ACTORS))]))
    await turns()
    ready.set_exception(RuntimeError("Cannot spawn new actors on mesh with supervision events"))
    await turns()
    known.actors.failed = Failure(kind="supervision", message="no such model", step="spawn('actors', a.Actor)")
    up.set_result(None)
    with pytest.raises(RequestFailed, match="no such model") as caught:
        await passing
    assert caught.value.failure.kind == "step"


def test_a_message_without_a_pickle_is_rejected() -> None:
    known = Known()
    with pytest.raises(RequestFailed, match="the message has no pickled arguments"):
        known.lookup.payload([], [])
    assert known.lookup.payload([Fragments((b"pick", b"le"))], []) == b"pickle"


def test_output_is_labelled_with_the_only_actor_mesh_of_a_process_or_else_its_proc_mesh() -> None:
    known = Known()
    assert known.lookup.label(PROCS, 1) == ("actors", "workers-1")
    known.objects.add(5, actor_mesh(known.procs, "others"))
    assert known.lookup.label(PROCS, 1) == ("procs", "workers-1")
    assert known.lookup.label(99, 0) == ("", "")
