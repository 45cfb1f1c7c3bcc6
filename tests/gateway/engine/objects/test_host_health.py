from __future__ import annotations

import pytest

from meshgate_gateway.engine.objects.host_health import AVAILABLE, HostHealth, HostState

RETURNING = AVAILABLE.lost("its pod was deleted", returns=True)
GONE = AVAILABLE.lost("it was killed", returns=False)
RESTARTED = RETURNING.restarted(same_address=False)
UNREACHABLE = RETURNING.restarted(same_address=True)
ALL = [AVAILABLE, RETURNING, GONE, RESTARTED, UNREACHABLE]


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
