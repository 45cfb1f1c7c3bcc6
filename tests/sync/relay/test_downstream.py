from __future__ import annotations

from collections import deque

import pytest

from meshgate_sync.relay.commands import Command, Disconnect, PeerLink, ReadPieces, Send, Timeouts
from meshgate_sync.relay.downstream import Downstream
from meshgate_sync.relay.frames import Data, Heartbeat, Message, Offer, Withdraw
from meshgate_sync.tree.tree import NOTHING

ROOT = b"r" * 32
ONE, TWO, THREE = b"1" * 32, b"2" * 32, b"3" * 32
DATA = b"0123456789"


class Setup:
    """Children ``a`` and ``b``, with a window of two pieces each."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.downstream = Downstream(2 * len(DATA), Timeouts(), self.commands)
        for child in ("a", "b"):
            self.downstream.add(child, 0.0)

    def take(self) -> list[Command]:
        taken = list(self.commands)
        self.commands.clear()
        self.downstream.validate_state([ROOT])
        return taken


@pytest.fixture
def setup() -> Setup:
    return Setup()


def sent(child: str, message: Message) -> Send:
    return Send(PeerLink(child, up=False), message)


def test_a_missing_piece_goes_to_every_waiting_child_as_it_arrives(setup: Setup) -> None:
    for child in ("a", "b"):
        setup.downstream.request(child, ROOT, [ONE], {ONE: 10}, 0.0)
    assert setup.take() == []
    setup.downstream.arrived(ONE, DATA, 0.0)
    assert setup.take() == [sent("a", Data(ONE, DATA)), sent("b", Data(ONE, DATA))]
    assert setup.downstream.piece_bytes_sent == 2 * len(DATA)


def test_a_piece_in_the_store_is_read_for_the_child(setup: Setup) -> None:
    setup.downstream.request("a", ROOT, [ONE, TWO], {}, 0.0)
    assert setup.take() == [ReadPieces("a", ROOT, (ONE, TWO), len(DATA))]
    setup.downstream.pieces_read("a", ROOT, [(ONE, DATA)], (TWO,), 0.0)
    assert setup.take() == [sent("a", Data(ONE, DATA)), ReadPieces("a", ROOT, (TWO,), len(DATA))]


def test_a_child_with_a_full_window_gets_the_rest_from_the_store_later(setup: Setup) -> None:
    setup.downstream.request("a", ROOT, [ONE, TWO, THREE], {ONE: 10, TWO: 10, THREE: 10}, 0.0)
    for digest in (ONE, TWO, THREE):
        setup.downstream.arrived(digest, DATA, 0.0)
    assert setup.take() == [sent("a", Data(ONE, DATA)), sent("a", Data(TWO, DATA))]
    setup.downstream.sent("a", len(DATA), 1.0)
    assert setup.take() == [ReadPieces("a", ROOT, (THREE,), len(DATA))]


def test_a_cancelled_piece_is_neither_read_nor_sent(setup: Setup) -> None:
    setup.downstream.request("a", ROOT, [ONE], {ONE: 10}, 0.0)
    setup.downstream.children["a"].reading = True
    setup.downstream.request("a", ROOT, [TWO], {}, 0.0)
    setup.downstream.cancel("a", [ONE, TWO, THREE])
    setup.downstream.arrived(ONE, DATA, 0.0)
    setup.downstream.pieces_read("a", ROOT, [], (), 0.0)
    assert setup.take() == []


def test_a_removed_child_gets_nothing_more(setup: Setup) -> None:
    setup.downstream.request("a", ROOT, [ONE], {ONE: 10}, 0.0)
    setup.downstream.remove("a")
    setup.downstream.remove("a")
    setup.downstream.arrived(ONE, DATA, 0.0)
    setup.downstream.pieces_read("a", ROOT, [(ONE, DATA)], (), 0.0)
    setup.downstream.sent("a", len(DATA), 0.0)
    assert setup.take() == []


def test_requests_for_a_withdrawn_version_are_dropped_and_returned(setup: Setup) -> None:
    setup.downstream.request("a", ROOT, [ONE], {ONE: 10}, 0.0)
    setup.downstream.request("b", b"other" * 6 + b"xx", [TWO], {TWO: 10}, 0.0)
    assert setup.downstream.stop_waiting(ROOT) == [("a", ONE)]
    assert setup.downstream.stop_waiting(ROOT) == []
    assert list(setup.downstream.children["b"].waiting) == [TWO]


def test_only_children_that_have_greeted_follow_announcements(setup: Setup) -> None:
    setup.downstream.children["b"].greeted = True
    setup.downstream.broadcast(Withdraw(ROOT), 0.0)
    assert setup.take() == [sent("b", Withdraw(ROOT))]
    offer = Offer(ROOT, NOTHING, NOTHING, False, b"delta", ((ONE, DATA),))
    setup.downstream.broadcast(offer, 0.0)
    assert (setup.downstream.delta_bytes_sent, setup.downstream.piece_bytes_sent) == (5, len(DATA))


def test_heartbeats_are_frequent_for_a_child_that_waits_and_say_whether_this_relay_is_starved(setup: Setup) -> None:
    timeouts = Timeouts()
    setup.downstream.request("a", ROOT, [ONE], {ONE: 10}, 0.0)
    setup.downstream.tick(timeouts.busy_heartbeat_interval, starved=True, alert=False)
    assert setup.take() == [sent("a", Heartbeat(True))]
    setup.downstream.tick(timeouts.heartbeat_interval, starved=False, alert=False)
    assert setup.take() == [sent("a", Heartbeat(False)), sent("b", Heartbeat(False))]


def test_all_heartbeats_are_frequent_during_an_alert(setup: Setup) -> None:
    setup.downstream.tick(Timeouts().busy_heartbeat_interval, starved=False, alert=True)
    assert setup.take() == [sent("a", Heartbeat(False)), sent("b", Heartbeat(False))]


def test_a_child_that_takes_nothing_for_the_write_timeout_is_disconnected(setup: Setup) -> None:
    limit = Timeouts().write_timeout
    setup.downstream.request("a", ROOT, [ONE], {ONE: 10}, 0.0)
    setup.downstream.arrived(ONE, DATA, 1.0)
    setup.take()
    setup.downstream.tick(1.0 + limit, starved=False, alert=False)
    assert Disconnect(PeerLink("a", up=False)) not in setup.take()
    setup.downstream.tick(1.1 + limit, starved=False, alert=False)
    assert Disconnect(PeerLink("a", up=False)) in setup.take()
    assert list(setup.downstream.children) == ["b"]


def test_a_queue_that_is_not_being_read_is_a_defect(setup: Setup) -> None:
    setup.downstream.children["a"].queue = deque([(ROOT, ONE)])
    with pytest.raises(AssertionError):
        setup.downstream.validate_state([ROOT])


def test_indexes_of_waiting_children_that_differ_are_a_defect(setup: Setup) -> None:
    setup.downstream.children["a"].waiting[ONE] = ROOT
    with pytest.raises(AssertionError):
        setup.downstream.validate_state([ROOT])
