from __future__ import annotations

from meshgate_gateway.engine.detached.creations import MAX_GAP, CallNumbers, Creations
from meshgate_wire.messages import AttachHosts, MeshRef, OpenChannel, SpawnProcs, Stop


def procs(number: int, name: str = "procs") -> SpawnProcs:
    return SpawnProcs(object=number, hosts=MeshRef(object=1), per_host={}, name=name)


def test_creations_come_parents_first_and_then_what_was_stopped() -> None:
    creations = Creations()
    for header in (procs(2), AttachHosts(object=1, mesh="workers"), OpenChannel(object=3)):
        creations.add(header)
    stop = Stop(call=1, target=MeshRef(object=2))
    creations.stopped(stop)
    assert [getattr(each, "object", each) for each in creations] == [1, 2, 3, stop]
    assert creations.highest == 3
    assert creations.names(SpawnProcs) == []


def test_hosts_that_are_stopped_stay_usable_unless_they_are_shut_down() -> None:
    creations = Creations()
    creations.add(AttachHosts(object=1, mesh="workers"))
    creations.stopped(Stop(call=1, target=MeshRef(object=1)))
    assert len([*creations]) == 1
    creations.stopped(Stop(call=1, target=MeshRef(object=1), shutdown=True))
    assert len([*creations]) == 2


def test_a_channel_is_forgotten_when_it_is_released_and_a_mesh_is_not() -> None:
    creations = Creations()
    for header in (procs(2), OpenChannel(object=3)):
        creations.add(header)
    for number in (2, 3, 4):
        creations.released(number)
    assert [each.object for each in creations] == [2]  # type: ignore[union-attr]


def test_numbers_of_calls_that_are_missing_were_lost() -> None:
    numbers = CallNumbers()
    numbers.start(10)
    for number in (11, 14, 12, 5):
        numbers.add(number)
    assert (numbers.missing, numbers.highest) == (1, 14)
    numbers.add(14 + 2 * MAX_GAP)  # takes no memory for what is missing
    assert numbers.missing == 2 * MAX_GAP
    numbers.start(numbers.highest)
    assert numbers.highest == 14 + 2 * MAX_GAP
