from __future__ import annotations

import random

import pytest

from benchmarks.sync.simulated_cluster import Machine, Simulation
from meshgate_sync.relay.upstream import Upstream

GIGABIT = 125e6


def machines(count: int, *, seed: int = 1, failing: float = 0.0, within: float = 1.0) -> list[Machine]:
    """A tenth have 2.5 Gbit/s, a fifth 25, the rest 10; in three zones."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        speed = rng.choices([2.5, 10, 25], [0.1, 0.7, 0.2])[0] * GIGABIT
        fails_at = 0.1 + rng.random() * within if rng.random() < failing else None
        made.append(Machine(f"h{number}", speed, speed, zone=f"z{number * 3 // count}", fails_at=fails_at))
    return made


def bound(size: int, hosts: list[Machine]) -> float:
    """The minimum for any algorithm: the slowest host receives the version, and one message goes there and back."""
    return size / min(host.down for host in hosts) + 4 * hosts[0].latency


ORIGIN = Machine("", 25 * GIGABIT, 25 * GIGABIT)


def test_a_large_version_reaches_all_within_twice_the_bound() -> None:
    size, hosts = 1_000_000_000, machines(256)
    outcome = Simulation(ORIGIN, hosts, pieces=100, piece_size=size // 100).run()
    assert outcome.seconds < 2 * bound(size, hosts)
    assert outcome.sent[""] == size
    assert outcome.wasted < 0.01 * size * len(hosts)


def test_a_version_stays_within_twice_the_bound_when_machines_fail() -> None:
    size = 1_000_000_000
    hosts = machines(256, failing=0.03, within=3.0)
    assert 3 < sum(host.fails_at is not None for host in hosts) < 20
    outcome = Simulation(ORIGIN, hosts, pieces=100, piece_size=size // 100).run()
    assert outcome.seconds < 2 * bound(size, hosts)
    assert outcome.sent[""] <= 2 * size


@pytest.mark.parametrize("seed", [1, 3])
def test_a_backup_parent_for_acknowledgements_saves_a_tenth_when_machines_fail(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    hosts = machines(256, seed=seed, failing=0.03, within=bound(200_000_000, machines(256)))

    def seconds() -> float:
        return Simulation(ORIGIN, hosts, pieces=100, piece_size=2_000_000).run().seconds

    with_backup = seconds()
    monkeypatch.setattr(Upstream, "_choose_backup", lambda *_: None)
    assert with_backup < 0.9 * seconds()


def test_a_small_version_takes_one_trip_down_the_tree_and_one_up() -> None:
    hosts = [Machine(f"h{number}", 10 * GIGABIT, 10 * GIGABIT, latency=0.001, store=0.0) for number in range(512)]
    outcome = Simulation(ORIGIN, hosts, pieces=1, piece_size=5000, inline=True).run()
    # Three levels down and three up; acknowledgements are gathered for 2 ms at each.
    assert outcome.seconds < 6 * 0.002 + 4 * 0.002


def test_a_slow_host_does_not_delay_the_others() -> None:
    hosts = [Machine(f"h{number}", 10 * GIGABIT, 10 * GIGABIT) for number in range(64)]
    even = Simulation(ORIGIN, hosts, pieces=100, piece_size=2_000_000).run().seconds
    hosts[17] = Machine("h17", 0.1 * GIGABIT, 0.1 * GIGABIT)
    outcome = Simulation(ORIGIN, hosts, pieces=100, piece_size=2_000_000).run()
    others = max(time for name, time in outcome.ready.items() if name != "h17")
    assert others < even + 2.5
    assert outcome.ready["h17"] < 2.5 * 200e6 / (0.1 * GIGABIT)


def test_a_host_that_is_never_ready_is_named() -> None:
    hosts = machines(4)
    hosts.append(Machine("stuck", 1.0, 1.0))
    with pytest.raises(TimeoutError, match="stuck"):
        Simulation(ORIGIN, hosts, pieces=4, piece_size=1000).run(limit=5)
