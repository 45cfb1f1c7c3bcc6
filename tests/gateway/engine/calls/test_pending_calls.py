from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_gateway.engine.calls import pending_calls
from meshgate_gateway.engine.calls.pending_calls import (
    MAX_DISTINCT_ERRORS,
    TRANSITIONS,
    CallEvent,
    CallState,
    InvalidTransition,
    PendingCall,
    Response,
)
from meshgate_gateway.engine.monarch.interface import Reply
from meshgate_wire.messages import Adopted, Failed, Failure, Item, Values

NOTHING = Adopted()


def pending(adverb: str = "call", ranks: tuple[int, ...] = (0, 1, 2, 3), chosen: int | None = None) -> PendingCall:
    def host_of(rank: int) -> str:
        return f"workers-{rank // 2}"

    return PendingCall(1, adverb, "trainers", "step", ranks, host_of, chosen)  # type: ignore[arg-type]


def reply(rank: int, data: bytes = b"v", exception: bool = False) -> Reply:
    return Reply(rank, exception, memoryview(data), ())


def failure(response: Response | None) -> Failure:
    assert response is not None
    assert isinstance(response.header, Failed)
    return response.header.failure


def test_values_are_in_rank_order_whatever_order_they_arrive_in() -> None:
    call = pending()
    responses = [call.add_reply(reply(rank, bytes([rank])), NOTHING) for rank in (2, 0, 3, 1)]
    assert responses[:3] == [None, None, None]
    assert responses[3] is not None
    assert isinstance(responses[3].header, Values)
    assert [bytes(buffer) for buffer in responses[3].buffers] == [b"\0", b"\1", b"\2", b"\3"]


def test_choose_needs_one_reply_and_names_the_rank_that_sent_it() -> None:
    response = pending("choose", chosen=2).add_reply(reply(0), NOTHING)
    assert response is not None
    assert isinstance(response.header, Values)
    assert response.header.ranks == (2,)


def test_a_stream_sends_each_reply_at_once() -> None:
    call = pending("stream", (0, 1))
    first, second = call.add_reply(reply(1), NOTHING), call.add_reply(reply(0), NOTHING)
    assert first is not None
    assert second is not None
    assert isinstance(first.header, Item)
    assert (first.header.rank, first.last, second.last) == (1, False, True)


def test_the_same_exception_of_many_ranks_is_one_group() -> None:
    call = pending()
    for rank in (0, 1, 3):
        assert call.add_reply(reply(rank, b"boom", exception=True), NOTHING) is None
    reported = failure(call.add_reply(reply(2), NOTHING))
    (group,) = reported.errors
    assert (group.ranks, group.count, reported.total, reported.unanswered) == ((0, 1, 3), 3, 4, 0)
    assert reported.hosts == {0: "workers-0", 1: "workers-0", 3: "workers-1"}


def test_reports_of_a_slice_have_the_ranks_of_the_mesh() -> None:
    call = pending(ranks=(4, 6))
    call.add_reply(reply(1, b"boom", exception=True), NOTHING)
    assert call.waiting() == {4: "workers-2"}
    reported = failure(call.finish())
    assert (reported.ranks, reported.hosts, reported.errors[0].ranks) == ((6,), {6: "workers-3"}, (6,))


def test_distinct_exceptions_are_distinct_groups_largest_first() -> None:
    call = pending()
    for rank, data in ((0, b"rare"), (1, b"often"), (2, b"often")):
        call.add_reply(reply(rank, data, exception=True), NOTHING)
    response = call.add_reply(reply(3), NOTHING)
    assert [group.count for group in failure(response).errors] == [2, 1]
    assert response is not None
    assert [bytes(buffer) for buffer in response.buffers] == [b"often", b"rare"]


def test_every_failed_rank_is_counted_however_many_exceptions_differ() -> None:
    call = pending(ranks=tuple(range(512)))
    for rank in range(511):
        assert call.add_reply(reply(rank, f"rank {rank}".encode(), exception=True), NOTHING) is None
    response = call.add_reply(reply(511, b"rank 511", exception=True), NOTHING)
    assert response is not None
    *sent, rest = failure(response).errors
    assert len(response.buffers) == len(sent) == MAX_DISTINCT_ERRORS
    assert [group.buffer for group in sent] == list(range(MAX_DISTINCT_ERRORS))
    assert (rest.buffer, rest.count) == (None, 512 - MAX_DISTINCT_ERRORS)
    assert rest.ranks == tuple(range(MAX_DISTINCT_ERRORS, MAX_DISTINCT_ERRORS + 64))
    assert sum(group.count for group in failure(response).errors) == failure(response).total == 512


def test_a_call_can_fail_before_its_slow_ranks_reply() -> None:
    call = pending()
    call.add_reply(reply(0, b"boom", exception=True), NOTHING)
    assert failure(call.finish()).unanswered == 3
    assert call.add_reply(reply(1), NOTHING) is None


def test_a_death_ends_a_call_that_waits_for_the_dead_rank() -> None:
    call = pending(ranks=(4, 5, 6, 7))
    call.add_reply(reply(0), NOTHING)
    assert call.ranks_died({4: "it has replied"}) is None
    reported = failure(call.ranks_died({6: "killed"}))
    assert (reported.kind, reported.ranks, reported.message) == ("supervision", (6,), "killed")


def test_choose_fails_if_the_chosen_rank_dies_and_not_if_another_does() -> None:
    call = pending("choose", (4, 5), chosen=1)
    assert call.ranks_died({4: "killed"}) is None
    reported = failure(call.ranks_died({4: "killed", 5: "killed too"}))
    assert (reported.kind, reported.message) == ("supervision", "killed too")
    assert (reported.ranks, reported.hosts) == ((5,), {5: "workers-2"})


def test_a_call_that_has_ended_sends_nothing_more() -> None:
    call = pending(ranks=(0,))
    assert call.add_reply(reply(0), NOTHING) is not None
    assert call.ranks_died({0: "killed"}) is None
    assert call.fail(Failure(kind="internal", message="late")) is None


def test_a_call_reports_success_once_every_rank_has_replied_without_an_exception() -> None:
    succeeded: list[str] = []
    call = pending(ranks=(0, 1))
    call.on_success = lambda: succeeded.append("all")
    call.add_reply(reply(0), NOTHING)
    assert succeeded == []
    call.add_reply(reply(1), NOTHING)
    assert succeeded == ["all"]


def test_a_call_with_an_exception_or_a_death_does_not_report_success() -> None:
    succeeded: list[str] = []
    failing, dying = pending(ranks=(0, 1)), pending(ranks=(0, 1))
    for call in (failing, dying):
        call.on_success = lambda: succeeded.append("all")
        call.add_reply(reply(0), NOTHING)
    failing.add_reply(reply(1, b"boom", exception=True), NOTHING)
    dying.ranks_died({1: "killed"})
    assert succeeded == []


def test_the_meshes_of_a_value_are_listed_at_its_place_among_the_values() -> None:
    call = pending(ranks=(0, 1))
    call.add_reply(reply(1), Adopted(objects=(-1, -2)))
    response = call.add_reply(reply(0), NOTHING)
    assert response is not None
    assert isinstance(response.header, Values)
    assert response.header.objects == {1: Adopted(objects=(-1, -2))}


@pytest.mark.parametrize("state", CallState)
@pytest.mark.parametrize("event", CallEvent)
def test_an_event_leads_where_the_table_says_or_is_a_defect(state: CallState, event: CallEvent) -> None:
    call = pending()
    call.state = state
    after = TRANSITIONS[state].get(event)
    if after is None:
        with pytest.raises(InvalidTransition, match=f"call 1 is {state.value}: event '{event.value}' is not possible"):
            call.apply(event)
    else:
        call.apply(event)
    assert call.state is (after or state)


def test_once_the_last_reply_is_here_a_call_can_only_be_answered() -> None:
    call = pending(ranks=(0, 1))
    call.add_reply(reply(0, b"boom", exception=True), NOTHING)
    assert call.state is CallState.GATHERING
    call.apply(CallEvent.LAST_ARRIVED)
    call.validate_state()
    assert call.ranks_died({1: "killed"}) is None
    assert call.fail(Failure(kind="internal", message="late")) is None
    assert failure(call.add_reply(reply(1), NOTHING)).errors[0].ranks == (0,)
    assert call.state is CallState.ENDED


def test_a_cancelled_call_ends_with_its_last_reply_and_sends_nothing_more() -> None:
    call = pending(ranks=(0, 1, 2))
    call.add_reply(reply(1), NOTHING)
    cancelled = failure(call.cancel())
    assert (cancelled.kind, cancelled.ranks, cancelled.unanswered) == ("cancelled", (0, 2), 2)
    assert cancelled.hosts == {0: "workers-0", 2: "workers-1"}
    assert call.cancel() is None
    assert call.add_reply(reply(0, b"ended", exception=True), NOTHING) is None
    assert call.add_reply(reply(0), NOTHING) is None  # a second one of the rank
    assert call.state is CallState.CANCELLED
    assert call.add_reply(reply(2), NOTHING) is None
    assert call.state is CallState.ENDED


def test_the_death_of_a_rank_ends_a_cancelled_call_without_another_answer() -> None:
    call = pending(ranks=(0, 1))
    assert call.cancel() is not None
    assert call.ranks_died({1: "killed"}) is None
    assert call.state is CallState.ENDED
    call = pending(ranks=(0, 1))
    assert call.cancel() is not None
    assert call.fail(Failure(kind="internal", message="the mesh failed")) is None
    assert call.state is CallState.ENDED


# --- stragglers


class Clock:
    """The clock of the calls of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(pending_calls, "time", SimpleNamespace(monotonic=lambda: self.now))

    def call(
        self, *replies: tuple[int, float], adverb: str = "call", ranks: tuple[int, ...] = (4, 5, 6, 7)
    ) -> PendingCall:
        """A call whose ranks, by position, reply after these seconds."""
        call = pending(adverb, ranks)
        call.started = start = self.now
        for position, seconds in replies:
            self.now = start + seconds
            call.add_reply(reply(position), NOTHING)
        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_rank_that_replies_last_is_late_by_what_half_of_the_ranks_have_waited(clock: Clock) -> None:
    call = clock.call((0, 1.0), (3, 1.1), (2, 1.2), (1, 3.0))
    assert call.last_rank() == (5, pytest.approx(1.9))
    pair = clock.call((1, 1.0), (0, 2.0), ranks=(8, 9))
    assert pair.last_rank() == (8, pytest.approx(1.0))
    stream = clock.call((0, 1.0), (1, 2.0), adverb="stream", ranks=(8, 9))
    assert stream.last_rank() == (9, pytest.approx(1.0))


def test_a_rank_is_not_late_by_what_its_reply_has_waited_for_output(clock: Clock) -> None:
    call = clock.call((0, 1.0), ranks=(8, 9))
    clock.now += 1.0
    call.apply(CallEvent.LAST_ARRIVED)
    clock.now += 5.0
    call.add_reply(reply(1), NOTHING)
    assert call.last_rank() == (9, pytest.approx(1.0))


def test_a_rank_that_replies_a_little_later_is_not_late(clock: Clock) -> None:
    assert clock.call((0, 0.001), (1, 0.010), ranks=(8, 9)).last_rank() == (9, 0.0)  # below 10 ms
    assert clock.call((0, 0.001), (1, 0.012), ranks=(8, 9)).last_rank() == (9, pytest.approx(0.011))
    assert clock.call((0, 2.0), (1, 2.2), ranks=(8, 9)).last_rank() == (9, 0.0)  # below a tenth
    assert clock.call((0, 2.0), (1, 2.3), ranks=(8, 9)).last_rank() == (9, pytest.approx(0.3))


def test_calls_to_one_rank_and_calls_that_did_not_return_are_not_compared(clock: Clock) -> None:
    assert clock.call((0, 1.0), ranks=(8,)).last_rank() is None
    chosen = pending("choose", chosen=2)
    chosen.add_reply(reply(0), NOTHING)
    assert chosen.last_rank() is None
    foreign = clock.call((0, 1.0), (7, 2.0), ranks=(8, 9))
    assert foreign.last_rank() is None
    missing = clock.call((0, 1.0), (1, 1.0), (2, 1.0))
    assert missing.last_rank() is None
    missing.add_reply(reply(3, exception=True), NOTHING)
    assert missing.last_rank() is None
    cancelled = clock.call((0, 1.0), (1, 1.0), (2, 1.0))
    cancelled.cancel()
    clock.now += 5
    cancelled.add_reply(reply(3), NOTHING)
    assert cancelled.last_rank() is None


# --- timelines


def test_a_timeline_has_the_reply_of_each_rank_the_last_one_first(clock: Clock) -> None:
    call = clock.call((0, 1.0), (3, 1.1), (2, 1.2), (1, 3.0))
    timeline = call.timeline(clock.now)
    start = timeline.started
    assert timeline.last == ((1, start + 3.0), (2, start + 1.2), (3, start + 1.1), (0, start + 1.0))
    assert timeline.ranks == (4, 5, 6, 7)
    assert (timeline.first, timeline.half, timeline.ended) == (start + 1.0, start + 1.1, start + 3.0)
    assert timeline.compared == (5, pytest.approx(1.9))
    assert (timeline.answered, timeline.raised, timeline.missing) == (4, (), ())
    assert (timeline.failed, timeline.cancelled) == (False, False)


def test_a_timeline_of_a_call_in_flight_names_the_ranks_without_a_reply(clock: Clock) -> None:
    none = clock.call().timeline()
    assert (none.first, none.half, none.last, none.missing) == (None, None, (), (0, 1, 2, 3))
    one = clock.call((2, 1.0)).timeline()
    assert (one.ended, one.half, one.compared) == (None, None, None)
    assert (one.first, one.last, one.missing) == (one.started + 1.0, ((2, one.started + 1.0),), (0, 1, 3))


def test_a_timeline_of_many_ranks_has_the_last_ones_and_those_that_raised(clock: Clock) -> None:
    call = clock.call(ranks=tuple(range(1000, 2024)))
    for position in range(1000):
        clock.now += 1.0
        call.add_reply(reply(position, exception=position % 10 == 0), NOTHING)
    timeline = call.timeline(clock.now, failed=True)
    assert [at for at, _ in timeline.last] == list(range(999, 983, -1))
    assert timeline.raised == tuple((at, call.started + 1.0 + at) for at in range(0, 160, 10))
    assert timeline.missing == tuple(range(1000, 1016))
    assert (timeline.answered, timeline.failed) == (1000, True)
    assert timeline.half == call.started + 512.0


def test_a_timeline_leaves_out_what_a_reply_has_waited_for_output(clock: Clock) -> None:
    call = clock.call((0, 1.0), ranks=(8, 9))
    clock.now += 1.0
    call.apply(CallEvent.LAST_ARRIVED)
    clock.now += 5.0
    call.add_reply(reply(1), NOTHING)
    assert call.timeline(clock.now).last == ((1, call.started + 2.0), (0, call.started + 1.0))


def test_a_timeline_of_a_cancelled_call_has_the_replies_that_free_its_ranks(clock: Clock) -> None:
    call = clock.call((0, 1.0), ranks=(8, 9))
    call.cancel()
    clock.now += 2.0
    call.add_reply(reply(1), NOTHING)
    timeline = call.timeline(clock.now)
    assert timeline.cancelled
    assert timeline.last == ((1, call.started + 3.0), (0, call.started + 1.0))
    assert timeline.compared is None


def arrives(call: PendingCall) -> bool:
    """Whether the next reply may be the last, and wait."""
    missing = call.expected - len(call.replies)
    return missing == 1 and call.adverb != "stream" and CallEvent.LAST_ARRIVED in TRANSITIONS[call.state]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["reply", "raise", "die", "fail", "cancel", "finish", "arrive"]), st.integers(0, 3))
)


@given(st.sampled_from(["call", "stream", "choose"]), EVENTS)
def test_a_call_is_answered_once_whatever_happens_to_it(adverb: str, events: list[tuple[str, int]]) -> None:
    call = pending(adverb, chosen=2 if adverb == "choose" else None)
    last = []
    for event, rank in events:
        response = None
        if event in ("reply", "raise"):
            response = call.add_reply(reply(rank, exception=event == "raise"), NOTHING)
        elif event == "die":
            response = call.ranks_died({rank: "killed"})
        elif event == "fail":
            response = call.fail(Failure(kind="internal", message="the mesh failed"))
        elif event == "cancel":
            response = call.cancel()
        elif event == "finish" and call.state is CallState.GATHERING:
            response = call.finish()
        elif event == "arrive" and arrives(call):
            call.apply(CallEvent.LAST_ARRIVED)
        call.validate_state()
        last += [response] if response is not None and response.last else []
        assert len(last) == (call.state in (CallState.CANCELLED, CallState.ENDED))
