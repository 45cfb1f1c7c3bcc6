"""Spawning processes and actors: what is in the table when, and how failures are worded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from meshgate_gateway.engine.failures import FailureReports, RequestFailed, stale_code
from meshgate_gateway.engine.meshes.spawning import SessionControllers, Spawning, answer, explain_unreachable
from meshgate_gateway.engine.monarch.interface import BootstrapFailed
from meshgate_gateway.engine.objects.records import ActorMesh, KeptMesh, ProcMesh
from meshgate_gateway.engine.objects.regions import hosts_region
from meshgate_gateway.engine.objects.table import Lookup, ObjectTable, Taker
from meshgate_wire import Fragments
from meshgate_wire.messages import (
    Argument,
    BootstrapCommand,
    Failure,
    GetControllers,
    Host,
    Launch,
    MeshRef,
    ObjectFailed,
    Region,
    SpawnActors,
    SpawnProcs,
)
from tests.gateway.engine.fakes import (
    FakeMonarch,
    Sent,
    actor_mesh,
    host_mesh,
    proc_mesh,
    start_task,
    turns,
    until,
)

HOSTS, PROCS, ACTORS = 1, 2, 3
CLASS_AND_ARGUMENTS = [Fragments((b"class",)), Fragments((b"arguments",))]


class Spawned:
    """Two attached hosts to spawn on. As ``spawning.Code`` it turns version ``v1`` into ``v2``."""

    def __init__(self) -> None:
        self.monarch, self.objects, self.sent = FakeMonarch(hold=True), ObjectTable(), Sent()
        self.hosts = host_mesh()
        self.objects.add(HOSTS, self.hosts)
        self.ended: list[int] = []
        self.up: list[ActorMesh] = []
        self.failed: list[ActorMesh] = []
        self.watched: list[tuple[int, ProcMesh]] = []
        self.reloaded: list[tuple[str, Sequence[str]]] = []
        self.delivered: list[tuple[str, str, tuple[int, ...], int, int]] = []
        self.forgotten: list[None] = []
        self.refused = False
        self.version_problems: dict[str, str] = {}
        self.spawning = Spawning(
            self.objects,
            Lookup(self.objects, self.monarch),
            self.monarch,
            self,
            start_task=start_task,
            failures=FailureReports(self.objects.add, self.sent),
            set_up_process=lambda mesh, code=None, bootstrap=None, name="", per_host=0: (mesh, code, bootstrap),
            bring_up_to_date=self._bring_up_to_date,
            end_processes=self.ended.append,
            actors_up=self.up.append,
            actors_failed=self._actors_failed,
            watch=lambda number, procs: self.watched.append((number, procs)),
            version_problem=lambda hosts: self.version_problems.get(hosts[0], ""),
            deliver_kept=self._deliver_kept,
        )

    def _actors_failed(self, actors: ActorMesh) -> None:
        assert [sent.object for sent in self.sent.of(ObjectFailed)][-1:] == [ACTORS]  # calls fail as later ones do
        assert self.objects.get(ACTORS) is actors  # what it has kept is found
        self.failed.append(actors)

    async def wait_for_version(self, version: str, hosts: Sequence[str]) -> str:
        if self.refused:
            raise stale_code("workers-1 does not have the code", ["workers-1"])
        return {"v1": "v2"}.get(version, version)

    def process_code(self, version: str | None, paths: Sequence[str]) -> Any:
        return (version, paths)

    async def _deliver_kept(self, taker: Taker, arguments: Sequence[Any]) -> tuple[Any, Any]:
        assert taker.cast  # values that are referred to stay until the constructors have got them
        self.delivered.append((taker.name, taker.procs.name, taker.region.sizes, len(arguments), taker.target))
        return ["a kept value"], self.forgotten.append

    async def _bring_up_to_date(
        self, target: MeshRef, procs: ProcMesh, mesh: Any, version: str, paths: Sequence[str]
    ) -> None:
        self.reloaded.append((version, paths))

    async def spawn_procs(self, *buffers: bytes, region: Region | None = None, version: str | None = None) -> ProcMesh:
        hosts = MeshRef(object=HOSTS, region=region)
        header = SpawnProcs(
            object=PROCS, hosts=hosts, per_host={"gpus": 2}, name="procs", version=version, paths=("src",)
        )
        await self.spawning.spawn_procs(header, [Fragments((data,)) for data in buffers])
        procs = self.objects.get(PROCS)
        assert isinstance(procs, ProcMesh)
        return procs

    async def spawn_actors(self, *, version: str | None = None, region: Region | None = None) -> ActorMesh:
        header = SpawnActors(
            object=ACTORS, procs=MeshRef(object=PROCS, region=region), name="actors", class_name="a.Actor",
            kind="sync", version=version, paths=("src",),
        )  # fmt: skip
        await self.spawning.spawn_actors(header, CLASS_AND_ARGUMENTS)
        actors = self.objects.get(ACTORS)
        assert isinstance(actors, ActorMesh)
        return actors

    def failure(self, number: int) -> Failure:
        (failed,) = [failed for failed in self.sent.of(ObjectFailed) if failed.object == number]
        return failed.failure


# --- processes


async def test_processes_are_in_the_table_before_they_are_up() -> None:
    spawned = Spawned()
    procs = await spawned.spawn_procs(b"bootstrap")
    assert not procs.mesh.ready.done()
    assert (procs.region.labels, procs.region.sizes) == (("hosts", "gpus"), (2, 2))
    assert procs.host_names == ("workers-0", "workers-1")
    assert procs.mesh.bootstrap == (PROCS, (None, ("src",)), b"bootstrap")
    procs.mesh.ready.set_result(None)
    await turns()
    assert spawned.sent.messages == []


async def test_processes_start_from_the_version_that_their_hosts_have() -> None:
    spawned = Spawned()
    procs = await spawned.spawn_procs(version="v1")
    assert procs.version == "v2"
    assert procs.mesh.bootstrap == (PROCS, ("v2", ("src",)), None)
    procs.mesh.ready.set_result(None)


async def test_processes_are_not_spawned_while_a_host_lacks_the_code() -> None:
    spawned = Spawned()
    spawned.refused = True
    with pytest.raises(RequestFailed, match="workers-1 does not have the code"):
        await spawned.spawn_procs(version="v1")
    assert spawned.monarch.meshes == []


async def test_a_host_that_is_lost_while_the_spawn_waits_for_its_code_is_the_reason() -> None:
    spawned = Spawned()

    async def lose_host(version: str, hosts: Sequence[str]) -> str:
        spawned.hosts.host_lost("workers-1", "evicted", returns=False)
        raise stale_code("workers-1 does not have the code", ["workers-1"])

    spawned.wait_for_version = lose_host  # type: ignore[method-assign]
    with pytest.raises(RequestFailed, match="workers-1: evicted") as caught:
        await spawned.spawn_procs(version="v1")
    assert caught.value.failure.kind == "supervision"


async def test_a_host_that_is_lost_as_its_code_arrives_is_not_spawned_on() -> None:
    """Its loss came before there were processes to give up, so only Monarch would notice, after its own timeout."""
    spawned = Spawned()

    async def lose_host(version: str, hosts: Sequence[str]) -> str:
        spawned.hosts.host_lost("workers-1", "evicted", returns=True)
        return version

    spawned.wait_for_version = lose_host  # type: ignore[method-assign]
    with pytest.raises(RequestFailed, match="workers-1: evicted"):
        await spawned.spawn_procs(version="v1")


async def test_a_host_that_is_replaced_while_the_spawn_waits_is_attached_to_and_gets_the_code() -> None:
    spawned = Spawned()
    before, waits = spawned.hosts.mesh, []

    async def replace_host(version: str, hosts: Sequence[str]) -> str:
        waits.append(tuple(hosts))
        if len(waits) == 1:
            spawned.hosts.host_lost("workers-1", "evicted", returns=True)
            replacement = Host(name="workers-9", address="tcp://10.0.0.9:26600")
            assert spawned.hosts.host_restarted(1, replacement, same_address=False)
        return version

    spawned.wait_for_version = replace_host  # type: ignore[method-assign]
    procs = await spawned.spawn_procs(version="v1")
    assert waits == [("workers-0", "workers-1"), ("workers-0", "workers-9")]
    assert procs.host_names == ("workers-0", "workers-9")
    assert spawned.hosts.mesh is not before
    assert not spawned.hosts.must_attach
    spawned.hosts.mesh.ready.set_result(None)
    procs.mesh.ready.set_result(None)


async def test_a_host_that_is_replaced_when_the_lost_one_is_reported_as_without_the_code_gets_it() -> None:
    spawned, waits = Spawned(), []

    async def replace_host(version: str, hosts: Sequence[str]) -> str:
        waits.append((version, *hosts))
        if len(waits) == 1:
            spawned.hosts.host_lost("workers-1", "evicted", returns=True)
            replacement = Host(name="workers-9", address="tcp://10.0.0.9:26600")
            assert spawned.hosts.host_restarted(1, replacement, same_address=False)
            raise stale_code("workers-1: evicted", ["workers-1"])
        return version

    spawned.wait_for_version = replace_host  # type: ignore[method-assign]
    procs = await spawned.spawn_procs(version="v1")
    assert waits == [("v1", "workers-0", "workers-1"), ("v1", "workers-0", "workers-9")]
    for mesh in (spawned.hosts.mesh, procs.mesh):
        mesh.ready.set_result(None)


async def test_processes_are_not_spawned_on_a_host_that_is_missing_but_on_a_slice_without_it() -> None:
    spawned = Spawned()
    spawned.hosts.host_lost("workers-1", "evicted", returns=True)
    with pytest.raises(RequestFailed, match="workers-1: evicted") as caught:
        await spawned.spawn_procs()
    assert caught.value.failure.step == "spawn_procs({'gpus': 2}, name='procs')"
    procs = await spawned.spawn_procs(region=hosts_region(1))
    assert procs.host_names == ("workers-0",)
    procs.mesh.ready.set_result(None)


async def test_processes_that_do_not_come_up_fail_with_monarchs_reason_and_none_is_left() -> None:
    spawned = Spawned()
    procs = await spawned.spawn_procs()
    procs.mesh.ready.set_exception(RuntimeError("bootstrap failed\n\nStack backtrace:\n 0: rust"))
    await until(lambda: spawned.sent.messages)
    failure = spawned.failure(PROCS)
    assert (failure.kind, failure.message, failure.mesh) == ("supervision", "bootstrap failed", "procs")
    assert spawned.ended == [PROCS]


async def test_processes_whose_bootstrap_raises_fail_with_its_traceback() -> None:
    spawned = Spawned()
    procs = await spawned.spawn_procs()
    procs.mesh.ready.set_exception(BootstrapFailed("Traceback:\nValueError: no device"))
    await until(lambda: spawned.sent.messages)
    failure = spawned.failure(PROCS)
    assert (failure.kind, failure.message) == ("actor", "Traceback:\nValueError: no device")
    assert failure.step == "spawn_procs({'gpus': 2}, name='procs')"
    assert spawned.ended == [PROCS]


async def test_processes_on_a_host_with_other_versions_fail_with_the_versions() -> None:
    spawned = Spawned()
    spawned.version_problems["workers-0"] = "worker workers-0 has Python 3.99.1"
    procs = await spawned.spawn_procs()
    procs.mesh.ready.set_exception(RuntimeError("Cannot spawn new actors on mesh with supervision events"))
    await until(lambda: spawned.sent.messages)
    assert spawned.failure(PROCS).message == "worker workers-0 has Python 3.99.1"


@pytest.mark.parametrize("turns_before", [0, 1])
async def test_processes_given_up_because_of_a_lost_host_fail_with_its_reason(turns_before: int) -> None:
    spawned = Spawned()
    procs = await spawned.spawn_procs()
    spawned.hosts.host_lost("workers-1", "OOMKilled", returns=False)
    await turns(turns_before)
    assert procs.initialized is not None
    procs.initialized.cancel()
    await until(lambda: spawned.sent.messages)
    assert "workers-1: OOMKilled" in spawned.failure(PROCS).message


async def test_processes_on_a_host_that_is_lost_and_replaced_at_once_fail_with_the_reason() -> None:
    spawned = Spawned()
    procs = await spawned.spawn_procs()
    spawned.hosts.host_lost("workers-1", "evicted", returns=True)
    procs.host_lost("workers-1")
    replacement = Host(name="workers-1", address="tcp://10.0.0.9:26600")
    assert spawned.hosts.host_restarted(1, replacement, same_address=False)
    await until(lambda: spawned.sent.messages)
    assert "workers-1: evicted" in spawned.failure(PROCS).message
    assert spawned.ended == [PROCS]


# --- actors


async def test_actors_are_in_the_table_before_their_constructors_have_run() -> None:
    spawned = Spawned()
    spawned.objects.add(PROCS, proc_mesh(spawned.hosts))
    actors = await spawned.spawn_actors()
    assert actors.unique_name == ""
    actors.actors.ready.set_result(None)
    await until(lambda: spawned.up)
    assert (actors.unique_name, spawned.up, spawned.reloaded) == ("actors-unique", [actors], [])


async def test_processes_are_brought_up_to_date_before_actors_are_spawned_in_them() -> None:
    spawned = Spawned()
    spawned.objects.add(PROCS, proc_mesh(spawned.hosts))
    actors = await spawned.spawn_actors(version="v2")
    assert spawned.reloaded == [("v2", ("src",))]
    actors.actors.ready.set_result(None)


async def test_actors_are_spawned_in_living_processes_alone() -> None:
    spawned = Spawned()
    spawned.objects.add(PROCS, proc_mesh(spawned.hosts))
    spawned.spawning._watch = lambda number, procs: procs.dead.update({1: "killed"})  # as of returned processes
    refused = "on ranks 1 of procs: killed\nSpawn on a slice of the living ranks"
    with pytest.raises(RequestFailed, match=refused) as caught:
        await spawned.spawn_actors()
    assert (caught.value.failure.kind, caught.value.failure.step) == ("supervision", "spawn('actors', a.Actor)")
    actors = await spawned.spawn_actors(region=hosts_region(1))
    actors.actors.ready.set_result(None)
    await until(lambda: spawned.up)


async def test_a_constructor_that_raises_fails_the_mesh_and_its_calls() -> None:
    spawned = Spawned()
    spawned.objects.add(PROCS, proc_mesh(spawned.hosts))
    actors = await spawned.spawn_actors()
    actors.actors.ready.set_exception(RuntimeError("ValueError: no such model"))
    await until(lambda: spawned.sent.messages)
    failure = spawned.failure(ACTORS)
    assert (failure.message, failure.step) == ("ValueError: no such model", "spawn('actors', a.Actor)")
    await until(lambda: spawned.failed)
    assert spawned.failed == [actors]
    assert actors.failed == failure.as_cause()
    assert actors.up is not None
    await actors.up


async def test_actors_fail_with_the_failure_of_their_processes_as_the_cause() -> None:
    spawned = Spawned()
    procs = await spawned.spawn_procs()
    actors = await spawned.spawn_actors()
    actors.actors.ready.set_exception(RuntimeError("the proc mesh is gone"))
    await turns()
    assert actors.up is not None
    assert not actors.up.done()
    procs.mesh.ready.set_exception(RuntimeError("no memory"))
    await actors.up
    await until(lambda: len(spawned.sent.messages) == 2)
    failure = spawned.failure(ACTORS)
    assert (failure.kind, failure.message) == ("step", "no memory")
    assert failure.step == "spawn_procs({'gpus': 2}, name='procs')"


@pytest.mark.parametrize(
    ("ended", "reason"), [(None, "Monarch's own"), (RuntimeError("no memory"), "no memory")], ids=["up", "failed"]
)
async def test_actors_that_monarch_refuses_to_spawn_fail_with_the_failure_of_their_processes(
    ended: Exception | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Monarch itself may know that the processes did not come up before the engine has noted it."""
    spawned = Spawned()
    procs = await spawned.spawn_procs()

    def refuse(*_: Any) -> None:
        raise RuntimeError("Monarch's own")

    monkeypatch.setattr(spawned.monarch, "spawn_actors", refuse)
    spawning = asyncio.ensure_future(spawned.spawn_actors())
    await turns()
    assert not spawning.done()
    procs.mesh.ready.set_result(None) if ended is None else procs.mesh.ready.set_exception(ended)
    with pytest.raises(Exception, match=reason) as raised:
        await spawning
    if isinstance(raised.value, RequestFailed):
        assert raised.value.failure == spawned.failure(PROCS).model_copy(update={"kind": "step"})
    assert isinstance(raised.value, RequestFailed) == (ended is not None)


async def test_actors_that_are_stopped_before_they_are_up_do_not_fail() -> None:
    spawned = Spawned()
    spawned.objects.add(PROCS, proc_mesh(spawned.hosts))
    actors = await spawned.spawn_actors()
    actors.stopping = True
    actors.actors.ready.set_exception(RuntimeError("stopped"))
    await turns()
    assert spawned.sent.messages == []


async def test_actors_that_are_stopped_before_their_processes_fail_still_fail_with_them() -> None:
    spawned = Spawned()
    procs = await spawned.spawn_procs()
    actors = await spawned.spawn_actors()
    actors.stopping = True
    actors.actors.ready.set_exception(RuntimeError("the proc mesh is gone"))
    procs.mesh.ready.set_exception(BootstrapFailed("ValueError: no device"))
    assert actors.up is not None
    await actors.up
    assert (spawned.failure(ACTORS).kind, spawned.failure(ACTORS).message) == ("step", "ValueError: no device")
    assert spawned.failed == [actors]


async def test_a_message_without_a_class_is_rejected() -> None:
    spawned = Spawned()
    spawned.objects.add(PROCS, proc_mesh(spawned.hosts))
    header = SpawnActors(object=ACTORS, procs=MeshRef(object=PROCS), name="a", class_name="a.A", kind="sync")
    with pytest.raises(RequestFailed, match="no pickled class or no pickled arguments"):
        await spawned.spawning.spawn_actors(header, CLASS_AND_ARGUMENTS[:1])


# --- hosts that do not answer

ATTACH_FAILED = """attach failed: config push failed during attach on 1 host(s):
  - tcp:10.0.0.1:1: reply timed out after MESH_ATTACH_CONFIG_TIMEOUT"""


def test_hosts_that_do_not_answer_are_named_with_what_to_check() -> None:
    explained = explain_unreachable(host_mesh(12), ATTACH_FAILED)
    assert explained.startswith("no Monarch worker answers at workers-1 (tcp://10.0.0.1:1). Check that a worker runs")
    assert explained.endswith(ATTACH_FAILED)


def test_many_hosts_that_do_not_answer_are_counted() -> None:
    silent = "".join(f"\n  - tcp:10.0.0.{rank}:1: reply timed out" for rank in range(12))
    assert "workers-7 (tcp://10.0.0.7:1) and 4 more. Check" in explain_unreachable(
        host_mesh(12), f"attach failed:{silent}"
    )


def test_another_error_is_left_as_it_is() -> None:
    assert (
        explain_unreachable(host_mesh(), "bootstrap failed at tcp:10.0.0.1:1") == "bootstrap failed at tcp:10.0.0.1:1"
    )


async def test_how_processes_are_started_reaches_monarch() -> None:
    spawned = Spawned()
    launch = Launch(commands=(BootstrapCommand(program="/python"),))
    hosts = MeshRef(object=HOSTS, python="/other/python")
    header = SpawnProcs(object=PROCS, hosts=hosts, per_host={"gpus": 2}, name="procs", launch=launch)
    await spawned.spawning.spawn_procs(header, [])
    ((mesh, started),) = spawned.monarch.launches
    assert started == launch
    assert mesh.name.endswith("with /other/python")
    spawned.monarch.meshes[-1].ready.set_result(None)  # type: ignore[union-attr]


class Kept:
    """A session with two hosts. As ``controllers.Spawner`` it creates meshes at once."""

    def __init__(self, *, attached: bool = True) -> None:
        self.monarch, self.objects = FakeMonarch(), ObjectTable()
        self.hosts = host_mesh()
        if attached:
            self.objects.add(1, self.hosts)
        self.latest_code: tuple[str | None, tuple[str, ...]] = ("v2", ())
        self.spawned: list[SpawnProcs] = []
        self.controllers = SessionControllers(self.objects, self.monarch, self)

    async def spawn_procs(self, header: SpawnProcs, buffers: Sequence[Fragments]) -> None:
        self.spawned.append(header)

    async def spawn_actors(self, header: SpawnActors, buffers: Sequence[Fragments]) -> None:
        assert buffers[0].join() == self.monarch.controllers_class
        self.objects.add(header.object, actor_mesh(name=header.name))

    async def get(self, number: int, hosts: int = 0) -> ActorMesh:
        header = GetControllers(object=number, hosts=hosts, version="v1")
        await self.controllers.handlers()[GetControllers](header, ())  # type: ignore[misc]
        made = self.objects.require(number)
        assert isinstance(made, ActorMesh)
        return made


async def test_the_controllers_are_spawned_once_on_the_first_host() -> None:
    kept = Kept()
    first, second = await kept.get(5), await kept.get(6)
    assert await kept.controllers.dump() == b"controllers with []"
    assert first is second
    (spawned,) = kept.spawned
    assert (spawned.version, spawned.hosts.object, spawned.per_host) == ("v1", 1, {})
    assert spawned.hosts.region is not None
    assert (spawned.hosts.region.offset, spawned.hosts.region.sizes) == (0, ())


async def test_controllers_wait_for_hosts_that_are_being_attached() -> None:
    kept = Kept(attached=False)
    getting = asyncio.ensure_future(kept.get(5, hosts=1))
    await turns()
    assert not getting.done()
    kept.objects.add(1, kept.hosts)
    assert (await getting).name == "controllers"


async def test_controllers_are_spawned_on_other_hosts_if_these_cannot_be_attached() -> None:
    kept = Kept()
    kept.objects.add(2, Failure(kind="invalid", message="no such mesh"))
    assert (await kept.get(5, hosts=2)).name == "controllers"


async def test_controllers_that_died_are_spawned_again() -> None:
    kept = Kept()
    first = await kept.get(5)
    first.dead[0] = "killed"
    assert await kept.get(6) is not first
    assert len(kept.spawned) == 2


async def test_a_session_without_available_hosts_has_no_controllers() -> None:
    kept = Kept()
    kept.hosts.host_lost(kept.hosts.names[0], "evicted", returns=False)
    with pytest.raises(RequestFailed, match="no host for controllers"):
        await kept.get(5)
    assert (await answer(kept.controllers.dump)()).startswith(b"-there is no host for controllers")


async def test_kept_values_are_delivered_to_the_processes_before_actors_take_them() -> None:
    spawned = Spawned()
    spawned.objects.add(PROCS, proc_mesh(spawned.hosts))
    kept = KeptMesh(9, "x", None, hosts_region(2), (0, 1), asyncio.get_running_loop().create_future())
    spawned.objects.add(9, kept)
    header = SpawnActors(
        object=ACTORS,
        procs=MeshRef(object=PROCS),
        name="actors",
        class_name="a.Actor",
        kind="sync",
        arguments=(Argument(kind="kept", ref=MeshRef(object=9)),),
    )
    spawned.monarch.hold = False
    await spawned.spawning.spawn_actors(header, CLASS_AND_ARGUMENTS)
    assert spawned.delivered == [("actors.__init__", "procs", (2,), 1, ACTORS)]
    await until(lambda: spawned.up)
    assert not spawned.forgotten


async def test_kept_values_for_actors_that_cannot_be_spawned_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned = Spawned()
    spawned.objects.add(PROCS, proc_mesh(spawned.hosts))
    spawned.objects.add(9, KeptMesh(9, "x", None, hosts_region(2), (0, 1), asyncio.get_running_loop().create_future()))
    argument = Argument(kind="kept", ref=MeshRef(object=9))
    procs = MeshRef(object=PROCS)
    header = SpawnActors(
        object=ACTORS, procs=procs, name="actors", class_name="a.Actor", kind="sync", arguments=(argument,)
    )

    def refuse(*_: object) -> None:
        raise RuntimeError("the processes are gone")

    monkeypatch.setattr(spawned.monarch, "spawn_actors", refuse)
    with pytest.raises(RuntimeError, match="gone"):
        await spawned.spawning.spawn_actors(header, CLASS_AND_ARGUMENTS)
    assert spawned.forgotten == [None]
