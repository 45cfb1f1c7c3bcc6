"""Waiting for meshes, stopping and releasing them."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from meshgate_gateway.engine.failures import FailureReports, RequestFailed
from meshgate_gateway.engine.interfaces import CONTROL_STREAM
from meshgate_gateway.engine.meshes import lifetimes
from meshgate_gateway.engine.meshes.lifetimes import Lifetimes
from meshgate_gateway.engine.objects.records import ActorMesh, Channel, HostMesh, KeptMesh, ProcMesh
from meshgate_gateway.engine.objects.regions import hosts_region
from meshgate_gateway.engine.objects.table import Lookup, ObjectTable
from meshgate_wire.messages import Done, Failed, Failure, Host, Initialized, MeshRef, Region, Release, Stop, stream_of
from tests.gateway.engine.fakes import (
    FakeMesh,
    FakeMonarch,
    Sent,
    actor_mesh,
    host_mesh,
    proc_mesh,
    start_task,
    turns,
    until,
)

HOSTS, PROCS, ACTORS, PORT, SAME_HOSTS = 1, 2, 3, 4, 5


class Session:
    """One mesh of each kind, on top of each other, and a channel."""

    def __init__(self) -> None:
        self.monarch, self.objects, self.sent = FakeMonarch(), ObjectTable(), Sent()
        self.stopped: list[ActorMesh] = []
        self.processes_stopped: list[tuple[ProcMesh, int, str]] = []
        self.ended: list[int] = []  # the numbers of proc meshes
        self.lost_hosts: dict[str, str] = {}
        self.dropped: list[tuple[KeptMesh, bool]] = []  # with whether at once
        self.lifetimes = Lifetimes(
            self.objects,
            Lookup(self.objects, self.monarch),
            self.monarch,
            self.sent,
            start_task,
            FailureReports(self.objects.add, self.sent),
            wait_available=self._wait_available,
            lost_hosts=self.lost_hosts,
            ranks_stopped=self.stopped.append,
            process_stopped=lambda mesh, rank, report: self.processes_stopped.append((mesh, rank, report)),
            end_processes=self.ended.append,
            release_kept=self._release_kept,
        )
        self.hosts = host_mesh()
        self.procs = proc_mesh(self.hosts)
        self.actors = actor_mesh(self.procs)
        for number, made in ((HOSTS, self.hosts), (PROCS, self.procs), (ACTORS, self.actors), (PORT, Channel("port"))):
            self.objects.add(number, made)

    async def _wait_available(self, hosts: HostMesh, region: Region | None) -> None:
        if missing := hosts.missing_among(hosts.names):
            raise RequestFailed(Failure(kind="supervision", message=missing))

    def _release_kept(self, kept: KeptMesh, *, at_once: bool) -> None:
        self.dropped.append((kept, at_once))

    def initialized(self, target: int, *, whole: bool = False) -> None:
        self.lifetimes.initialized(Initialized(call=9, target=MeshRef(object=target), whole=whole), ())

    async def stop(self, target: int, region: Region | None = None, *, shutdown: bool = False) -> None:
        ref = MeshRef(object=target, region=region)
        await self.lifetimes.stop(Stop(call=9, target=ref, reason="enough", shutdown=shutdown), ())
        await until(lambda: self.sent.messages)


# --- waiting until a mesh is up


@pytest.mark.parametrize("target", [HOSTS, PROCS, ACTORS])
async def test_a_request_is_answered_when_the_mesh_is_up(target: int) -> None:
    session = Session()
    record = session.objects.get(target)
    mesh: FakeMesh = record.actors if isinstance(record, ActorMesh) else record.mesh  # type: ignore[union-attr]
    mesh.ready = asyncio.get_running_loop().create_future()
    session.initialized(target)
    await turns()
    assert session.sent.messages == []
    mesh.ready.set_result(None)
    await until(lambda: session.sent.messages)
    stream = CONTROL_STREAM if target == HOSTS else stream_of(target)  # after what was sent about the hosts
    assert session.sent.messages == [(Done(call=9), stream, ())]


async def test_what_keeps_a_mesh_from_coming_up_is_the_answer() -> None:
    session = Session()
    session.procs.mesh.ready = asyncio.get_running_loop().create_future()
    session.procs.mesh.ready.set_exception(RuntimeError("no memory\n\nStack backtrace:\n 0: core::panic"))
    session.initialized(PROCS)
    await until(lambda: session.sent.messages)
    assert [failed.failure.message for failed in session.sent.of(Failed)] == ["no memory"]


async def test_processes_that_were_given_up_with_a_lost_host_are_not_waited_for() -> None:
    session = Session()
    session.procs.mesh.ready = asyncio.get_running_loop().create_future()  # Monarch waits for the host
    session.procs.up = asyncio.get_running_loop().create_future()
    session.initialized(PROCS)
    await turns()
    session.procs.given_up = "workers-1: evicted"
    session.objects.add(PROCS, failure := Failure(kind="supervision", message="workers-1: evicted", mesh="procs"))
    session.procs.up.set_result(None)
    await until(lambda: session.sent.messages)
    assert session.sent.of(Failed) == [Failed(call=9, failure=failure.as_cause())]


@pytest.mark.parametrize("request_", ["initialized", "stop"])
@pytest.mark.parametrize("target", [PROCS, ACTORS])
@pytest.mark.parametrize("kind", ["actor", "supervision"])
async def test_a_mesh_that_could_not_be_created_fails_its_requests_with_the_reason_that_is_yet_to_come(
    kind: Literal["actor", "supervision"], target: int, request_: str
) -> None:
    session = Session()
    record = session.procs if target == PROCS else session.actors
    record.up = asyncio.get_running_loop().create_future()
    mesh: FakeMesh = session.procs.mesh if target == PROCS else session.actors.actors

    async def refuse(_: FakeMesh) -> None:
        raise LookupError("Monarch's own")

    session.monarch.stopping = refuse
    if request_ == "initialized":
        mesh.ready = asyncio.get_running_loop().create_future()
        mesh.ready.set_exception(LookupError("Monarch's own"))
        session.initialized(target)
    else:
        await session.lifetimes.stop(Stop(call=9, target=MeshRef(object=target), reason="enough"), ())
    await turns()
    assert session.sent.messages == []
    session.objects.add(target, failure := Failure(kind=kind, message="no device", step="spawn_procs({})"))
    record.up.set_result(None)
    await until(lambda: session.sent.messages)
    expected = failure if kind == "actor" else failure.as_cause()
    assert session.sent.of(Failed) == [Failed(call=9, failure=expected)]


async def test_a_bootstrap_that_raised_is_the_answer_and_not_a_cause_of_another_failure() -> None:
    session = Session()
    failure = Failure(kind="actor", message="ValueError: no device", mesh="procs")
    session.objects.add(PROCS, failure)
    session.initialized(PROCS)
    await until(lambda: session.sent.messages)
    assert session.sent.of(Failed) == [Failed(call=9, failure=failure)]


async def test_only_a_request_for_whole_hosts_waits_for_missing_ones() -> None:
    session = Session()
    session.hosts.host_lost("workers-1", "it was killed", returns=False)
    session.initialized(HOSTS)
    session.initialized(HOSTS, whole=True)
    await until(lambda: len(session.sent.messages) == 2)
    assert len(session.sent.of(Done)) == 1
    assert "mesh 'workers' has lost hosts (workers-1: it was killed)" in session.sent.of(Failed)[0].failure.message


async def test_hosts_of_which_one_is_lost_before_it_has_answered_are_waited_for_and_attached_to_again() -> None:
    session = Session()
    session.hosts.must_attach = session.monarch.hold = True
    for whole in (True, False):
        session.initialized(HOSTS, whole=whole)
    await turns()
    session.monarch.hold = False
    session.hosts.host_lost("workers-1", "evicted", returns=True)
    replacement = Host(name="workers-1b", address="tcp://10.0.0.9:1")
    assert session.hosts.host_restarted(1, replacement, same_address=False)
    await until(lambda: len(session.sent.messages) == 2)
    assert len(session.sent.of(Done)) == 2
    assert [addresses[1] for _, addresses in session.monarch.attached] == ["tcp://10.0.0.1:1", "tcp://10.0.0.9:1"]


# --- stopping


async def test_stopping_processes_stops_their_actors() -> None:
    session = Session()
    await session.stop(PROCS)
    assert session.sent.of(Done) == [Done(call=9)]
    assert session.procs.mesh.stopped == "enough"
    assert session.actors.dead == dict.fromkeys((0, 1), "mesh 'actors' was stopped: enough")
    assert session.stopped == [session.actors]
    report = "mesh 'procs' was stopped: enough"  # for values that are being delivered to them
    assert session.processes_stopped == [(session.procs, rank, report) for rank in (0, 1)]
    assert (session.procs.stopping, session.actors.stopping) == (True, True)


@pytest.mark.parametrize("target", [HOSTS, PROCS, ACTORS])
@pytest.mark.parametrize("shutdown", [False, True])
async def test_stopping_does_not_wait_for_a_lost_host(
    target: int, shutdown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetimes, "STOP_TIMEOUT", 0.001)
    session, asked = Session(), list[str]()
    session.procs.number = 7

    async def wait_for_ever(*args: object) -> None:
        asked.append("now")
        await asyncio.get_running_loop().create_future()

    for name in ("stop_actors", "stop_procs", "stop_hosts", "shut_down_hosts"):
        monkeypatch.setattr(session.monarch, name, wait_for_ever)
    ref = MeshRef(object=target)
    await session.lifetimes.stop(Stop(call=9, target=ref, reason="enough", shutdown=shutdown), ())
    await until(lambda: asked)
    await asyncio.sleep(0.01)
    assert session.sent.messages == []  # the hosts that are there may need their time
    session.lost_hosts["another"] = "it was killed"
    session.procs.lost_hosts.add("another")
    session.procs.dead[1] = "its process crashed"  # but its host answers
    await asyncio.sleep(0.01)
    assert session.sent.messages == []
    session.lost_hosts["workers-1"] = "it was killed"
    session.procs.lost_hosts.add("workers-1")
    await until(lambda: session.sent.messages)
    assert session.sent.of(Done) == [Done(call=9)]
    assert session.actors.dead
    assert session.ended == ([] if target == ACTORS else [7])  # Monarch may have left them


@pytest.mark.parametrize("target", [PROCS, ACTORS])
async def test_stopping_does_not_wait_for_ranks_whose_host_was_replaced(
    target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetimes, "STOP_TIMEOUT", 0.001)
    session = Session()

    async def wait_for_ever(*args: object) -> None:
        await asyncio.get_running_loop().create_future()

    for name in ("stop_actors", "stop_procs"):
        monkeypatch.setattr(session.monarch, name, wait_for_ever)
    session.procs.lost_hosts.add("workers-1")  # and another has taken its place
    await session.lifetimes.stop(Stop(call=9, target=MeshRef(object=target), reason="enough"), ())
    await until(lambda: session.sent.messages)
    assert session.sent.of(Done) == [Done(call=9)]


async def test_stopping_a_slice_leaves_the_other_ranks() -> None:
    session = Session()
    await session.stop(ACTORS, hosts_region(1, 1))
    assert session.actors.dead == {1: "mesh 'actors' was stopped: enough"}
    assert session.actors.dead.stopped == {1}
    assert session.procs.dead == {}
    assert not session.actors.stopping


async def test_what_is_known_of_ranks_that_were_lost_before_the_stop_is_kept() -> None:
    session = Session()
    session.procs.dead[1] = "it was killed"
    session.actors.dead[1] = "its process was killed"
    stop_procs = session.monarch.stop_procs

    async def stop(*arguments: Any) -> None:
        session.procs.dead[0] = "its connection closed"  # as that of a process of a slice does before it has stopped
        await stop_procs(*arguments)

    session.monarch.stop_procs = stop  # type: ignore[method-assign]
    await session.stop(PROCS)
    assert session.procs.dead == {0: "mesh 'procs' was stopped: enough", 1: "it was killed"}
    assert session.actors.dead == {0: "mesh 'actors' was stopped: enough", 1: "its process was killed"}
    assert session.procs.dead.stopped == session.actors.dead.stopped == {0}


@pytest.mark.parametrize("known", ["actors", "procs", ""])
async def test_actors_of_which_one_has_died_are_not_stopped(known: str) -> None:
    session = Session()
    if known:
        getattr(session, known).dead[1] = "it was killed"

    async def refuse(*arguments: Any) -> None:
        assert session.actors.stopping
        raise RuntimeError("statuses: Running=0..1;Failed(...)=1..2")

    session.monarch.stop_actors = refuse  # type: ignore[method-assign]
    await session.stop(ACTORS)
    (failed,) = session.sent.of(Failed)
    assert failed.failure.kind == "supervision"
    assert ("rank 1 has ended: it was killed\nMonarch stops" in failed.failure.message) == bool(known)
    if known:
        assert (session.actors.dead, session.actors.dead.stopped) == ({1: "it was killed"}, set())
        assert not session.actors.stopping  # later deaths are reported


async def test_a_rank_that_answers_again_during_the_stop_is_stopped() -> None:
    session = Session()
    session.procs.dead[1] = "it does not answer"
    stop_procs = session.monarch.stop_procs

    async def stop(*arguments: Any) -> None:
        del session.procs.dead[1]
        await stop_procs(*arguments)

    session.monarch.stop_procs = stop  # type: ignore[method-assign]
    await session.stop(PROCS)
    assert session.procs.dead.stopped == {0, 1}


async def test_stopping_hosts_stops_what_any_mesh_of_the_same_hosts_has_spawned() -> None:
    session = Session()
    session.objects.add(SAME_HOSTS, same := host_mesh())
    session.objects.add(6, others := host_mesh(name="others"))
    session.objects.add(7, elsewhere := proc_mesh(others))
    await session.stop(SAME_HOSTS)
    assert session.procs.dead.keys() == {0, 1}
    assert elsewhere.dead == {}
    assert {id(mesh) for mesh, _ in session.monarch.hosts_stopped} == {id(session.hosts.mesh), id(same.mesh)}
    assert (session.hosts.must_attach, same.must_attach, others.must_attach) == (True, True, False)


async def test_shutting_down_hosts_ends_their_processes_for_good() -> None:
    session = Session()
    await session.stop(HOSTS, shutdown=True)
    assert session.monarch.hosts_stopped == [(session.hosts.mesh, True)]
    assert not session.hosts.must_attach


async def test_a_channel_cannot_be_stopped() -> None:
    session = Session()
    with pytest.raises(RequestFailed, match="object 4 is a port; only meshes can be stopped"):
        await session.stop(PORT)


# --- releasing


async def test_a_released_channel_is_read_no_more_and_unknown() -> None:
    session = Session()
    channel = session.objects.get(PORT)
    assert isinstance(channel, Channel)
    channel.reader = start_task(asyncio.sleep(60))
    session.lifetimes.release(Release(objects=(PORT,)), ())
    await turns()
    assert channel.reader.cancelled()
    assert session.objects.get(PORT) is None


async def test_a_released_mesh_of_this_session_stays_until_the_session_ends() -> None:
    session = Session()
    session.objects.add(-1, adopted := actor_mesh())
    session.lifetimes.release(Release(objects=(HOSTS, PROCS, ACTORS, -1)), ())
    assert session.objects.get(HOSTS) is None
    assert session.objects.get(PROCS) is session.procs
    assert session.objects.get(ACTORS) is session.actors
    assert adopted not in session.objects.values()


# --- the end of the session


async def test_the_end_of_a_session_stops_the_processes_that_it_spawned() -> None:
    session = Session()
    session.objects.add(-1, adopted := proc_mesh(name="adopted"))
    adopted.host_names = ()
    await session.lifetimes.stop_all("the session ended")
    assert (session.procs.mesh.stopped, adopted.mesh.stopped) == ("the session ended", None)
    assert (session.procs.stopping, session.actors.stopping) == (True, True)


@pytest.mark.parametrize("lost", [False, True])
async def test_a_mesh_that_does_not_stop_is_given_up_sooner_if_a_host_is_lost(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, other = ("STOP_TIMEOUT_HOST_LOST", "STOP_TIMEOUT") if lost else ("STOP_TIMEOUT", "STOP_TIMEOUT_HOST_LOST")
    monkeypatch.setattr(lifetimes, used, 0.01)
    monkeypatch.setattr(lifetimes, other, 600.0)
    session = Session()
    if lost:
        session.lost_hosts["workers-1"] = "evicted"
    never = asyncio.get_running_loop().create_future()

    async def stopping(mesh: FakeMesh) -> None:
        await never

    session.monarch.stopping = stopping
    await asyncio.wait_for(session.lifetimes.stop_all("the session ended"), 60)
    assert session.procs.mesh.stopped is None


async def test_kept_values_are_released_with_the_last_part_of_their_release() -> None:
    session = Session()
    region = hosts_region(2)
    kept = KeptMesh(9, "makers.make.keep()", None, region, (0, 1), asyncio.get_running_loop().create_future())
    session.objects.add(9, kept)
    session.lifetimes.release(Release(objects=(9,), parts=2, at_once=True), ())
    assert session.dropped == []
    assert session.objects.get(9) is kept
    session.lifetimes.release(Release(objects=(9,), parts=2, at_once=True), ())
    assert session.dropped == [(kept, True)]
    assert session.objects.get(9) is None
    session.objects.add(10, kept)
    session.lifetimes.release(Release(objects=(10,)), ())
    assert session.dropped == [(kept, True), (kept, False)]


async def test_kept_values_are_not_stopped() -> None:
    session = Session()
    kept = KeptMesh(9, "x", None, hosts_region(1), (0,), asyncio.get_running_loop().create_future())
    session.objects.add(9, kept)
    with pytest.raises(RequestFailed, match="object 9 is kept values; only meshes"):
        await session.lifetimes.stop(Stop(call=1, target=MeshRef(object=9)), ())
