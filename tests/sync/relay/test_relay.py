from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshgate_sync.relay.commands import PeerLink
from meshgate_sync.relay.plan import GATEWAY
from meshgate_sync.relay.version_state import VersionState
from meshgate_sync.store.home import open_version
from meshgate_sync.tree.tree import EMPTY, Directory
from tests.sync.trees import Content, models, on_disk, plain
from tests.sync.virtual_cluster import VirtualCluster

ANY = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=80
)
NAMES = [f"h{number}" for number in range(9)]
MODEL: dict[bytes, object] = {
    b"a.py": b"one", b"d": {b"b": (b"two", True), b"l": "../a.py", b"e": {}},
    b"large": bytes(range(200)) + bytes(reversed(range(200))),
}  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> VirtualCluster:
    return VirtualCluster(tmp_path, NAMES, Content())


def assert_identical(cluster: VirtualCluster, tree: Directory, model: dict[bytes, object]) -> None:
    for name, host in cluster.hosts.items():
        if host.alive and name != GATEWAY:
            assert on_disk(host.snapshot(tree)) == plain(model)
            assert host.disk.store.verify() == []


def distribute(
    cluster: VirtualCluster, model: dict[bytes, object], base: Directory = EMPTY, **options: bool
) -> Directory:
    tree = cluster.content.tree(model)
    cluster.publish(tree, base, **options)
    cluster.run(lambda: cluster.everyone_ready(tree))
    return tree


@pytest.mark.parametrize("striped", [False, True])
def test_every_host_gets_every_version(cluster: VirtualCluster, striped: bool) -> None:
    first = distribute(cluster, MODEL, striped=striped)
    assert_identical(cluster, first, MODEL)
    changed = {**MODEL, b"a.py": b"changed"}
    second = distribute(cluster, changed, first, striped=striped)
    assert_identical(cluster, second, changed)


def test_pieces_that_come_with_the_offer_are_not_requested(cluster: VirtualCluster) -> None:
    tree = distribute(cluster, MODEL, inline=True)
    assert cluster.requested == []
    assert_identical(cluster, tree, MODEL)


def test_the_gateway_sends_each_piece_once_for_each_of_its_children(cluster: VirtualCluster) -> None:
    tree = distribute(cluster, MODEL, striped=True)
    assert cluster.hosts[GATEWAY].relay.piece_bytes_sent == tree.size
    for name in NAMES:
        assert cluster.hosts[name].received_bytes == tree.size
        assert cluster.hosts[name].relay.piece_bytes_sent <= 2 * tree.size


def test_pieces_are_passed_on_before_the_version_is_complete(cluster: VirtualCluster) -> None:
    cluster.client_is_silent = True
    tree = cluster.content.tree(MODEL)
    cluster.publish(tree)
    cluster.run(lambda: len(cluster.requested) > 20)
    digest = cluster.requested[0]
    cluster.supply(digest)
    cluster.run(lambda: all(cluster.hosts[name].received_bytes for name in NAMES))
    assert not cluster.ready.get(tree.digest)


def test_a_slow_client_does_not_make_hosts_change_parents(cluster: VirtualCluster) -> None:
    cluster.client_is_silent = True
    tree = cluster.content.tree(MODEL)
    cluster.publish(tree, striped=True)
    end = cluster.now + 20
    cluster.run(lambda: cluster.now > end)
    for digest in cluster.requested:
        cluster.supply(digest)
    cluster.run(lambda: cluster.everyone_ready(tree))
    assert cluster.hosts[GATEWAY].relay.piece_bytes_sent == tree.size


def test_a_host_without_the_base_gets_the_full_delta(cluster: VirtualCluster) -> None:
    cluster.kill("h3")
    first = distribute(cluster, MODEL)
    cluster.start("h3")
    changed = {**MODEL, b"a.py": b"changed"}
    second = distribute(cluster, changed, first)
    assert_identical(cluster, second, changed)


def test_a_host_requests_the_full_delta_if_it_does_not_have_the_base(cluster: VirtualCluster) -> None:
    first = distribute(cluster, MODEL)
    for name in NAMES:
        cluster.kill(name)
        shutil.rmtree(cluster.hosts[name].home)
    second = cluster.content.tree({b"other": b"1"})
    cluster.publish(second, retire=(first,))
    for name in NAMES:
        cluster.start(name)
    cluster.run(lambda: cluster.everyone_ready(second))
    third_model = {**MODEL, b"a.py": b"third"}
    third = cluster.content.tree(third_model)
    cluster.publish(third, first, retire=(second,))  # the gateway has the base, the hosts no longer do
    cluster.run(lambda: cluster.everyone_ready(third))
    assert_identical(cluster, third, third_model)


def test_a_late_host_catches_up(cluster: VirtualCluster) -> None:
    for name in ("h0", "h4", "h8"):
        cluster.kill(name)
    tree = distribute(cluster, MODEL, striped=True)
    for name in ("h0", "h4", "h8"):
        cluster.start(name)
    cluster.run(lambda: cluster.everyone_ready(tree))
    assert_identical(cluster, tree, MODEL)


def test_a_restarted_host_fetches_only_what_it_lost(cluster: VirtualCluster) -> None:
    tree = distribute(cluster, MODEL)
    cluster.kill("h5")
    cluster.ready[tree.digest].discard("h5")
    cluster.start("h5")
    cluster.run(lambda: cluster.everyone_ready(tree))
    assert cluster.hosts["h5"].received_bytes == 0


def test_a_restarted_host_gets_its_children_back(cluster: VirtualCluster) -> None:
    distribute(cluster, MODEL)
    head = next(name for name in cluster.plan.control.values() if name != GATEWAY)
    children = [name for name, parent in cluster.plan.control.items() if parent == head]
    cluster.kill(head)
    for child in children:
        cluster.run(lambda child=child: cluster.hosts[child].relay._upstream.control != head)  # type: ignore[misc]
    cluster.start(head)
    for child in children:
        host = cluster.hosts[child]
        cluster.call(host, lambda host=host: host.relay.restarted({head}, cluster.now))  # type: ignore[misc]
    for child in children:
        cluster.run(lambda child=child: PeerLink(child, up=False) in cluster.hosts[head].links)  # type: ignore[misc]
    tree = cluster.content.tree({**MODEL, b"new": b"version"})
    cluster.publish(tree, cluster.content.tree(MODEL))
    cluster.run(lambda: cluster.everyone_ready(tree))
    assert all(cluster.hosts[child].relay._upstream.control == head for child in children)


def test_a_burst_of_versions_ends_with_the_last(cluster: VirtualCluster) -> None:
    base = distribute(cluster, MODEL)
    for number in range(5):
        model = {**MODEL, b"a.py": b"%d" % number, b"new": bytes([number]) * 100}
        tree = cluster.content.tree(model)
        cluster.publish(tree, base, retire=(base,))
        base = tree
    cluster.run(lambda: cluster.everyone_ready(base))
    assert_identical(cluster, base, model)


def test_pieces_shared_with_a_withdrawn_version_are_still_fetched(cluster: VirtualCluster) -> None:
    cluster.client_is_silent = True
    shared = bytes(range(150))
    first, second = cluster.content.tree({b"f": shared}), cluster.content.tree({b"f": shared, b"g": b"1"})
    cluster.publish(first)
    cluster.run(lambda: len(cluster.requested) >= 10)
    cluster.publish(second, retire=(first,))
    end = cluster.now + 1
    cluster.run(lambda: cluster.now > end)
    for digest in list(cluster.requested):
        cluster.supply(digest)
    cluster.run(lambda: cluster.everyone_ready(second))


# --- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("striped", [False, True])
def test_a_dead_relay_is_replaced(cluster: VirtualCluster, silently: bool, striped: bool) -> None:
    tree = cluster.content.tree(MODEL)
    cluster.publish(tree, striped=striped)
    parents = set(cluster.plan.control.values()) - {GATEWAY}
    victim = min(parents)
    cluster.run(lambda: cluster.hosts[victim].received_bytes > 50)
    started = cluster.now
    cluster.kill(victim, silently=silently)
    cluster.run(lambda: cluster.everyone_ready(tree))
    assert cluster.now - started < 5
    assert_identical(cluster, tree, MODEL)


def test_a_frozen_relay_is_replaced(cluster: VirtualCluster) -> None:
    tree = cluster.content.tree(MODEL)
    cluster.publish(tree, striped=True)
    victim = min(set(cluster.plan.stripes[0].values()) - {GATEWAY})
    cluster.run(lambda: cluster.hosts[victim].received_bytes > 50)
    cluster.freeze(victim)
    others = set(NAMES) - {victim}
    cluster.run(lambda: others <= cluster.ready.get(tree.digest, set()), 10)
    cluster.thaw(victim)
    cluster.run(lambda: cluster.everyone_ready(tree))
    assert_identical(cluster, tree, MODEL)


def test_a_cut_connection_resumes_where_it_stopped(cluster: VirtualCluster) -> None:
    tree = cluster.content.tree(MODEL)
    cluster.publish(tree)
    child = next(name for name, parent in cluster.plan.control.items() if parent == GATEWAY)
    cluster.run(lambda: cluster.hosts[child].received_bytes > 100)
    cluster.cut(child, GATEWAY)
    cluster.run(lambda: cluster.everyone_ready(tree))
    assert cluster.hosts[child].received_bytes <= tree.size + 64


def test_a_full_disk_is_reported_and_delays_no_other_host(cluster: VirtualCluster) -> None:
    victim = min(set(cluster.plan.control.values()) - {GATEWAY})
    cluster.hosts[victim].full = True
    tree = cluster.content.tree(MODEL)
    cluster.publish(tree, striped=True)
    others = set(NAMES) - {victim}
    cluster.run(lambda: others <= cluster.ready.get(tree.digest, set()))
    assert cluster.failed == {victim: "no space"}
    cluster.hosts[victim].full = False
    cluster.publish(tree, striped=True)
    cluster.run(lambda: cluster.everyone_ready(tree))
    assert cluster.failed == {}
    assert_identical(cluster, tree, MODEL)


def test_a_corrupt_object_of_a_relay_is_fetched_again(cluster: VirtualCluster) -> None:
    cluster.kill("h8")
    tree = distribute(cluster, MODEL)
    parent = cluster.hosts[cluster.plan.control["h8"]]
    for path in (parent.home / "objects").glob("*/*"):
        path.chmod(0o644)
        path.write_bytes(bytes(path.stat().st_size))
    cluster.start("h8")
    cluster.run(lambda: cluster.everyone_ready(tree))
    cluster.run(lambda: all(host.relay.state(tree.digest) is VersionState.READY for host in cluster.hosts.values()))
    assert on_disk(cluster.hosts["h8"].snapshot(tree)) == plain(MODEL)


def test_a_version_held_by_processes_survives_those_that_follow(cluster: VirtualCluster) -> None:
    first = distribute(cluster, MODEL)
    gateway = cluster.hosts[GATEWAY]
    cluster.call(gateway, lambda: gateway.relay.versions.hold(first.digest, cluster.now))
    held = [open_version(str(cluster.hosts[name].home), first.digest.hex()) for name in NAMES]
    distribute(cluster, {b"a": b"other"}, first)
    for name in NAMES:
        assert on_disk(cluster.hosts[name].snapshot(first)) == plain(MODEL)
    for version in held:
        version.close()


faults = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.sampled_from(["kill", "power", "cut", "freeze", "restart", "version"]),
        st.sampled_from(NAMES),
    ),
    max_size=8,
)


def inject(cluster: VirtualCluster, fault: str, name: str) -> None:
    host = cluster.hosts[name]
    if fault in ("kill", "power"):
        cluster.kill(name, silently=fault == "power")
    elif fault == "cut":
        cluster.cut(name, cluster.plan.control[name])
    elif fault == "freeze":
        (cluster.thaw if host.frozen else cluster.freeze)(name)
    elif fault == "restart" and not host.alive:
        cluster.start(name)


@given(
    seed=st.integers(0, 1000), sequence=st.lists(models, min_size=1, max_size=4), faults=faults, striped=st.booleans()
)
@ANY
def test_any_sequence_of_versions_and_faults_ends_byte_identical(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    sequence: list[dict[bytes, object]],
    faults: list[tuple[int, str, str]],
    striped: bool,
) -> None:
    cluster = VirtualCluster(tmp_path_factory.mktemp("cluster"), NAMES, Content(), seed=seed)
    pending = [{**model, b"large": bytes(range(100 + number))} for number, model in enumerate(sequence)]
    before = EMPTY

    def publish() -> dict[bytes, object]:
        nonlocal before
        model = pending.pop(0)
        tree = cluster.content.tree(model)
        cluster.publish(tree, before, striped=striped, retire=(before,))
        before = tree
        return model

    model = publish()
    for steps, fault, name in faults:
        for _ in range(steps):
            cluster.step()
        if fault == "version" and pending:
            model = publish()
        else:
            inject(cluster, fault, name)
    for name, host in cluster.hosts.items():
        cluster.thaw(name)
        if not host.alive:
            cluster.start(name)
    while pending:
        model = publish()
    cluster.run(lambda: cluster.everyone_ready(before))
    cluster.run(
        lambda: all(host.relay.state(before.digest) is VersionState.READY for host in cluster.hosts.values()), limit=300
    )
    assert_identical(cluster, before, model)
    cluster.close()
