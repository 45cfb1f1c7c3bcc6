from __future__ import annotations

import asyncio

import pytest

from meshgate_gateway.engine.objects.records import (
    AVAILABLE,
    MAX_ENDPOINTS,
    MAX_SLICES,
    OTHER_ENDPOINTS,
    CallTotals,
    HostHealth,
    HostState,
    remember,
)
from meshgate_gateway.engine.objects.regions import hosts_region
from meshgate_wire.messages import Host
from tests.gateway.engine.fakes import actor_mesh, host_mesh, proc_mesh

REPLACEMENT = Host(name="workers-1b", address="tcp://10.0.0.9:1")
RETURNING = AVAILABLE.lost("its pod was deleted", returns=True)
GONE = AVAILABLE.lost("it was killed", returns=False)
RESTARTED = RETURNING.restarted(same_address=False)
UNREACHABLE = RETURNING.restarted(same_address=True)
ALL = [AVAILABLE, RETURNING, GONE, RESTARTED, UNREACHABLE]


# --- calls


def test_what_a_call_is_expected_to_take_follows_the_last_calls() -> None:
    totals = CallTotals()
    totals.sent_alone()
    assert totals.expected is None
    totals.took(1.0)
    assert totals.expected == 1.0
    for _ in range(20):
        totals.took(0.0)
    assert 0 < totals.expected < 0.01
    totals.took(1.0)
    assert 0.2 < totals.expected < 0.3
    before = totals.expected
    totals.sent_alone()
    assert totals.expected < before


# --- the hosts of a mesh


def test_a_mesh_is_attached_again_once_its_last_missing_host_is_back() -> None:
    hosts = host_mesh(3)
    hosts.host_lost("workers-0", "evicted", returns=True)
    hosts.host_lost("workers-1", "evicted", returns=True)
    assert not hosts.host_restarted(1, REPLACEMENT, same_address=False)
    assert not hosts.must_attach
    assert hosts.names == ("workers-0", "workers-1b", "workers-2")
    assert set(hosts.missing) == {"workers-0", "workers-1b"}
    assert hosts.host_restarted(0, Host(name="workers-0", address="tcp://10.0.0.8:1"), same_address=False)
    assert hosts.must_attach
    assert hosts.missing == {}


def test_a_host_back_at_its_old_address_keeps_the_mesh_unusable() -> None:
    hosts = host_mesh()
    hosts.host_lost("workers-1", "evicted", returns=True)
    assert not hosts.host_restarted(1, hosts.hosts[1], same_address=True)
    assert not hosts.must_attach
    assert hosts.health("workers-1").state is HostState.UNREACHABLE


@pytest.mark.parametrize(
    ("returns", "remedy"),
    [
        (True, "until they are replaced. Wait for them with hosts.initialized.get(timeout=...)"),
        (False, "in this session"),
    ],
)
async def test_no_host_can_be_used_if_one_is_lost_before_all_have_answered(returns: bool, remedy: str) -> None:
    hosts = host_mesh(3)
    hosts.attaching = asyncio.get_running_loop().create_future()
    hosts.host_lost("workers-1", "evicted", returns=returns)
    assert hosts.missing_among(["workers-0"]) == (
        "mesh 'workers' has lost hosts (workers-1: evicted) before the gateway had reached all of them, so none can be "
        f"used {remedy}"
    )
    assert hosts.host_restarted(1, REPLACEMENT, same_address=False)
    assert hosts.missing_among(hosts.names) == ""
    hosts.attaching = asyncio.get_running_loop().create_future()
    hosts.attaching.set_result(None)
    hosts.host_lost("workers-1b", "evicted", returns=True)
    assert hosts.missing_among(["workers-0"]) == ""


def test_missing_hosts_are_named_with_their_reasons_and_others_are_not() -> None:
    hosts = host_mesh(3)
    hosts.host_lost("workers-1", "OOMKilled", returns=False)
    assert hosts.missing_among(["workers-0", "workers-2"]) == ""
    assert hosts.missing_among(["workers-1", "workers-0", "workers-1"]) == (
        "mesh 'workers' has lost hosts (workers-1: OOMKilled). Spawn on a slice of the remaining hosts"
    )


def test_hosts_that_are_being_replaced_can_be_waited_for() -> None:
    hosts = host_mesh(3)
    hosts.host_lost("workers-1", "evicted", returns=True)
    assert hosts.missing_among(["workers-1"]) == (
        "mesh 'workers' has lost hosts (workers-1: evicted), which are being replaced. Wait for them with "
        "hosts.initialized.get(timeout=...), or spawn on a slice of the remaining hosts"
    )
    hosts.host_lost("workers-2", "OOMKilled", returns=False)
    assert hosts.missing_among(hosts.names).endswith(". Spawn on a slice of the remaining hosts")


# --- the code that processes run


def test_processes_run_the_version_they_started_from() -> None:
    procs = proc_mesh(version="v1", gpus=2)
    assert procs.runs("v1", [0, 1, 2, 3])
    assert not procs.runs("v2", [0])


def test_a_rank_runs_no_known_version_while_it_is_reloaded() -> None:
    procs = proc_mesh(version="v1", gpus=2)
    reload = procs.reload_started([1, 2])
    assert procs.runs("v1", [0, 3])
    assert not procs.runs("v1", [1])
    procs.reload_finished(reload, [1, 2], "v2")
    assert procs.runs("v2", [1, 2])
    assert procs.runs("v1", [0, 3])


def test_a_reload_that_another_overtook_does_not_decide_what_a_rank_runs() -> None:
    procs = proc_mesh(version="v1", gpus=2)
    first, second = procs.reload_started([0, 1]), procs.reload_started([1])
    procs.reload_finished(first, [0, 1], "v2")
    assert procs.runs("v2", [0])
    assert not procs.runs("v2", [1])
    procs.reload_finished(second, [1], "v3")
    assert procs.runs("v3", [1])


# --- where ranks are


def test_the_host_of_a_rank_follows_from_the_order_of_spawning() -> None:
    procs = proc_mesh(gpus=2)
    assert [procs.host_of(rank) for rank in range(4)] == ["workers-0", "workers-0", "workers-1", "workers-1"]
    assert procs.host_of(4) == ""


def test_the_host_of_a_rank_is_unknown_if_an_endpoint_returned_the_mesh() -> None:
    procs = proc_mesh()
    procs.host_names = ()
    assert procs.host_of(0) == ""


def test_the_oldest_slice_is_evicted() -> None:
    slices: dict[object, int] = {}
    for offset in range(MAX_SLICES + 1):
        assert remember(slices, hosts_region(1, offset), offset) == offset  # type: ignore[arg-type]
    assert len(slices) == MAX_SLICES
    assert hosts_region(1, 0) not in slices
    assert hosts_region(1, MAX_SLICES) in slices


def test_calls_of_endless_endpoints_are_counted_together() -> None:
    actors = actor_mesh()
    for number in range(MAX_ENDPOINTS + 2):
        actors.totals_of(f"step{number}").ended += 1
    assert len(actors.totals) == MAX_ENDPOINTS + 1
    assert (actors.totals["step0"].ended, actors.totals[OTHER_ENDPOINTS].ended) == (1, 2)


@pytest.mark.parametrize("before", ALL, ids=str)
def test_a_host_can_be_lost_in_any_state(before: HostHealth) -> None:
    assert before.lost("OOMKilled", returns=True) == HostHealth(HostState.RETURNING, "OOMKilled")
    assert before.lost("OOMKilled", returns=False) == HostHealth(HostState.GONE, "OOMKilled")


@pytest.mark.parametrize("before", ALL, ids=str)
def test_a_host_can_restart_in_any_state(before: HostHealth) -> None:
    assert before.restarted(same_address=False).state is HostState.RESTARTED
    assert before.restarted(same_address=True).state is HostState.UNREACHABLE


@pytest.mark.parametrize(
    ("health", "available", "ready_to_attach", "permanent"),
    [
        (AVAILABLE, True, True, False),
        (RETURNING, False, False, False),
        (GONE, False, False, True),
        (RESTARTED, False, True, False),
        (UNREACHABLE, False, False, True),
    ],
)
def test_each_state_decides_what_the_mesh_can_do(
    health: HostHealth, available: bool, ready_to_attach: bool, permanent: bool
) -> None:
    assert (health.available, health.ready_to_attach, health.permanent) == (available, ready_to_attach, permanent)


def test_a_lost_host_reads_as_the_reason_and_a_restarted_one_as_what_to_do() -> None:
    assert str(RETURNING) == "its pod was deleted"
    assert str(GONE) == "it was killed"
    assert str(RESTARTED) == "the host has restarted; its mesh is usable again once all hosts are back"
    assert str(UNREACHABLE) == "the host has restarted at its old address; start a new session to use it"
