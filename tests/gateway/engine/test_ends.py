"""A process that ended without a word: when the laptop is told, and with whose reason."""

from __future__ import annotations

import asyncio

import pytest

from meshgate_gateway.engine import meshes
from meshgate_gateway.engine.objects import Hosts
from meshgate_wire.messages import Done, Failed, Fault, Host, Initialized, MeshRef, Region
from tests.gateway.engine.in_memory import Laptop, on_a_loop

SOON = 0.02


@pytest.fixture(autouse=True)
def _monarch_is_silent_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshes, "REASON_TIMEOUT", SOON)


async def silent_long_enough(laptop: Laptop) -> None:
    await asyncio.sleep(3 * SOON)
    await laptop.turns()


@on_a_loop
async def test_where_nothing_of_a_host_is_left_its_own_reason_is_told_as_soon_as_there_is_one() -> None:
    laptop = Laptop()
    procs = laptop.spawn_procs(laptop.attach(), gpus=2)
    laptop.spawn_actors(procs)
    await laptop.turns()
    laptop.engine.meshes.process_ended(procs, 2, 12)
    laptop.engine.meshes.process_ended(procs, 3, 13)
    await silent_long_enough(laptop)
    assert laptop.of(Fault) == []
    laptop.engine.meshes.host_lost("workers-1", "its pod ended: OOMKilled, exit code 137")
    await laptop.settle(until=lambda: len(laptop.of(Fault)) == 2)
    assert all("(workers-1: its pod ended: OOMKilled, exit code 137)" in fault.report for fault in laptop.of(Fault))
    assert [fault.ranks for fault in laptop.of(Fault)] == [(2,), (3,)]
    await laptop.end()


@on_a_loop
async def test_where_others_of_the_host_go_on_nobody_waits_for_a_reason_of_the_host() -> None:
    laptop = Laptop()
    procs = laptop.spawn_procs(laptop.attach(), gpus=2)
    laptop.spawn_actors(procs)
    await laptop.turns()
    laptop.engine.meshes.process_ended(procs, 2, 12)
    await silent_long_enough(laptop)
    (fault,) = laptop.of(Fault)
    assert fault.report == "process 12 of rank 2 on workers-1 ended"
    await laptop.end()


@on_a_loop
async def test_a_host_that_nobody_knows_anything_of_holds_up_the_error_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meshes, "HOST_REASON_TIMEOUT", SOON)
    laptop = Laptop()
    procs = laptop.spawn_procs(laptop.attach())
    await laptop.turns()
    laptop.engine.meshes.process_ended(procs, 0, 12)
    await laptop.settle(until=lambda: laptop.of(Fault))
    assert [fault.report for fault in laptop.of(Fault)] == ["process 12 of rank 0 on workers-0 ended"]
    await laptop.end()


def initialized(laptop: Laptop, hosts: int, *, whole: bool = True) -> None:
    laptop.send(Initialized(call=9, target=MeshRef(object=hosts), whole=whole), stream=hosts)


@on_a_loop
async def test_who_waits_for_hosts_waits_for_those_that_are_made_anew() -> None:
    laptop = Laptop()
    hosts = laptop.attach()
    await laptop.turns()
    laptop.engine.meshes.host_lost("workers-1", "its pod was deleted", returns=True)
    initialized(laptop, hosts)
    await laptop.turns()
    assert laptop.of(Done) == []
    laptop.engine.meshes.host_back("workers", 1, Host(name="workers-1", address="tcp://10.0.0.9:1"))
    await laptop.settle(until=lambda: laptop.of(Done))
    await laptop.end()


@on_a_loop
async def test_a_host_that_has_ended_for_good_is_named_to_who_waits_for_it() -> None:
    laptop = Laptop()
    hosts = laptop.attach()
    await laptop.turns()
    initialized(laptop, hosts)
    laptop.engine.meshes.host_lost("workers-1", "it was killed")
    initialized(laptop, hosts)
    await laptop.settle(until=lambda: laptop.of(Failed))
    assert "mesh 'workers' has lost hosts (workers-1: it was killed)" in laptop.of(Failed)[0].failure.message
    await laptop.end()


@on_a_loop
async def test_who_only_wants_to_know_does_not_wait_for_a_host_that_has_ended() -> None:
    laptop = Laptop()
    hosts = laptop.attach()
    await laptop.turns()
    laptop.engine.meshes.host_lost("workers-1", "its pod was deleted", returns=True)
    initialized(laptop, hosts, whole=False)
    await laptop.settle(until=lambda: laptop.of(Done))
    await laptop.end()


ATTACH_FAILED = """attach failed: config push failed during attach on 1 host(s):
  - tcp:10.0.0.1:26600: reply timed out after MESH_ATTACH_CONFIG_TIMEOUT"""


def test_who_did_not_answer_when_it_was_attached_to_is_named() -> None:
    known = tuple(Host(name=f"pod-{n}", address=f"tcp://10.0.0.{n}:26600") for n in (1, 11))
    region = Region(labels=("hosts",), offset=0, sizes=(2,), strides=(1,))
    hosts = Hosts(None, "workers", known, region)
    told = meshes._not_up(hosts, ATTACH_FAILED)
    assert told.startswith("no Monarch worker answers at pod-1 (tcp://10.0.0.1:26600): see whether one runs there")
    assert told.endswith(ATTACH_FAILED)
    assert meshes._not_up(hosts, "bootstrap failed at tcp:10.0.0.1:26600") == "bootstrap failed at tcp:10.0.0.1:26600"
