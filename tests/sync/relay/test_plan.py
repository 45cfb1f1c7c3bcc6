from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_sync.relay.plan import GATEWAY, HostSlot, plan

counts = st.integers(1, 200)
fanouts = st.integers(1, 9)


def slots(count: int) -> list[HostSlot]:
    return [HostSlot(f"h{number}", zone=f"z{number % 3}", node=f"n{number % 11}") for number in range(count)]


def depth(tree: dict[str, str], name: str) -> int:
    steps = 0
    while name != GATEWAY:
        name = tree[name]
        steps += 1
        assert steps <= len(tree)
    return steps


@given(counts, fanouts, st.integers(1, 5))
def test_every_tree_reaches_every_host_within_its_fanout(count: int, fanout: int, stripes: int) -> None:
    made = plan(slots(count), fanout=fanout, stripes=stripes)
    assert max(Counter(made.control.values()).values()) <= fanout
    for tree in (made.control, *made.stripes):
        assert tree.keys() == {slot.name for slot in slots(count)}
        assert all(depth(tree, name) for name in tree)
    for tree in made.stripes:
        assert max(Counter(tree.values()).values()) <= stripes
        assert Counter(tree.values())[GATEWAY] == 1


@given(counts, st.integers(2, 5))
def test_every_host_sends_about_as_much_as_it_receives(count: int, stripes: int) -> None:
    made = plan(slots(count), stripes=stripes)
    passed_on = Counter(parent for tree in made.stripes for parent in tree.values())
    assert max(passed_on.values()) <= 2 * stripes


@given(counts, fanouts)
def test_every_parent_on_a_route_is_nearer_to_the_gateway(count: int, fanout: int) -> None:
    made = plan(slots(count), fanout=fanout)
    trees = (made.control, *made.stripes)
    for name, routes in made.routes.items():
        for tree, route in zip(trees, (routes.control, *routes.stripes), strict=True):
            assert route[0] == tree[name]
            assert route[-1] == GATEWAY
            assert len(set(route)) == len(route)
            for parent in route:
                assert parent == GATEWAY or depth(tree, parent) < depth(tree, name)


def test_the_depth_is_logarithmic() -> None:
    made = plan(slots(4096))
    assert max(depth(made.control, name) for name in made.control) == 4
    assert max(depth(tree, name) for tree in made.stripes for name in tree) == 7


def test_siblings_of_a_dead_host_spread_over_its_own_siblings() -> None:
    made = plan(slots(64), fanout=4)
    children: dict[str, list[str]] = {}
    for child, parent in made.control.items():
        children.setdefault(parent, []).append(child)
    parent = next(name for name in children if name != GATEWAY and len(children[name]) == 4)
    assert len({made.routes[child].control[1] for child in children[parent]}) >= 3


def test_few_links_cross_zones() -> None:
    hosts = [HostSlot(f"h{number}", zone=f"z{number % 4}") for number in range(400)]
    zones = {host.name: host.zone for host in hosts}
    made = plan(hosts)
    for tree in (made.control, *made.stripes):
        crossing = sum(1 for child, parent in tree.items() if parent != GATEWAY and zones[child] != zones[parent])
        assert crossing < len(hosts) / 10


def crossings(hosts: list[HostSlot], tree: dict[str, str], kind: str) -> int:
    of = {host.name: getattr(host, kind) for host in hosts}
    return sum(1 for child, parent in tree.items() if parent != GATEWAY and of[child] != of[parent])


def test_most_hosts_have_a_parent_on_their_own_node() -> None:
    hosts = [HostSlot(f"h{n}", zone=f"z{n % 2}", node=f"z{n % 2}n{n // 2 % 8}") for n in range(256)]  # 16 to a node
    made = plan(hosts)
    assert crossings(hosts, made.control, "node") <= 256 / 5
    assert all(crossings(hosts, tree, "node") <= 256 / 2.5 for tree in made.stripes)
    unplaced = plan([HostSlot(host.name) for host in hosts])
    assert crossings(hosts, unplaced.control, "node") > 200  # without knowing the nodes


def test_sixteen_hosts_in_two_zones_have_one_link_across() -> None:
    hosts = [HostSlot(f"h{number}", zone=f"z{number % 2}") for number in range(16)]
    assert crossings(hosts, plan(hosts).control, "zone") <= 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_few_hosts_are_children_of_the_gateway(count: int) -> None:
    made = plan(slots(count))
    assert set(made.control.values()) == {GATEWAY}


def test_no_hosts_have_an_empty_plan() -> None:
    assert plan([]).routes == {}
