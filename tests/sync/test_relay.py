from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshgate_sync.commands import Disconnect, Finish, Keep, Link, Report, Send
from meshgate_sync.digest import NOTHING
from meshgate_sync.frames import Ack, Alive, Data, Hello, Offer, Tell, Trouble, Unwant, Want, Withdraw
from meshgate_sync.home import open_version
from meshgate_sync.plan import GATEWAY, Routes
from meshgate_sync.relay import Relay, State
from meshgate_sync.tree import EMPTY, Directory
from tests.sync.trees import Content, models, on_disk, plain
from tests.sync.village import Village, snapshot

ANY = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=80
)
NAMES = [f"h{number}" for number in range(9)]
MODEL: dict[bytes, object] = {
    b"a.py": b"one", b"d": {b"b": (b"two", True), b"l": "../a.py", b"e": {}},
    b"large": bytes(range(200)) + bytes(reversed(range(200))),
}  # fmt: skip


@pytest.fixture
def village(tmp_path: Path) -> Village:
    return Village(tmp_path, NAMES, Content())


def assert_identical(village: Village, tree: Directory, model: dict[bytes, object]) -> None:
    for name, host in village.hosts.items():
        if host.alive and name != GATEWAY:
            assert on_disk(snapshot(host, tree)) == plain(model)
            assert host.disk.store.verify() == []


def bring(village: Village, model: dict[bytes, object], base: Directory = EMPTY, **options: bool) -> Directory:
    tree = village.content.tree(model)
    village.publish(tree, base, **options)
    village.run(lambda: village.everyone_ready(tree))
    return tree


@pytest.mark.parametrize("striped", [False, True])
def test_every_host_gets_every_version(village: Village, striped: bool) -> None:
    first = bring(village, MODEL, striped=striped)
    assert_identical(village, first, MODEL)
    changed = {**MODEL, b"a.py": b"changed"}
    second = bring(village, changed, first, striped=striped)
    assert_identical(village, second, changed)


def test_pieces_that_come_with_the_offer_are_not_asked_for(village: Village) -> None:
    tree = bring(village, MODEL, inline=True)
    assert village.asked == []
    assert_identical(village, tree, MODEL)


def test_the_gateway_sends_each_piece_once_for_each_of_its_children(village: Village) -> None:
    tree = bring(village, MODEL, striped=True)
    assert village.hosts[GATEWAY].relay.piece_bytes_sent == tree.size
    for name in NAMES:
        assert village.hosts[name].received_bytes == tree.size
        assert village.hosts[name].relay.piece_bytes_sent <= 2 * tree.size


def test_pieces_are_passed_on_before_the_version_is_complete(village: Village) -> None:
    village.silent_laptop = True
    tree = village.content.tree(MODEL)
    village.publish(tree)
    village.run(lambda: len(village.asked) > 20)
    digest = village.asked[0]
    village.supply(digest)
    village.run(lambda: all(village.hosts[name].received_bytes for name in NAMES))
    assert not village.ready.get(tree.digest)


def test_a_slow_laptop_does_not_upset_the_trees(village: Village) -> None:
    village.silent_laptop = True
    tree = village.content.tree(MODEL)
    village.publish(tree, striped=True)
    end = village.now + 20
    village.run(lambda: village.now > end)
    for digest in village.asked:
        village.supply(digest)
    village.run(lambda: village.everyone_ready(tree))
    assert village.hosts[GATEWAY].relay.piece_bytes_sent == tree.size


def test_a_host_that_does_not_hold_the_base_is_told_the_whole_version(village: Village) -> None:
    village.kill("h3")
    first = bring(village, MODEL)
    village.start("h3")
    changed = {**MODEL, b"a.py": b"changed"}
    second = bring(village, changed, first)
    assert_identical(village, second, changed)


def test_a_host_asks_for_the_whole_version_when_it_cannot_follow(village: Village) -> None:
    first = bring(village, MODEL)
    for name in NAMES:
        village.kill(name)
        shutil.rmtree(village.hosts[name].home)
    second = village.content.tree({b"other": b"1"})
    village.publish(second, retire=(first,))
    for name in NAMES:
        village.start(name)
    village.run(lambda: village.everyone_ready(second))
    third_model = {**MODEL, b"a.py": b"third"}
    third = village.content.tree(third_model)
    village.publish(third, first, retire=(second,))  # the gateway holds what it builds on, the hosts no longer do
    village.run(lambda: village.everyone_ready(third))
    assert_identical(village, third, third_model)


def test_a_late_host_catches_up_by_itself(village: Village) -> None:
    for name in ("h0", "h4", "h8"):
        village.kill(name)
    tree = bring(village, MODEL, striped=True)
    for name in ("h0", "h4", "h8"):
        village.start(name)
    village.run(lambda: village.everyone_ready(tree))
    assert_identical(village, tree, MODEL)


def test_a_restarted_host_fetches_only_what_it_lost(village: Village) -> None:
    tree = bring(village, MODEL)
    village.kill("h5")
    village.ready[tree.digest].discard("h5")
    village.start("h5")
    village.run(lambda: village.everyone_ready(tree))
    assert village.hosts["h5"].received_bytes == 0


def test_a_restarted_host_gets_its_children_back(village: Village) -> None:
    bring(village, MODEL)
    head = next(name for name in village.plan.control.values() if name != GATEWAY)
    children = [name for name, parent in village.plan.control.items() if parent == head]
    village.kill(head)
    for child in children:
        village.run(lambda child=child: village.hosts[child].relay._upstream.control != head)  # type: ignore[misc]
    village.start(head)
    for child in children:
        host = village.hosts[child]
        village._do(host, lambda host=host: host.relay.moved({head}, village.now))  # type: ignore[misc]
    for child in children:
        village.run(lambda child=child: Link(child, up=False) in village.hosts[head].links)  # type: ignore[misc]
    tree = village.content.tree({**MODEL, b"new": b"version"})
    village.publish(tree, village.content.tree(MODEL))
    village.run(lambda: village.everyone_ready(tree))
    assert all(village.hosts[child].relay._upstream.control == head for child in children)


def test_versions_in_a_burst_end_with_the_last(village: Village) -> None:
    base = bring(village, MODEL)
    for number in range(5):
        model = {**MODEL, b"a.py": b"%d" % number, b"new": bytes([number]) * 100}
        tree = village.content.tree(model)
        village.publish(tree, base, retire=(base,))
        base = tree
    village.run(lambda: village.everyone_ready(base))
    assert_identical(village, base, model)


def test_what_a_withdrawn_version_shared_is_still_fetched(village: Village) -> None:
    village.silent_laptop = True
    shared = bytes(range(150))
    first, second = village.content.tree({b"f": shared}), village.content.tree({b"f": shared, b"g": b"1"})
    village.publish(first)
    village.run(lambda: len(village.asked) >= 10)
    village.publish(second, retire=(first,))
    end = village.now + 1
    village.run(lambda: village.now > end)
    for digest in list(village.asked):
        village.supply(digest)
    village.run(lambda: village.everyone_ready(second))


# --- trouble ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("striped", [False, True])
def test_a_relay_that_dies_is_routed_around(village: Village, silently: bool, striped: bool) -> None:
    tree = village.content.tree(MODEL)
    village.publish(tree, striped=striped)
    parents = set(village.plan.control.values()) - {GATEWAY}
    victim = min(parents)
    village.run(lambda: village.hosts[victim].received_bytes > 50)
    started = village.now
    village.kill(victim, silently=silently)
    village.run(lambda: village.everyone_ready(tree))
    assert village.now - started < 5
    assert_identical(village, tree, MODEL)


def test_a_relay_that_stops_answering_is_left(village: Village) -> None:
    tree = village.content.tree(MODEL)
    village.publish(tree, striped=True)
    victim = min(set(village.plan.stripes[0].values()) - {GATEWAY})
    village.run(lambda: village.hosts[victim].received_bytes > 50)
    village.freeze(victim)
    others = set(NAMES) - {victim}
    village.run(lambda: others <= village.ready.get(tree.digest, set()), 10)
    village.thaw(victim)
    village.run(lambda: village.everyone_ready(tree))
    assert_identical(village, tree, MODEL)


def test_a_cut_resumes_where_it_stopped(village: Village) -> None:
    tree = village.content.tree(MODEL)
    village.publish(tree)
    child = next(name for name, parent in village.plan.control.items() if parent == GATEWAY)
    village.run(lambda: village.hosts[child].received_bytes > 100)
    village.cut(child, GATEWAY)
    village.run(lambda: village.everyone_ready(tree))
    assert village.hosts[child].received_bytes <= tree.size + 64


def test_a_full_disk_is_reported_and_holds_up_nobody_else(village: Village) -> None:
    victim = min(set(village.plan.control.values()) - {GATEWAY})
    village.hosts[victim].full = True
    tree = village.content.tree(MODEL)
    village.publish(tree, striped=True)
    others = set(NAMES) - {victim}
    village.run(lambda: others <= village.ready.get(tree.digest, set()))
    assert village.failed == {victim: "no space"}
    village.hosts[victim].full = False
    village.publish(tree, striped=True)
    village.run(lambda: village.everyone_ready(tree))
    assert village.failed == {}
    assert_identical(village, tree, MODEL)


def test_a_corrupt_object_of_a_relay_is_fetched_again(village: Village) -> None:
    village.kill("h8")
    tree = bring(village, MODEL)
    parent = village.hosts[village.plan.control["h8"]]
    for path in (parent.home / "objects").glob("*/*"):
        path.chmod(0o644)
        path.write_bytes(bytes(path.stat().st_size))
    village.start("h8")
    village.run(lambda: village.everyone_ready(tree))
    village.run(lambda: all(host.relay.state(tree.digest) is State.READY for host in village.hosts.values()))
    assert on_disk(snapshot(village.hosts["h8"], tree)) == plain(MODEL)


def test_a_version_held_by_processes_survives_those_that_follow(village: Village) -> None:
    first = bring(village, MODEL)
    gateway = village.hosts[GATEWAY]
    village._do(gateway, lambda: gateway.relay.hold(first.digest, village.now))
    held = [open_version(str(village.hosts[name].home), first.digest.hex()) for name in NAMES]
    bring(village, {b"a": b"other"}, first)
    for name in NAMES:
        assert on_disk(snapshot(village.hosts[name], first)) == plain(MODEL)
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
    village = Village(tmp_path_factory.mktemp("village"), NAMES, Content(), seed=seed)
    pending = [{**model, b"large": bytes(range(100 + number))} for number, model in enumerate(sequence)]
    before = EMPTY

    def publish() -> dict[bytes, object]:
        nonlocal before
        model = pending.pop(0)
        tree = village.content.tree(model)
        village.publish(tree, before, striped=striped, retire=(before,))
        before = tree
        return model

    model = publish()
    for steps, fault, name in faults:
        for _ in range(steps):
            village.step()
        host = village.hosts[name]
        if fault in ("kill", "power"):
            village.kill(name, silently=fault == "power")
        elif fault == "cut":
            village.cut(name, village.plan.control[name])
        elif fault == "freeze":
            (village.thaw if host.frozen else village.freeze)(name)
        elif fault == "restart" and not host.alive:
            village.start(name)
        elif fault == "version" and pending:
            model = publish()
    for name, host in village.hosts.items():
        village.thaw(name)
        if not host.alive:
            village.start(name)
    while pending:
        model = publish()
    village.run(lambda: village.everyone_ready(before))
    village.run(
        lambda: all(host.relay.state(before.digest) is State.READY for host in village.hosts.values()), limit=300
    )
    assert_identical(village, before, model)
    village.close()


# --- one relay, by hand -------------------------------------------------------------------------------------

ROOT, OTHER, DIGEST = b"r" * 32, b"o" * 32, b"d" * 32
UP, DOWN = Link(GATEWAY, up=True), Link("child", up=False)
ROUTES = Routes((GATEWAY,), ((GATEWAY,),))


def offer_of(root: bytes, serial: int = 1, **options: object) -> Offer:
    return Offer(root, NOTHING, NOTHING, False, b"", serial=serial, **options)  # type: ignore[arg-type]


def host_relay() -> Relay:
    """A connected host with one child that has said Hello."""
    relay = Relay("host", ROUTES)
    relay.start(0.0)
    relay.connected(GATEWAY, 0.0)
    relay.accepted("child", 0.0)
    relay.received(DOWN, Hello("child", ()), 0.0)
    relay.commands()
    return relay


def test_an_acknowledgement_that_is_early_is_kept_until_the_offer_comes() -> None:
    relay = host_relay()
    relay.received(DOWN, Ack(ROOT, ("child",)), 1.0)
    assert relay.commands() == []
    relay.received(UP, offer_of(ROOT), 1.0)
    assert Send(UP, Ack(ROOT, ("child",))) in relay.commands()


def test_early_acknowledgements_of_versions_long_gone_are_dropped() -> None:
    relay = host_relay()
    for number in range(200):
        relay.received(DOWN, Ack(number.to_bytes(32, "big"), ("child",)), 1.0)
    assert len(relay._tidings._acks._early) <= 64


def test_wants_before_the_offer_are_served_after_it() -> None:
    relay = host_relay()
    relay.received(DOWN, Want(ROOT, (DIGEST,)), 1.0)
    relay.accepted("leaver", 1.0)
    relay.received(Link("leaver", up=False), Want(ROOT, (DIGEST,)), 1.0)
    relay.lost(Link("leaver", up=False), 1.0)
    relay.received(UP, offer_of(ROOT), 1.0)
    relay.begun(ROOT, {DIGEST: 4}, 1.0)
    relay.commands()
    relay.received(UP, Data(DIGEST, b"data"), 1.0)
    assert relay.commands() == [
        Keep(DIGEST, b"data"), Send(DOWN, Data(DIGEST, b"data")), Finish(ROOT, NOTHING, NOTHING)
    ]  # fmt: skip


def test_what_comes_too_late_is_ignored() -> None:
    relay = host_relay()
    relay.begun(ROOT, {}, 1.0)
    relay.base_unknown(ROOT, 1.0)
    relay.finished(ROOT, 1.0)
    relay.withdraw(ROOT, 1.0)
    relay.hold(ROOT, 1.0)
    relay.supplied(DIGEST, b"data", 1.0)
    relay.described("child", ROOT, b"", 1.0)
    relay.loaded("child", ROOT, [], (), (DIGEST,), 1.0)
    relay.received(DOWN, Tell(ROOT), 1.0)
    relay.received(Link("unknown", up=False), Tell(ROOT), 1.0)
    relay.sent(UP, 1, 1.0)
    relay.received(UP, Data(DIGEST, b"data"), 1.0)
    relay.received(UP, Alive(False), 1.0)
    assert relay.commands() == []
    relay.connected("given up", 1.0)
    assert relay.commands() == [Disconnect(Link("given up", up=True))]


def test_a_newer_offer_says_what_is_over() -> None:
    relay = host_relay()
    relay.received(UP, offer_of(ROOT), 1.0)
    relay.received(UP, offer_of(OTHER, 2, live=(ROOT,)), 1.0)
    assert relay.state(ROOT) is State.BEGINNING
    relay.received(UP, Withdraw(ROOT), 1.0)
    assert relay.state(ROOT) is None
    relay.received(UP, offer_of(ROOT, 3), 1.0)
    assert relay.state(OTHER) is None
    relay.received(UP, offer_of(OTHER, 2), 1.0)
    assert relay.state(ROOT) is State.BEGINNING


def test_a_piece_that_is_lost_again_and_again_ends_the_connection() -> None:
    relay = host_relay()
    relay.received(UP, offer_of(ROOT), 1.0)
    for _ in range(4):
        relay.begun(ROOT, {}, 1.0)
        relay.finished(ROOT, 1.0)
        relay.received(DOWN, Want(ROOT, (DIGEST,)), 1.0)
        relay.commands()
        relay.loaded("child", ROOT, [], (), (DIGEST,), 1.0)
    assert relay.commands()[-1] == Disconnect(DOWN)


def test_a_version_whose_files_are_damaged_is_looked_through_again_but_not_for_ever() -> None:
    relay = host_relay()
    relay.damaged(ROOT, 1.0)
    relay.received(UP, offer_of(ROOT), 1.0)
    for _ in range(4):
        assert relay.state(ROOT) is State.BEGINNING
        relay.begun(ROOT, {}, 1.0)
        relay.damaged(ROOT, 1.0)
    assert relay.state(ROOT) is State.FAILED
    sent = [command.message for command in relay.commands() if isinstance(command, Send)]
    (reason,) = [dict(message.failed)["host"] for message in sent if isinstance(message, Ack)]
    assert "written to" in reason


def test_a_piece_lost_while_the_version_is_looked_through_waits() -> None:
    relay = host_relay()
    relay.received(UP, offer_of(ROOT), 1.0)
    relay.loaded("child", ROOT, [], (), (DIGEST,), 1.0)
    relay.begun(ROOT, {DIGEST: 4, OTHER: 4}, 1.0)
    relay.loaded("child", ROOT, [], (), (OTHER,), 1.0)
    relay.commands()
    relay.received(UP, Data(OTHER, b"data"), 1.0)
    assert Send(DOWN, Data(OTHER, b"data")) in relay.commands()


def test_a_gateway_that_cannot_begin_says_so() -> None:
    relay = Relay(GATEWAY, None)
    relay.start(0.0)
    relay.publish(offer_of(ROOT), 0.0)
    relay.commands()
    relay.base_unknown(ROOT, 0.0)
    (report,) = relay.commands()
    assert isinstance(report, Report)
    assert dict(report.failed)[GATEWAY].startswith("the gateway does not hold")
    relay.lost(UP, 0.0)
    relay.tick(1.0)


def test_a_late_acknowledgement_does_not_count_when_the_version_is_published_again() -> None:
    relay = Relay(GATEWAY, None)
    relay.start(0.0)
    relay.accepted("child", 0.0)
    relay.received(DOWN, Hello("child", ()), 0.0)
    relay.publish(offer_of(ROOT), 0.0)
    relay.publish(offer_of(OTHER), 1.0, retire=[ROOT])
    relay.received(DOWN, Ack(ROOT, ("child",)), 1.0)
    relay.publish(offer_of(ROOT), 2.0)
    relay.tick(3.0)
    assert not [command for command in relay.commands() if isinstance(command, Report)]


def test_a_host_whose_disk_is_slow_does_not_accuse_its_parents() -> None:
    relay = host_relay()
    relay.received(UP, offer_of(ROOT), 1.0)
    relay.begun(ROOT, {DIGEST: 4}, 1.0)
    relay.commands()
    relay.pause(1.5)
    for tenth in range(15, 300):
        relay.tick(tenth / 10)
    relay.pause(30.0)
    relay.resume(30.0)
    relay.tick(30.1)
    assert not [command for command in relay.commands() if isinstance(command, Disconnect)]
    for tenth in range(302, 400):
        relay.tick(tenth / 10)
    assert Disconnect(UP) in relay.commands()


def test_what_a_host_cannot_reach_is_told_once_and_again_to_a_new_parent() -> None:
    relay = Relay("host", Routes(("h1", GATEWAY), ()))
    relay.start(0.0)
    relay.lost(Link("h1", up=True), 0.0, "cannot reach h1")
    relay.connected(GATEWAY, 0.1)
    relay.commands()
    told = Send(UP, Trouble((("host", "cannot reach h1"),)))
    for now in (0.2, 0.3):
        relay.tick(now)
    assert relay.commands().count(told) == 1
    relay.accepted("child", 0.3)
    relay.received(DOWN, Trouble((("child", "cannot reach h2"),)), 0.3)
    assert relay.commands() == [Send(UP, Trouble((("child", "cannot reach h2"),)))]
    relay.connected(GATEWAY, 0.4)
    assert Send(UP, Trouble((("host", "cannot reach h1"), ("child", "cannot reach h2")))) in relay.commands()


def test_a_child_that_takes_nothing_for_long_is_dropped() -> None:
    relay = host_relay()
    relay.received(UP, offer_of(ROOT), 1.0)
    relay.begun(ROOT, {}, 1.0)
    relay.received(DOWN, Want(ROOT, (DIGEST,)), 1.0)
    relay.loaded("child", ROOT, [(DIGEST, b"data")], (), (), 1.0)
    relay.commands()
    relay.received(UP, Alive(False), 12.0)
    relay.tick(12.0)
    assert Disconnect(DOWN) in relay.commands()
    relay.sent(DOWN, 4, 12.0)
    relay.loaded("child", ROOT, [(DIGEST, b"data")], (), (), 12.0)


def test_pieces_no_longer_wanted_are_not_sent() -> None:
    relay = host_relay()
    relay.received(UP, offer_of(ROOT), 1.0)
    relay.begun(ROOT, {DIGEST: 4, OTHER: 4}, 1.0)
    relay.received(DOWN, Want(ROOT, (DIGEST, OTHER, DIGEST)), 1.0)
    relay.received(DOWN, Unwant((DIGEST, ROOT)), 1.0)
    relay.commands()
    relay.received(UP, Data(DIGEST, b"data"), 1.0)
    assert Send(DOWN, Data(DIGEST, b"data")) not in relay.commands()
    relay.received(UP, Data(OTHER, b"data"), 1.0)
    assert Send(DOWN, Data(OTHER, b"data")) in relay.commands()
