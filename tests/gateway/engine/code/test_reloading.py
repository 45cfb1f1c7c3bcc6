"""Reloads of running processes: which are reloaded, and what is known about their code afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from meshgate_gateway.engine.calls.pending_calls import PendingCall
from meshgate_gateway.engine.code.reloading import Reloading
from meshgate_gateway.engine.failures import FailureReports, RequestFailed
from meshgate_gateway.engine.monarch.interface import Reply
from meshgate_gateway.engine.objects.records import ActorMesh, ProcMesh
from meshgate_gateway.engine.objects.regions import hosts_region
from meshgate_gateway.engine.objects.table import Lookup, ObjectTable
from meshgate_wire.messages import Adopted, Failed, MeshRef, Region, Reload, stream_of
from tests.gateway.engine.fakes import FakeMonarch, Sent, proc_mesh, start_task, turns, until

PROCS = 2


class Reloaded:
    """Two processes that started from version ``v1``. Hosts have every version that is waited for."""

    def __init__(self, version: str | None = "v1") -> None:
        self.monarch, self.objects, self.sent = FakeMonarch(), ObjectTable(), Sent()
        self.calls: list[tuple[PendingCall, int]] = []
        self.failed: list[ActorMesh] = []
        self.waited: list[tuple[str, Sequence[str]]] = []
        self.newest: dict[str, str] = {}
        self.reloading = Reloading(
            Lookup(self.objects, self.monarch),
            self.monarch,
            self,
            wait_for_version=self._wait_for_version,
            start_task=start_task,
            failures=FailureReports(self.objects.add, self.sent),
        )
        self.watched: list[tuple[int, ProcMesh]] = []
        self.reloading.watch = lambda number, procs: self.watched.append((number, procs))
        self.procs = proc_mesh(version=version)
        self.objects.add(PROCS, self.procs)

    async def _wait_for_version(self, version: str, hosts: Sequence[str]) -> str:
        self.waited.append((version, hosts))
        return self.newest.get(version, version)

    # as ``Calling``

    def start(self, pending: PendingCall, mesh: ActorMesh, actors: Any, payload: Any, stream: int) -> None:
        assert payload == ("v2", ["src"])
        self.calls.append((pending, stream))

    def fail(self, mesh: ActorMesh) -> None:
        self.failed.append(mesh)

    # requests

    async def bring_up_to_date(self, version: str = "v2", region: Region | None = None) -> None:
        target = MeshRef(object=PROCS, region=region)
        await self.reloading.bring_up_to_date(target, self.procs, self.procs.mesh, version, ["src"])

    async def reload(self, region: Region | None = None) -> None:
        header = Reload(call=5, target=MeshRef(object=PROCS, region=region), version="v2", paths=("src",))
        await self.reloading.reload(header, ())
        await turns()

    @property
    def spawned(self) -> int:
        return sum(mesh.name == "ProcessReloader" for mesh in self.monarch.meshes)


# --- before actors are spawned


async def test_processes_that_run_the_version_are_left_alone() -> None:
    reloaded = Reloaded()
    await reloaded.bring_up_to_date("v1")
    assert reloaded.monarch.engine_calls == []
    assert reloaded.waited == []


async def test_processes_of_a_mesh_that_an_endpoint_returned_are_left_alone() -> None:
    reloaded = Reloaded()
    reloaded.procs.hosts = None
    await reloaded.bring_up_to_date()
    assert reloaded.monarch.engine_calls == []


async def test_processes_that_run_another_version_are_reloaded_once_their_hosts_have_it() -> None:
    reloaded = Reloaded()
    await reloaded.bring_up_to_date()
    assert reloaded.waited == [("v2", ["workers-0", "workers-1"])]
    ((_, endpoint, args),) = reloaded.monarch.engine_calls
    assert (endpoint, args) == ("reload", ("v2", ["src"]))
    assert reloaded.procs.runs("v2", [0, 1])


async def test_processes_are_known_to_run_the_version_that_superseded_the_requested_one() -> None:
    reloaded = Reloaded()
    reloaded.newest["v2"] = "v3"
    await reloaded.bring_up_to_date()
    assert reloaded.procs.runs("v3", [0, 1])


async def test_only_the_processes_of_a_slice_are_reloaded() -> None:
    reloaded = Reloaded()
    await reloaded.bring_up_to_date(region=hosts_region(1, 1))
    assert reloaded.waited == [("v2", ["workers-1"])]
    assert reloaded.procs.runs("v1", [0])
    assert reloaded.procs.runs("v2", [1])


async def test_the_same_processes_are_reloaded_by_the_same_actors() -> None:
    reloaded = Reloaded()
    await reloaded.bring_up_to_date("v2")
    await reloaded.bring_up_to_date("v3")
    assert reloaded.spawned == 1
    await reloaded.bring_up_to_date("v4", hosts_region(1))
    assert reloaded.spawned == 2


async def test_after_a_reload_that_failed_the_next_spawn_reloads_again() -> None:
    reloaded = Reloaded()
    reloaded.monarch.on_engine_call = _raise
    for _ in range(2):
        with pytest.raises(RequestFailed, match="could not load the newest code: SyntaxError: '\\('") as caught:
            await reloaded.bring_up_to_date()
        assert caught.value.failure.kind == "stale_code"
    assert len(reloaded.monarch.engine_calls) == 2
    assert not reloaded.procs.runs("v1", [0])


def _raise(endpoint: str, args: object) -> None:
    raise RuntimeError("SyntaxError: '('")


async def test_a_process_that_dies_during_a_reload_fails_it_with_the_reason() -> None:
    reloaded = Reloaded()
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        await never

    reloaded.monarch.on_engine_call = lambda endpoint, args: wait()
    waiting = asyncio.ensure_future(reloaded.bring_up_to_date())
    await until(lambda: reloaded.monarch.engine_calls)
    reloaded.reloading.process_died(proc_mesh(), 1, "of another mesh")
    reloaded.reloading.process_died(reloaded.procs, 1, "process 12 of rank 1 ended")
    with pytest.raises(RequestFailed, match="could not load the newest code: process 12 of rank 1 ended") as caught:
        await waiting
    assert caught.value.failure.kind == "supervision"
    (actors,) = reloaded.failed
    assert actors.dead == {1: "process 12 of rank 1 ended"}


# --- reload()


async def test_a_reload_is_a_call_whose_success_says_what_the_ranks_run() -> None:
    reloaded = Reloaded()
    await reloaded.reload()
    ((pending, stream),) = reloaded.calls
    assert (pending.call, pending.endpoint, pending.ranks, stream) == (5, "reload", [0, 1], stream_of(PROCS))
    assert reloaded.watched == [(PROCS, reloaded.procs)]
    assert not reloaded.procs.runs("v1", [0])
    for rank in range(2):
        assert not reloaded.procs.runs("v2", [0, 1])
        pending.add_reply(Reply(rank, False, b"report", ()), Adopted())
    assert reloaded.procs.runs("v2", [0, 1])


async def test_after_a_reload_that_raised_on_a_rank_nothing_is_known_about_any() -> None:
    reloaded = Reloaded()
    await reloaded.reload()
    ((pending, _),) = reloaded.calls
    pending.add_reply(Reply(0, False, b"report", ()), Adopted())
    pending.add_reply(Reply(1, True, b"SyntaxError", ()), Adopted())
    assert not reloaded.procs.runs("v2", [0])
    assert not reloaded.procs.runs("v1", [1])


async def test_processes_that_run_no_version_can_be_reloaded() -> None:
    reloaded = Reloaded(version=None)
    await reloaded.reload()
    ((pending, _),) = reloaded.calls
    for rank in (0, 1):
        pending.add_reply(Reply(rank, False, b"report", ()), Adopted())
    assert reloaded.procs.runs("v2", [0, 1])


async def test_a_process_that_was_only_slow_is_reloaded_again() -> None:
    reloaded = Reloaded()
    await reloaded.reload(hosts_region(1))
    await reloaded.bring_up_to_date()
    reloaded.reloading.process_died(reloaded.procs, 1, "it does not answer")
    reloaded.reloading.process_back(reloaded.procs, 1)
    await reloaded.bring_up_to_date("v3")
    await reloaded.reload(hosts_region(1))
    assert reloaded.spawned == 3  # for both ranks once more, and still the same for the slice


async def test_dead_processes_cannot_be_reloaded_but_a_slice_without_them() -> None:
    reloaded = Reloaded()
    reloaded.procs.dead[1] = "killed"
    await reloaded.reload()
    (failed,) = reloaded.sent.of(Failed)
    assert failed.failure.message.startswith("cannot reload 'procs': ranks [1] are dead. Use a slice without them")
    reloaded.procs.name = ""  # an endpoint returned it
    await reloaded.reload()
    assert reloaded.sent.of(Failed)[1].failure.message.startswith("cannot reload: ranks [1] are dead.")
    await reloaded.reload(hosts_region(1))
    assert len(reloaded.calls) == 1
