from __future__ import annotations

from meshgate_gateway.engine.calls import MAX_DISTINCT_ERRORS, Answer, Pending
from meshgate_gateway.engine.monarch import Reply
from meshgate_wire.messages import Adopted, Failed, Failure, Item, Values

NOTHING = Adopted()


def pending(adverb: str = "call", ranks: tuple[int, ...] = (0, 1, 2, 3)) -> Pending:
    hosts = {rank: f"workers-{rank // 2}" for rank in ranks}
    return Pending(1, adverb, "trainers", "step", ranks, hosts)  # type: ignore[arg-type]


def reply(rank: int, data: bytes = b"v", exception: bool = False) -> Reply:
    return Reply(rank, exception, memoryview(data), ())


def failure(answer: Answer | None) -> Failure:
    assert answer is not None
    assert isinstance(answer.header, Failed)
    return answer.header.failure


def test_values_come_in_rank_order_whatever_order_they_arrived_in() -> None:
    call = pending()
    answers = [call.reply(reply(rank, bytes([rank])), NOTHING) for rank in (2, 0, 3, 1)]
    assert answers[:3] == [None, None, None]
    assert answers[3] is not None
    assert isinstance(answers[3].header, Values)
    assert [bytes(buffer) for buffer in answers[3].buffers] == [b"\0", b"\1", b"\2", b"\3"]


def test_choose_needs_one_answer_and_tells_which_rank_gave_it() -> None:
    answer = pending("choose").reply(reply(2), NOTHING)
    assert answer is not None
    assert isinstance(answer.header, Values)
    assert answer.header.ranks == (2,)


def test_a_stream_gives_each_answer_at_once() -> None:
    call = pending("stream", (0, 1))
    first, second = call.reply(reply(1), NOTHING), call.reply(reply(0), NOTHING)
    assert first is not None
    assert second is not None
    assert isinstance(first.header, Item)
    assert (first.header.rank, first.last, second.last) == (1, False, True)


def test_the_same_failure_of_many_ranks_is_one_group() -> None:
    call = pending()
    for rank in (0, 1, 3):
        assert call.reply(reply(rank, b"boom", exception=True), NOTHING) is None
    told = failure(call.reply(reply(2), NOTHING))
    (group,) = told.errors
    assert (group.ranks, group.count, told.total, told.unanswered) == ((0, 1, 3), 3, 4, 0)
    assert told.hosts == {0: "workers-0", 1: "workers-0", 3: "workers-1"}


def test_distinct_failures_are_distinct_groups_largest_first() -> None:
    call = pending()
    for rank, data in ((0, b"rare"), (1, b"often"), (2, b"often")):
        call.reply(reply(rank, data, exception=True), NOTHING)
    answer = call.reply(reply(3), NOTHING)
    assert [group.count for group in failure(answer).errors] == [2, 1]
    assert answer is not None
    assert [bytes(buffer) for buffer in answer.buffers] == [b"often", b"rare"]


def test_however_many_errors_differ_every_failed_rank_is_counted() -> None:
    call = pending(ranks=tuple(range(512)))
    for rank in range(511):
        assert call.reply(reply(rank, f"rank {rank}".encode(), exception=True), NOTHING) is None
    answer = call.reply(reply(511, b"rank 511", exception=True), NOTHING)
    assert answer is not None
    *sent, rest = failure(answer).errors
    assert len(answer.buffers) == len(sent) == MAX_DISTINCT_ERRORS
    assert [group.buffer for group in sent] == list(range(MAX_DISTINCT_ERRORS))
    assert (rest.buffer, rest.count) == (None, 512 - MAX_DISTINCT_ERRORS)
    assert rest.ranks == tuple(range(MAX_DISTINCT_ERRORS, MAX_DISTINCT_ERRORS + 64))
    assert sum(group.count for group in failure(answer).errors) == failure(answer).total == 512


def test_a_failure_can_be_told_before_slow_ranks_answer() -> None:
    call = pending()
    call.reply(reply(0, b"boom", exception=True), NOTHING)
    assert failure(call.finish()).unanswered == 3
    assert call.reply(reply(1), NOTHING) is None


def test_a_death_ends_the_calls_that_wait_for_the_dead_rank() -> None:
    call = pending(ranks=(4, 5, 6, 7))
    call.reply(reply(0), NOTHING)
    assert call.died({4: "it had answered"}) is None
    told = failure(call.died({6: "killed"}))
    assert (told.kind, told.ranks, told.message) == ("supervision", (2,), "killed")


def test_choose_survives_a_death_while_another_rank_lives() -> None:
    call = pending("choose", (0, 1))
    assert call.died({0: "killed"}) is None
    assert failure(call.died({0: "killed", 1: "killed"})).kind == "supervision"


def test_a_call_that_is_over_says_nothing_more() -> None:
    call = pending(ranks=(0,))
    assert call.reply(reply(0), NOTHING) is not None
    assert call.died({0: "killed"}) is None
    assert call.fail(Failure(kind="internal", message="late")) is None
