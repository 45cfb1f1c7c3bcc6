"""The versions at one relay, driven by hand: events in, commands out."""

from __future__ import annotations

import pytest

from meshgate_sync.relay.commands import Disconnect, Finish, PeerLink, Prepare, ReportStatus, Send, StorePiece
from meshgate_sync.relay.frames import (
    Ack,
    Cancel,
    Data,
    Heartbeat,
    Hello,
    Offer,
    RequestFullDelta,
    Unreachable,
    Want,
    Withdraw,
)
from meshgate_sync.relay.plan import GATEWAY, Routes
from meshgate_sync.relay.relay import Relay
from meshgate_sync.relay.version_state import VersionState
from meshgate_sync.relay.versions import PendingRequests, Requests
from meshgate_sync.tree.tree import NOTHING

ROOT, OTHER, DIGEST = b"r" * 32, b"o" * 32, b"d" * 32
UP, DOWN = PeerLink(GATEWAY, up=True), PeerLink("child", up=False)
ROUTES = Routes((GATEWAY,), ((GATEWAY,),))
ONE, OTHER_PENDING_REQUESTS = b"1" * 32, b"2" * 32


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


def attempt_of(relay: Relay) -> int:
    """The attempt that the last Prepare began."""
    return relay.versions._attempts


def test_an_early_acknowledgement_is_kept_until_the_offer_arrives() -> None:
    relay = host_relay()
    relay.received(DOWN, Ack(ROOT, ("child",)), 1.0)
    assert relay.commands() == []
    relay.received(UP, offer_of(ROOT), 1.0)
    assert Send(UP, Ack(ROOT, ("child",))) in relay.commands()


def test_early_acknowledgements_of_old_versions_are_dropped() -> None:
    relay = host_relay()
    for number in range(200):
        relay.received(DOWN, Ack(number.to_bytes(32, "big"), ("child",)), 1.0)
    assert len(relay._status._acks._early) <= 64


def test_wants_that_arrive_before_the_offer_are_served_after_it() -> None:
    relay = host_relay()
    relay.received(DOWN, Want(ROOT, (DIGEST,)), 1.0)
    relay.accepted("leaving", 1.0)
    relay.received(PeerLink("leaving", up=False), Want(ROOT, (DIGEST,)), 1.0)
    relay.lost(PeerLink("leaving", up=False), 1.0)
    relay.received(UP, offer_of(ROOT), 1.0)
    relay.versions.prepared(ROOT, attempt_of(relay), {DIGEST: 4}, 1.0)
    relay.commands()
    relay.received(UP, Data(DIGEST, b"data"), 1.0)
    assert relay.commands() == [
        StorePiece(DIGEST, b"data"), Send(DOWN, Data(DIGEST, b"data")), Finish(ROOT, 1, NOTHING, NOTHING)
    ]  # fmt: skip


def test_late_events_are_ignored() -> None:
    relay = host_relay()
    relay.versions.prepared(ROOT, attempt_of(relay), {}, 1.0)
    relay.versions.base_unknown(ROOT, attempt_of(relay), 1.0)
    relay.versions.finished(ROOT, attempt_of(relay), 1.0)
    relay.versions.withdraw(ROOT, 1.0)
    relay.versions.hold(ROOT, 1.0)
    relay.supplied(DIGEST, b"data", 1.0)
    relay.versions.full_delta_built("child", ROOT, b"", 1.0)
    relay.versions.pieces_read("child", ROOT, [], (), (DIGEST,), 1.0)
    relay.received(DOWN, RequestFullDelta(ROOT), 1.0)
    relay.received(PeerLink("unknown", up=False), RequestFullDelta(ROOT), 1.0)
    relay.sent(UP, 1, 1.0)
    relay.received(UP, Data(DIGEST, b"data"), 1.0)
    relay.received(UP, Heartbeat(False), 1.0)
    assert relay.commands() == []
    relay.connected("given up", 1.0)
    assert relay.commands() == [Disconnect(PeerLink("given up", up=True))]


def test_a_newer_offer_withdraws_what_it_does_not_list() -> None:
    relay = host_relay()
    relay.received(UP, offer_of(ROOT), 1.0)
    relay.received(UP, offer_of(OTHER, 2, live=(ROOT,)), 1.0)
    assert relay.state(ROOT) is VersionState.PREPARING
    relay.received(UP, Withdraw(ROOT), 1.0)
    assert relay.state(ROOT) is None
    relay.received(UP, offer_of(ROOT, 3), 1.0)
    assert relay.state(OTHER) is None
    relay.received(UP, offer_of(OTHER, 2), 1.0)
    assert relay.state(ROOT) is VersionState.PREPARING


def test_a_piece_that_is_lost_repeatedly_closes_the_connection() -> None:
    relay = host_relay()
    relay.received(UP, offer_of(ROOT), 1.0)
    for _ in range(4):
        relay.versions.prepared(ROOT, attempt_of(relay), {}, 1.0)
        relay.versions.finished(ROOT, attempt_of(relay), 1.0)
        relay.received(DOWN, Want(ROOT, (DIGEST,)), 1.0)
        relay.commands()
        relay.versions.pieces_read("child", ROOT, [], (), (DIGEST,), 1.0)
    assert relay.commands()[-1] == Disconnect(DOWN)


def test_a_damaged_version_is_prepared_again_but_not_for_ever() -> None:
    relay = host_relay()
    relay.versions.damaged(ROOT, attempt_of(relay), 1.0)
    relay.received(UP, offer_of(ROOT), 1.0)
    for _ in range(4):
        assert relay.state(ROOT) is VersionState.PREPARING
        relay.versions.prepared(ROOT, attempt_of(relay), {}, 1.0)
        relay.versions.damaged(ROOT, attempt_of(relay), 1.0)
    assert relay.state(ROOT) is VersionState.FAILED
    sent = [command.message for command in relay.commands() if isinstance(command, Send)]
    (reason,) = [dict(message.failed)["host"] for message in sent if isinstance(message, Ack)]
    assert "modified again and again" in reason


def test_a_piece_lost_while_the_version_is_prepared_waits() -> None:
    relay = host_relay()
    relay.received(UP, offer_of(ROOT), 1.0)
    relay.versions.pieces_read("child", ROOT, [], (), (DIGEST,), 1.0)
    relay.versions.prepared(ROOT, attempt_of(relay), {DIGEST: 4, OTHER: 4}, 1.0)
    relay.versions.pieces_read("child", ROOT, [], (), (OTHER,), 1.0)
    relay.commands()
    relay.received(UP, Data(OTHER, b"data"), 1.0)
    assert Send(DOWN, Data(OTHER, b"data")) in relay.commands()


def test_a_gateway_without_the_base_reports_it() -> None:
    relay = Relay(GATEWAY, None)
    relay.start(0.0)
    relay.publish(offer_of(ROOT), 0.0)
    relay.commands()
    relay.versions.base_unknown(ROOT, attempt_of(relay), 0.0)
    (report,) = relay.commands()
    assert isinstance(report, ReportStatus)
    assert dict(report.failed)[GATEWAY] == "the gateway does not have the base version of this delta"
    relay.lost(UP, 0.0)
    relay.tick(1.0)


def test_an_acknowledgement_of_an_earlier_publication_does_not_count() -> None:
    relay = Relay(GATEWAY, None)
    relay.start(0.0)
    relay.accepted("child", 0.0)
    relay.received(DOWN, Hello("child", ()), 0.0)
    relay.publish(offer_of(ROOT), 0.0)
    relay.publish(offer_of(OTHER), 1.0, retire=[ROOT])
    relay.received(DOWN, Ack(ROOT, ("child",)), 1.0)
    relay.publish(offer_of(ROOT), 2.0)
    relay.tick(3.0)
    assert not [command for command in relay.commands() if isinstance(command, ReportStatus)]


def test_a_host_with_a_slow_disk_does_not_suspect_its_parents() -> None:
    relay = host_relay()
    relay.received(UP, offer_of(ROOT), 1.0)
    relay.versions.prepared(ROOT, attempt_of(relay), {DIGEST: 4}, 1.0)
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


def test_unreachable_parents_are_reported_once_to_each_parent() -> None:
    relay = Relay("host", Routes(("h1", GATEWAY), ()))
    relay.start(0.0)
    relay.lost(PeerLink("h1", up=True), 0.0, "cannot reach h1")
    relay.connected(GATEWAY, 0.1)
    relay.commands()
    report = Send(UP, Unreachable((("host", "cannot reach h1"),)))
    for now in (0.2, 0.3):
        relay.tick(now)
    assert relay.commands().count(report) == 1
    relay.accepted("child", 0.3)
    relay.received(DOWN, Unreachable((("child", "cannot reach h2"),)), 0.3)
    assert relay.commands() == [Send(UP, Unreachable((("child", "cannot reach h2"),)))]
    relay.connected(GATEWAY, 0.4)
    assert Send(UP, Unreachable((("host", "cannot reach h1"), ("child", "cannot reach h2")))) in relay.commands()


def test_a_child_that_takes_nothing_for_long_is_disconnected() -> None:
    relay = host_relay()
    relay.received(UP, offer_of(ROOT), 1.0)
    relay.versions.prepared(ROOT, attempt_of(relay), {}, 1.0)
    relay.received(DOWN, Want(ROOT, (DIGEST,)), 1.0)
    relay.versions.pieces_read("child", ROOT, [(DIGEST, b"data")], (), (), 1.0)
    relay.commands()
    relay.received(UP, Heartbeat(False), 12.0)
    relay.tick(12.0)
    assert Disconnect(DOWN) in relay.commands()
    relay.sent(DOWN, 4, 12.0)
    relay.versions.pieces_read("child", ROOT, [(DIGEST, b"data")], (), (), 12.0)


def test_cancelled_pieces_are_not_sent() -> None:
    relay = host_relay()
    relay.received(UP, offer_of(ROOT), 1.0)
    relay.versions.prepared(ROOT, attempt_of(relay), {DIGEST: 4, OTHER: 4}, 1.0)
    relay.received(DOWN, Want(ROOT, (DIGEST, OTHER, DIGEST)), 1.0)
    relay.received(DOWN, Cancel((DIGEST, ROOT)), 1.0)
    relay.commands()
    relay.received(UP, Data(DIGEST, b"data"), 1.0)
    assert Send(DOWN, Data(DIGEST, b"data")) not in relay.commands()
    relay.received(UP, Data(OTHER, b"data"), 1.0)
    assert Send(DOWN, Data(OTHER, b"data")) in relay.commands()


def test_a_result_of_an_earlier_attempt_is_void() -> None:
    relay = host_relay()
    relay.received(UP, offer_of(ROOT), 1.0)
    stale = attempt_of(relay)
    relay.received(UP, Withdraw(ROOT), 1.0)
    relay.received(UP, offer_of(ROOT, 2), 1.0)
    for late in (
        lambda: relay.versions.prepared(ROOT, stale, {}, 1.0),
        lambda: relay.versions.base_unknown(ROOT, stale, 1.0),
        lambda: relay.versions.finished(ROOT, stale, 1.0),
        lambda: relay.versions.damaged(ROOT, stale, 1.0),
    ):
        late()
        assert relay.state(ROOT) is VersionState.PREPARING
    relay.versions.prepared(ROOT, attempt_of(relay), {}, 1.0)
    assert relay.state(ROOT) is VersionState.FINISHING


def test_a_failed_hold_leaves_pieces_that_another_version_lacks_requested() -> None:
    relay = host_relay()
    for serial, root in enumerate((ROOT, OTHER), 1):
        relay.received(UP, offer_of(root, serial, live=(ROOT,)), 1.0)
        relay.versions.prepared(root, attempt_of(relay), {DIGEST: 4}, 1.0)
    relay.commands()
    relay.versions.hold_failed(ROOT, "no space", 1.0)
    assert Send(UP, Want(OTHER, (DIGEST,))) in relay.commands()
    assert (relay.state(ROOT), relay.state(OTHER)) == (VersionState.FAILED, VersionState.FETCHING)


def test_a_failed_host_serves_no_children_until_a_version_finishes() -> None:
    relay = host_relay()
    relay.received(UP, offer_of(ROOT), 1.0)
    relay.versions.failed(ROOT, attempt_of(relay), "no space", 1.0)
    assert Disconnect(DOWN) in relay.commands()
    relay.accepted("child", 1.0)
    assert relay.commands() == [Disconnect(DOWN)]
    relay.received(UP, offer_of(ROOT, 2), 1.0)
    assert Prepare(offer_of(ROOT), attempt_of(relay)) in relay.commands()
    relay.versions.prepared(ROOT, attempt_of(relay), {}, 1.0)
    relay.versions.finished(ROOT, attempt_of(relay), 1.0)
    relay.commands()
    relay.accepted("child", 1.0)
    assert relay.commands() == []


def test_requests_are_taken_once_in_the_order_they_arrived() -> None:
    pending = PendingRequests()
    pending.add_pieces(ONE, "a", (b"x", b"y"))
    pending.add_full_delta(ONE, "b")
    pending.add_pieces(OTHER_PENDING_REQUESTS, "c", (b"z",))
    pending.add_pieces(ONE, "b", (b"x",))
    assert pending.take(ONE) == Requests([("a", (b"x", b"y")), ("b", (b"x",))], ["b"])
    assert pending.take(ONE) == Requests()
    assert pending.take(OTHER_PENDING_REQUESTS) == Requests([("c", (b"z",))])


def test_requests_of_a_withdrawn_version_are_discarded() -> None:
    pending = PendingRequests()
    pending.add_full_delta(ONE, "a")
    pending.discard(ONE)
    pending.discard(OTHER_PENDING_REQUESTS)
    assert pending.take(ONE) == Requests()


def test_requests_that_could_be_answered_are_a_defect() -> None:
    pending = PendingRequests()
    pending.add_full_delta(ONE, "a")
    pending.validate_state([OTHER_PENDING_REQUESTS])
    with pytest.raises(AssertionError, match="can be answered"):
        pending.validate_state([ONE, OTHER_PENDING_REQUESTS])
