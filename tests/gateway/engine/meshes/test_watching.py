from __future__ import annotations

import asyncio

from meshgate_gateway.engine.meshes.watching import Watching
from meshgate_gateway.engine.objects.records import ActorMesh, ProcMesh
from meshgate_gateway.engine.objects.regions import hosts_region
from meshgate_gateway.engine.objects.table import ObjectTable
from tests.gateway.engine.fakes import FakeMesh, FakeMonarch, actor_mesh, async_test, proc_mesh, start_task, turns

ADDRESS, SECRET = "unix:/run/workers", "secret"


class Watched:
    """A session that endpoints return meshes to: three processes, of which the first has base rank 2."""

    def __init__(self, *, hold: bool = False) -> None:
        self.monarch, self.objects = FakeMonarch(hold=hold), ObjectTable()
        self.address, self.secret = ADDRESS, SECRET
        self.died: list[ActorMesh] = []
        self.watching = Watching(self.objects, self.monarch, self, start_task=start_task, ranks_died=self.died.append)

    def receive(self, number: int, name: str = "inner") -> tuple[ProcMesh, ActorMesh]:
        procs = ProcMesh(FakeMesh(name), "", hosts_region(3, offset=2), ())
        actors = actor_mesh(procs, f"actors of {number}")
        self.objects.add(number, actors)
        self.watching.watch(number, procs)
        return procs, actors

    @property
    def watchers(self) -> list[FakeMesh]:
        return [mesh for mesh in self.monarch.meshes if mesh.name == "ProcessWatcher"]


@async_test
async def test_the_end_of_a_process_fails_the_ranks_of_every_actor_mesh_on_it() -> None:
    watched = Watched()
    procs, actors = watched.receive(-1)
    await turns()
    assert not watched.watching.process_ended(-9, 0, 70)
    assert watched.watching.process_ended(-1, 1, 71)
    assert actors.dead == procs.dead == {3: "process 71 of rank 3 of a mesh that an endpoint returned ended"}
    assert watched.died == [actors]
    assert watched.watching.process_ended(-1, 1, 71)
    assert watched.died == [actors]


@async_test
async def test_processes_that_are_returned_again_are_watched_once_and_known_to_be_dead() -> None:
    watched = Watched()
    first, _ = watched.receive(-1)
    watched.watching.watch(-1, first)
    _, second = watched.receive(-3)
    watched.receive(-5, name="others")
    await turns()
    assert len(watched.watchers) == 2
    watched.watching.process_ended(-1, 0, 70)
    assert set(second.dead) == {2}
    third, _ = watched.receive(-7)
    assert set(third.dead) == {2}


@async_test
async def test_processes_that_do_not_answer_the_watchers_are_dead() -> None:
    watched = Watched(hold=True)
    _, actors = watched.receive(-1)
    await turns()
    watched.watching.connected(-1, 1)
    ready = watched.watchers[0].ready
    assert isinstance(ready, asyncio.Future)
    ready.set_exception(RuntimeError("error spawning actor mesh: Timeout(30s)=0..2"))
    await turns()
    assert set(actors.dead) == {2, 4}
    assert "does not answer: error spawning" in actors.dead[2]


@async_test
async def test_processes_that_the_session_spawned_itself_need_no_watchers() -> None:
    watched = Watched()
    watched.watching.watch(1, proc_mesh())
    await turns()
    assert watched.watchers == []


def up(watched: Watched, number: int, name: str = "owners") -> ProcMesh:
    """Four processes that the session has spawned."""
    procs = proc_mesh(name=name, gpus=2)
    procs.up = asyncio.get_running_loop().create_future()
    procs.up.set_result(None)
    watched.objects.add(number, procs)
    return procs


@async_test
async def test_processes_that_the_session_spawned_are_known_to_end_without_watchers() -> None:
    watched = Watched()
    up(watched, 1, "others")
    up(watched, 2)
    watched.monarch.processes["inner"] = ("owners-1", "owners-2", "owners-3")
    _, actors = watched.receive(-1)
    await turns()
    assert watched.watchers == []
    assert not watched.watching.process_ended(1, 2, 70)
    assert not watched.watching.process_ended(2, 0, 70)
    assert actors.dead == {}
    assert not watched.watching.process_ended(2, 2, 71)
    assert actors.dead == {3: "process 71 of rank 3 of a mesh that an endpoint returned ended"}
    assert watched.died == [actors]


@async_test
async def test_processes_of_the_session_that_are_dead_are_so_in_a_mesh_that_is_returned() -> None:
    watched = Watched()
    up(watched, 2).dead[3] = "process 73 of rank 3 on workers-1 ended"
    watched.monarch.processes["inner"] = ("owners-1", "owners-2", "owners-3")
    procs, _ = watched.receive(-1)
    assert procs.dead == {4: "process 73 of rank 3 on workers-1 ended"}


@async_test
async def test_processes_of_a_mesh_that_is_being_stopped_are_watched() -> None:
    """Monarch no longer names them."""
    watched = Watched()
    up(watched, 2).stopping = True
    watched.monarch.processes["inner"] = ("owners-1", "owners-2", "owners-3")
    watched.receive(-1)
    await turns()
    assert len(watched.watchers) == 1


@async_test
async def test_a_mesh_with_other_processes_too_is_watched() -> None:
    watched = Watched()
    up(watched, 2)
    watched.monarch.processes["inner"] = ("owners-1", "owners-2", "another")
    _, actors = watched.receive(-1)
    await turns()
    assert len(watched.watchers) == 1
    watched.watching.process_ended(2, 1, 71)
    assert set(actors.dead) == {2}
