"""Slices and shapes of meshes, and of the values they return."""

from __future__ import annotations

from tests.conformance.cases import Kit, raises


def meshes_have_extents_and_sizes(kit: Kit) -> None:
    workers = kit.spawn()
    assert dict(workers.sizes) == {"hosts": 2, "gpus": 2}
    assert workers.size() == 4
    assert workers.size("gpus") == 2
    assert len(workers) == 4
    assert dict(kit.hosts.sizes) == {"hosts": 2}


def a_slice_calls_its_ranks_only(kit: Kit) -> None:
    workers = kit.spawn()
    workers.slice(gpus=1).note.call(7).get()
    assert [value for _, value in workers.noted.call().get().items()] == [[], [7], [], [7]]


def ranks_of_a_call_are_those_of_its_slice(kit: Kit) -> None:
    values = kit.spawn().slice(gpus=1).rank.call().get()
    assert [value for _, value in values.items()] == [0, 1]
    assert dict(values.sizes) == {"hosts": 2}


def slices_of_slices(kit: Kit) -> None:
    workers = kit.spawn(per_host=4)
    workers.slice(gpus=slice(1, 4)).slice(gpus=slice(0, 3, 2)).note.call(1).get()
    noted = [value for _, value in workers.noted.call().get().items()]
    assert noted == [[], [1], [], [1], [], [1], [], [1]]


def a_slice_out_of_range_is_refused(kit: Kit) -> None:
    workers = kit.spawn()
    raises(IndexError, lambda: workers.slice(gpus=7))
    raises((KeyError, TypeError), lambda: workers.slice(rows=0))


def split_rename_and_flatten(kit: Kit) -> None:
    workers = kit.spawn(per_host=4)
    split = workers.split(gpus=("rows", "columns"), rows=2)
    assert dict(split.sizes) == {"hosts": 2, "rows": 2, "columns": 2}
    assert dict(workers.rename(gpus="ranks").sizes) == {"hosts": 2, "ranks": 4}
    assert dict(workers.flatten("ranks").sizes) == {"ranks": 8}
    split.slice(hosts=1, rows=1, columns=0).note.call_one(3).get()
    assert workers.flatten("ranks").slice(ranks=6).noted.call_one().get() == [3]


def value_meshes_are_indexed_by_point(kit: Kit) -> None:
    values = kit.spawn().rank.call().get()
    assert values.item(hosts=1, gpus=1) == 3
    assert list(values.values()) == [0, 1, 2, 3]
    points = [point for point, _ in values.items()]
    assert [point.rank for point in points] == [0, 1, 2, 3]
    assert dict(points[2]) == {"hosts": 1, "gpus": 0}
    assert points[1]["gpus"] == 1
    assert dict(values.slice(hosts=1).sizes) == {"gpus": 2}
    assert dict(values.extent) == {"hosts": 2, "gpus": 2}


def value_meshes_are_monarchs(kit: Kit) -> None:
    import monarch.actor

    values = kit.spawn().rank.call().get()
    assert isinstance(values, monarch.actor.ValueMesh)


def meshes_are_monarchs(kit: Kit) -> None:
    import monarch.actor

    assert isinstance(kit.hosts, monarch.actor.HostMesh)
    assert isinstance(kit.procs(), monarch.actor.ProcMesh)


def points_equal_monarchs(kit: Kit) -> None:
    import monarch.actor

    point = next(iter(kit.spawn().rank.call().get().items()))[0]
    assert point == monarch.actor.Point(0, monarch.actor.Extent(["hosts", "gpus"], [2, 2]))
