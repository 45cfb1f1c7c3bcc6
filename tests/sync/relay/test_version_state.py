from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path

import pytest

from meshgate_sync.relay.frames import Offer
from meshgate_sync.relay.plan import GATEWAY
from meshgate_sync.relay.version_state import (
    TRANSITIONS,
    InvalidTransition,
    Version,
    VersionEvent,
    VersionLog,
    VersionState,
)
from meshgate_sync.tree.tree import NOTHING
from tests.sync.trees import Content
from tests.sync.virtual_cluster import VirtualCluster

ROOT = bytes.fromhex("3f9c0a41d2e7") + bytes(26)
ALL = list(itertools.product(VersionState, VersionEvent))
NAMES = [f"h{number}" for number in range(9)]
MODEL: dict[bytes, object] = {b"a.py": b"one", b"large": bytes(range(200))}
PACKAGE = "meshgate_sync.relay"


def version(state: VersionState) -> Version:
    return Version(Offer(ROOT, NOTHING, NOTHING, False, b""), 1, state)


@pytest.mark.parametrize(("state", "event"), [pair for pair in ALL if pair[1] in TRANSITIONS[pair[0]]])
def test_an_event_in_the_table_changes_the_state(state: VersionState, event: VersionEvent) -> None:
    changed = version(state)
    changed.apply(event)
    assert changed.state is TRANSITIONS[state][event]


@pytest.mark.parametrize(("state", "event"), [pair for pair in ALL if pair[1] not in TRANSITIONS[pair[0]]])
def test_any_other_event_raises_and_changes_nothing(state: VersionState, event: VersionEvent) -> None:
    unchanged = version(state)
    with pytest.raises(
        InvalidTransition, match=f"version 3f9c0a41d2e7 is {state.value}: event '{event.value}'"
    ) as error:
        unchanged.apply(event)
    assert (error.value.state, error.value.event) == (state, event)
    assert unchanged.state is state


def test_the_table_has_every_state_and_uses_every_event() -> None:
    assert TRANSITIONS.keys() == set(VersionState)
    assert {event for events in TRANSITIONS.values() for event in events} == set(VersionEvent)


def test_every_state_leads_to_ready_and_none_but_failure_is_reached_from_all() -> None:
    reaching = {VersionState.READY}
    while more := {state for state in TRANSITIONS if reaching & set(TRANSITIONS[state].values())} - reaching:
        reaching |= more
    assert reaching == set(VersionState)
    always = set.intersection(*(set(events.values()) for events in TRANSITIONS.values()))
    assert always == {VersionState.FAILED}


def test_missing_pieces_are_known_only_while_they_are_fetched() -> None:
    fetching = version(VersionState.FETCHING)
    with pytest.raises(AssertionError):
        fetching.validate_state()
    fetching.missing = {ROOT: 4}
    fetching.validate_state()
    fetching.state = VersionState.READY
    with pytest.raises(AssertionError):
        fetching.validate_state()


def lines_of(caplog: pytest.LogCaptureFixture, digest: str) -> list[str]:
    """What a reader gets from the logs of all nodes by searching for the digest alone."""
    return [message for message in caplog.messages if message.startswith(f"version={digest} ")]


def of_node(lines: list[str], name: str) -> list[str]:
    """The events at one node."""
    return [line.split(" ", 2)[2] for line in lines if f" node={name} " in line]


@pytest.fixture
def cluster(tmp_path: Path) -> VirtualCluster:
    return VirtualCluster(tmp_path, NAMES, Content())


def test_one_version_is_followed_through_three_levels_by_its_digest(
    cluster: VirtualCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, PACKAGE)
    tree, other = cluster.content.tree(MODEL), cluster.content.tree({b"b": b"other"})
    cluster.publish(other)
    cluster.publish(tree)
    cluster.run(lambda: cluster.everyone_ready(tree) and cluster.everyone_ready(other))

    lines = lines_of(caplog, tree.digest.hex()[:12])
    tree_of = cluster.plan.control
    leaf, parent, top = next(
        (name, tree_of[name], tree_of[tree_of[name]])
        for name in NAMES
        if GATEWAY not in (tree_of[name], tree_of.get(tree_of[name]))
    )
    for node, above in ((leaf, parent), (parent, top), (top, "gateway")):
        events = of_node(lines, node)
        expected = [
            rf"offered peer={above} .*",
            r"PREPARING -> FETCHING event=PREPARED missing=\d+",
            rf"requested peer={above} pieces=\d+",
            rf"received first piece peer={above}",
            rf"received last piece peer={above} pieces=\d+",
            r"FETCHING -> FINISHING event=COMPLETED",
            r"FINISHING -> READY event=FINISHED",
            rf"acknowledged peer={above} ready=\d+ failed=0",
        ]
        positions = [
            next(place for place, event in enumerate(events) if re.fullmatch(pattern, event)) for pattern in expected
        ]
        assert positions == sorted(positions)
    assert f"received request peer={leaf} pieces=14" in of_node(lines, parent)
    assert "acknowledged ready=1 failed=0" in of_node(lines, "gateway")
    assert not [line for line in lines if other.digest.hex()[:12] in line]


def test_a_dead_parent_and_its_replacement_are_in_the_log(
    cluster: VirtualCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, PACKAGE)
    tree = cluster.content.tree(MODEL)
    cluster.publish(tree)
    victim = min(set(cluster.plan.control.values()) - {GATEWAY})
    cluster.run(lambda: cluster.hosts[victim].received_bytes > 50)
    cluster.kill(victim)
    cluster.run(lambda: cluster.everyone_ready(tree))
    child = next(name for name, parent in cluster.plan.control.items() if parent == victim)
    events = of_node(lines_of(caplog, tree.digest.hex()[:12]), child)
    replaced = next(place for place, event in enumerate(events) if event.startswith(f"replacing peer={victim} "))
    assert events[replaced + 1].startswith("requested peer=")
    assert any(
        message.startswith(f"node={child} changed parent lane=control from={victim} ") for message in caplog.messages
    )


def test_a_failure_is_logged_with_its_reason(cluster: VirtualCluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, PACKAGE)
    cluster.hosts["h0"].full = True
    tree = cluster.content.tree(MODEL)
    cluster.publish(tree)
    cluster.run(lambda: "h0" in cluster.failed)
    events = of_node(lines_of(caplog, tree.digest.hex()[:12]), "h0")
    assert "FETCHING -> FAILED event=STORE_FAILED reason='no space'" in events


def test_nothing_is_logged_unless_debug_is_enabled(cluster: VirtualCluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, PACKAGE)
    tree = cluster.content.tree(MODEL)
    cluster.publish(tree)
    cluster.run(lambda: cluster.everyone_ready(tree))
    assert caplog.messages == []


def test_the_gateway_and_its_peers_are_named(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(PACKAGE)
    caplog.set_level(logging.DEBUG, PACKAGE)
    VersionLog(logger, "")(b"\xab" * 32, "requested", "h1", pieces=2)
    VersionLog(logger, "h1")(b"\xab" * 32, "acknowledged", "")
    assert caplog.messages == [
        "version=abababababab node=gateway requested peer=h1 pieces=2",
        "version=abababababab node=h1 acknowledged peer=gateway",
    ]
