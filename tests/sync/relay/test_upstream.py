from __future__ import annotations

import pytest

from meshgate_sync.relay.commands import Command, Connect, Disconnect, PeerLink, Send, Timeouts
from meshgate_sync.relay.frames import Cancel, Want
from meshgate_sync.relay.plan import GATEWAY, Routes
from meshgate_sync.relay.upstream import Lane, LivenessAllowance, Supplier, Upstream

ROOT, OTHER = b"r" * 32, b"o" * 32
TIMEOUTS = Timeouts()
ROUTES = Routes(("a", "b", GATEWAY), (("c", "d", "e", GATEWAY), ("d", "c", GATEWAY)))
DIGEST = b"d" * 32
INTERVAL = TIMEOUTS.busy_heartbeat_interval


def piece(number: int, stripe: int = 0) -> bytes:
    """A digest on the stripe."""
    return bytes((2 * number + stripe,)) * 32


class Setup:
    """A host with a control route over ``a`` and ``b`` and stripes over ``c``, ``d`` and ``e``."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.upstream = Upstream("host", ROUTES, TIMEOUTS, 1000, self.commands)
        self.upstream.start(0.0)

    def connect(self, *peers: str, now: float = 0.0) -> None:
        for peer in peers:
            self.upstream.connected(peer, now)

    def take(self) -> list[Command]:
        taken = list(self.commands)
        self.commands.clear()
        self.upstream.validate_state(self.upstream.wanted)
        return taken


@pytest.fixture
def setup() -> Setup:
    return Setup()


def want(peer: str, *digests: bytes, root: bytes = ROOT) -> Send:
    return Send(PeerLink(peer, up=True), Want(root, digests))


def cancel(peer: str, *digests: bytes) -> Send:
    return Send(PeerLink(peer, up=True), Cancel(digests))


def test_the_control_parent_is_dialed_at_the_start(setup: Setup) -> None:
    assert setup.take() == [Connect("a")]
    assert not setup.upstream.connected_to_control
    setup.connect("a")
    assert setup.upstream.connected_to_control


def test_pieces_are_requested_once_from_the_parent_of_their_lane(setup: Setup) -> None:
    setup.connect("a")
    setup.take()
    setup.upstream.want(ROOT, {piece(0): 10}, striped=False, now=0.0)
    assert setup.take() == [want("a", piece(0))]
    setup.upstream.want(OTHER, {piece(0): 10, piece(1): 10}, striped=False, now=0.0)
    assert setup.take() == [want("a", piece(1), root=OTHER)]


def test_striped_pieces_are_requested_by_digest_when_the_connection_is_up(setup: Setup) -> None:
    setup.take()
    setup.upstream.want(ROOT, {piece(0): 10, piece(0, 1): 10}, striped=True, now=0.0)
    assert setup.take() == [Connect("c"), Connect("d")]
    setup.connect("d")
    assert setup.take() == [want("d", piece(0, 1))]
    setup.connect("c")
    assert setup.take() == [want("c", piece(0))]


def test_a_piece_counts_once_and_is_cancelled_elsewhere(setup: Setup) -> None:
    setup.connect("a")
    setup.upstream.want(ROOT, {piece(0): 10}, striped=False, now=0.0)
    assert setup.upstream.received("a", piece(0), 10, 0.1)
    assert not setup.upstream.received("a", piece(0), 10, 0.2)
    assert setup.upstream.duplicate_bytes == 10


def test_pieces_no_longer_needed_are_cancelled(setup: Setup) -> None:
    setup.connect("a")
    setup.upstream.want(ROOT, {piece(0): 10, piece(1): 10}, striped=False, now=0.0)
    setup.take()
    setup.upstream.cancel([piece(0), piece(9)])
    assert setup.take() == [cancel("a", piece(0))]
    assert list(setup.upstream.wanted) == [piece(1)]


def test_what_a_lost_parent_owed_is_requested_from_the_next(setup: Setup) -> None:
    setup.connect("a")
    setup.upstream.want(ROOT, {piece(0): 10}, striped=False, now=0.0)
    setup.take()
    setup.upstream.lost("a", 1.0)
    assert setup.upstream.control == "b"
    assert setup.take() == [Connect("b")]
    setup.connect("b", now=1.1)
    assert setup.take() == [want("b", piece(0))]


def test_the_last_few_pieces_of_a_stripe_are_requested_from_several_and_the_first_wins(setup: Setup) -> None:
    setup.upstream.want(ROOT, {piece(0): 10, piece(1): 10}, striped=True, now=0.0)
    setup.connect("c", "d", "e")
    setup.take()
    setup.upstream.lost("c", 1.0)
    assert setup.take() == [Connect("d"), Connect("e")]
    setup.connect("d", "e", now=1.1)
    assert setup.take() == [want("d", piece(0), piece(1)), want("e", piece(1), piece(0))]
    assert setup.upstream.received("e", piece(1), 10, 1.2)
    assert setup.take() == [cancel("d", piece(1))]


def test_many_pieces_of_a_lost_stripe_parent_are_shared_out(setup: Setup) -> None:
    digests = [piece(number) for number in range(6)]
    setup.upstream.want(ROOT, dict.fromkeys(digests, 10), striped=True, now=0.0)
    setup.connect("c", now=0.0)
    setup.take()
    setup.upstream.lost("c", 1.0)
    setup.connect("d", "e", now=1.0)
    assert setup.take()[-2:] == [want("d", *digests[::2]), want("e", *digests[1::2])]


def test_a_failed_route_rests_and_starts_again(setup: Setup) -> None:
    setup.connect("a")
    setup.upstream.want(ROOT, {piece(0): 10}, striped=False, now=0.0)
    for peer in ("a", "b", GATEWAY):
        setup.upstream.lost(peer, 1.0, f"cannot reach {peer}")
    setup.take()
    setup.upstream.want(ROOT, {piece(1): 10}, striped=False, now=1.0)
    assert setup.take() == []
    setup.upstream.tick(1.0 + TIMEOUTS.retry_delay)
    assert setup.take() == [Connect("a")]
    setup.connect("a", now=2.0)
    assert setup.take() == [want("a", piece(0), piece(1))]
    assert setup.upstream.unreachable == {"b": "cannot reach b", GATEWAY: "cannot reach "}


def test_a_deferred_piece_that_arrives_is_not_requested_again(setup: Setup) -> None:
    setup.connect("a")
    setup.upstream.want(ROOT, {piece(0): 10}, striped=False, now=0.0)
    for peer in ("a", "b", GATEWAY):
        setup.upstream.lost(peer, 1.0)
    assert setup.upstream.received("e", piece(0), 10, 1.1)
    setup.take()
    setup.upstream.tick(1.0 + TIMEOUTS.retry_delay)
    setup.connect("a", now=2.0)
    assert setup.take() == [Connect("a")]


def test_a_silent_parent_is_disconnected_and_a_talking_one_is_kept(setup: Setup) -> None:
    setup.connect("a")
    for tenth in range(1, 40):
        setup.upstream.tick(tenth / 10)
        setup.upstream.heard("a", tenth / 10)
    assert Disconnect(PeerLink("a", up=True)) not in setup.take()
    for tenth in range(40, 70):
        setup.upstream.tick(tenth / 10)
    assert Disconnect(PeerLink("a", up=True)) in setup.take()
    assert setup.upstream.control == "b"


@pytest.mark.parametrize(("starved", "left"), [(False, True), (True, False)])
def test_a_parent_that_delivers_nothing_is_left_unless_it_waits_itself(setup: Setup, starved: bool, left: bool) -> None:
    setup.connect("a")
    setup.upstream.want(ROOT, {piece(0): 10}, striped=False, now=0.0)
    for tick in range(1, 100):
        now = tick * TIMEOUTS.busy_heartbeat_interval
        setup.upstream.heard("a", now, starved=starved)
        setup.upstream.tick(now)
    assert (setup.upstream.control == "b") is left


def test_half_of_what_a_slow_stripe_parent_owes_is_requested_from_another(setup: Setup) -> None:
    slow = [piece(number) for number in range(4)]
    setup.upstream.want(ROOT, dict.fromkeys([*slow, piece(8)], 1000), striped=True, now=0.0)
    setup.connect("c")
    setup.take()
    setup.upstream.received("c", piece(8), 1000, 0.05)
    for tick in range(1, 60):
        now = tick * TIMEOUTS.busy_heartbeat_interval
        setup.upstream.heard("c", now)
        setup.upstream.heard("a", now)
        setup.upstream.tick(now)
        if cancel("c", *slow[2:]) in setup.commands:
            break
    assert cancel("c", *slow[2:]) in setup.take()
    setup.connect("d", now=now)
    assert setup.take() == [want("d", *slow[2:])]


def test_a_backup_takes_acknowledgements_while_the_control_parent_is_silent_after_an_announcement(
    setup: Setup,
) -> None:
    setup.connect("a")
    setup.upstream.alert_until = 5.0
    setup.take()
    late = 0.0
    while Connect("b") not in setup.commands:
        late += TIMEOUTS.busy_heartbeat_interval
        setup.upstream.tick(late)
    assert late <= TIMEOUTS.alert_silence_timeout
    assert setup.upstream.backup is None
    setup.connect("b", now=late)
    assert setup.upstream.backup == "b"
    setup.upstream.heard("a", late)
    setup.upstream.tick(late + 0.01)
    assert setup.upstream.backup is None


def test_an_alert_lasts_longer_by_the_time_in_which_nothing_was_read(setup: Setup) -> None:
    setup.connect("a")
    setup.upstream.alert_until = 5.0
    setup.upstream.tick(0.0)
    setup.upstream.pause(1.0)
    setup.upstream.resume(31.0)
    late = 31.0
    while Connect("b") not in setup.commands and late < 35.0:
        late += TIMEOUTS.busy_heartbeat_interval
        setup.upstream.tick(late)
    assert late <= 31.0 + TIMEOUTS.alert_silence_timeout


def test_an_idle_lane_returns_to_a_restarted_parent(setup: Setup) -> None:
    setup.connect("a")
    setup.upstream.lost("a", 1.0)
    setup.connect("b", now=1.1)
    setup.take()
    setup.upstream.restarted({"a"}, 2.0)
    assert setup.take() == [Connect("a"), Disconnect(PeerLink("b", up=True))]
    assert setup.upstream.control == "a"


def test_a_lane_that_waits_for_pieces_stays_with_its_parent(setup: Setup) -> None:
    setup.connect("a")
    setup.upstream.lost("a", 1.0)
    setup.connect("b", now=1.1)
    setup.upstream.want(ROOT, {piece(0): 10}, striped=False, now=1.2)
    setup.take()
    setup.upstream.restarted({"a"}, 2.0)
    assert setup.take() == []
    assert setup.upstream.control == "b"


def test_a_wanted_piece_that_is_not_requested_is_a_defect(setup: Setup) -> None:
    setup.connect("a")
    setup.upstream.want(ROOT, {piece(0): 10}, striped=False, now=0.0)
    setup.upstream.validate_state([piece(0)])
    with pytest.raises(AssertionError, match="differ"):
        setup.upstream.validate_state([])
    setup.upstream._control.suppliers["a"].requested.clear()
    with pytest.raises(AssertionError, match="is not requested"):
        setup.upstream.validate_state([piece(0)])


def lane() -> Lane:
    return Lane("stripe 0", ("a", "b", ""))


def test_a_lane_starts_idle_with_the_first_parent_of_its_route() -> None:
    made = lane()
    assert (made.current, made.idle) == ("a", True)
    made.validate_state()


def test_a_lane_that_requests_or_rests_is_not_idle() -> None:
    made = lane()
    made.suppliers["a"] = Supplier(0.0, 0.0)
    assert made.idle
    made.suppliers["a"].requested[DIGEST] = None
    assert not made.idle
    resting = lane()
    resting.resting_until = 1.0
    assert not resting.idle


def test_pieces_are_deferred_only_while_a_lane_rests() -> None:
    made = lane()
    made.resting_until = 1.0
    made.deferred[DIGEST] = None
    made.validate_state()
    made.resting_until = None
    with pytest.raises(AssertionError, match="does not rest"):
        made.validate_state()


def test_a_supplier_is_on_the_route() -> None:
    made = lane()
    made.suppliers["stranger"] = Supplier(0.0, 0.0)
    with pytest.raises(AssertionError):
        made.validate_state()


def ticking(until: float, start: float = 0.0) -> list[float]:
    count = round((until - start) / INTERVAL)
    return [start + number * INTERVAL for number in range(1, count + 1)]


def test_an_idle_host_that_ticks_in_time_gets_no_allowance() -> None:
    allowance = LivenessAllowance(1000, TIMEOUTS)
    assert [allowance.tick(now, 0) for now in ticking(1.0)] == [0.0] * 20


def test_before_the_first_piece_a_busy_parent_may_take_the_stall_timeout() -> None:
    allowance = LivenessAllowance(1000, TIMEOUTS)
    allowance.tick(0.0, 0)
    assert allowance.tick(INTERVAL, 1) == TIMEOUTS.stall_timeout


def test_a_busy_parent_may_take_twice_the_time_of_the_windows_before_it() -> None:
    allowance = LivenessAllowance(1000, TIMEOUTS)
    allowance.tick(0.0, 1)
    allowance.received(500)  # in one interval: 10,000 bytes a second
    assert allowance.tick(INTERVAL, 1) == pytest.approx(2 * 1000 / 10_000)
    assert allowance.tick(2 * INTERVAL, 3) == pytest.approx(3 * 2 * 1000 / 10_000)


def test_the_rate_follows_what_arrives() -> None:
    allowance = LivenessAllowance(1000, TIMEOUTS)
    allowance.tick(0.0, 1)
    allowance.received(500)
    allowance.tick(INTERVAL, 1)
    allowance.received(250)
    assert allowance.tick(2 * INTERVAL, 1) == pytest.approx(2 * 1000 / 7_500)


def test_late_ticks_extend_the_allowance_and_are_forgotten() -> None:
    allowance = LivenessAllowance(1000, TIMEOUTS)
    allowance.tick(0.0, 0)
    late = allowance.tick(1.0, 0)
    assert late == pytest.approx(4 * (1.0 - 2 * INTERVAL))
    after = [allowance.tick(now, 0) for now in ticking(4.0, start=1.0)]
    assert after == sorted(after, reverse=True)
    assert after[0] < late
    assert after[-1] == 0.0


def test_a_pause_is_not_a_late_tick() -> None:
    allowance = LivenessAllowance(1000, TIMEOUTS)
    allowance.paused(5.0, 5.0)
    allowance.tick(5.0, 0)
    allowance.paused(30.0, 35.0)
    assert allowance.tick(35.0 + INTERVAL, 0) == 0.0
