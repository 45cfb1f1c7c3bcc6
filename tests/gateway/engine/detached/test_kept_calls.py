from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from meshgate_gateway.engine.detached import kept_calls as module
from meshgate_gateway.engine.detached.kept_calls import KeptCalls
from meshgate_gateway.engine.detached.spool import OVERHEAD, Spool
from meshgate_wire import MessageTooLarge
from meshgate_wire.messages import Call, Failed, Failure, Header, Item, MeshRef, Returned, Values

TOO_LARGE = Failure(kind="invalid", message="the result is too large")


class Holder:
    """A ledger of calls and what it sends."""

    def __init__(self, spool: Spool | None = None) -> None:
        self.sent: list[tuple[Header, Sequence[Any]]] = []
        self.queued = 0
        self.running: set[int] = set()
        self.calls = KeptCalls(
            lambda header, buffers, stream: self.sent.append((header, buffers)),
            lambda: self.queued,
            self.running.__contains__,
            spool=spool,
        )

    def call(self, number: int, tag: str = "", keep: int = 0) -> None:
        self.running.add(number)
        header = Call(call=number, target=MeshRef(object=3), endpoint="step", adverb="call", tag=tag, keep=keep)
        self.calls.received(header)

    def stream(self, number: int, given: Sequence[int] = ()) -> None:
        self.running.add(number)
        self.calls.received(Call(call=number, target=MeshRef(object=3), endpoint="step", adverb="stream"), given)

    def item(self, number: int, rank: int, data: bytes = b"value", *, congested: bool = False) -> bool:
        return self.calls.keep(Item(call=number, rank=rank), (data,), congested=congested)

    def sent_to_next(self, *numbers: int) -> list[Any]:
        """What a new holder gets when it fetches these calls."""
        self.running.clear()
        self.calls.holder_changed()
        self.calls.fetch(numbers)
        return [header for header, _ in self.sent]

    def answer(self, number: int, data: bytes = b"value", *, congested: bool = False) -> bool:
        kept = self.calls.keep(Values(call=number), (data,), congested=congested)
        self.running.discard(number)
        return kept

    @property
    def states(self) -> dict[int, str]:
        return {each.call: each.state for each in self.calls.describe()}


def test_a_connected_holder_gets_results_directly_and_they_are_kept_until_read() -> None:
    holder = Holder()
    holder.call(1, "step-1")
    assert holder.states == {1: "in flight"}
    assert not holder.answer(1)
    assert holder.states == {1: "finished"}
    holder.calls.mark_read([1])
    assert holder.states == {1: "read"}
    assert [each.tag for each in holder.calls.describe()] == ["step-1"]


def test_replies_to_requests_other_than_calls_are_not_kept() -> None:
    holder = Holder()
    assert not holder.calls.keep(Values(call=9), (b"",), congested=True)
    assert holder.states == {}


def test_a_new_holder_gets_no_replies_to_what_an_earlier_one_has_requested() -> None:
    holder = Holder()
    holder.calls.holder_changed(9)
    assert holder.calls.keep(Values(call=9), (b"",), congested=False)
    assert holder.calls.keep(Failed(call=8, failure=TOO_LARGE), (), congested=False)
    assert not holder.calls.keep(Values(call=10), (b"",), congested=False)
    assert holder.sent == []


def test_a_new_holder_gets_results_when_it_fetches_them() -> None:
    holder = Holder()
    for number in (1, 2):
        holder.call(number)
    holder.answer(1, b"one")
    holder.calls.holder_changed()
    assert holder.answer(2, b"two")
    assert holder.sent == []
    holder.calls.fetch([2, 1, 1])
    assert [(header.call, buffers) for header, buffers in holder.sent] == [(2, (b"two",)), (1, (b"one",))]  # type: ignore[union-attr]


def test_a_result_that_is_fetched_before_it_is_there_is_sent_when_it_comes() -> None:
    holder = Holder()
    holder.call(1)
    holder.calls.holder_changed()
    holder.calls.fetch([1])
    assert not holder.answer(1)


def test_results_wait_while_the_wire_is_congested_and_keep_their_order() -> None:
    holder = Holder()
    for number in (1, 2, 3):
        holder.call(number)
    holder.queued = module.MAX_QUEUED
    assert holder.answer(1, congested=True)
    assert holder.answer(2, congested=False)
    holder.calls.feed()
    assert holder.sent == []
    holder.queued = 0
    holder.calls.feed()
    assert [header.call for header, _ in holder.sent] == [1, 2]  # type: ignore[union-attr]
    assert not holder.answer(3)


def test_what_was_read_makes_room_and_what_was_not_never_does() -> None:
    holder = Holder(Spool(memory=0, disk=10))
    for number in (1, 2, 3):
        holder.call(number)
    holder.answer(1, bytes(5))
    holder.calls.mark_read([1])
    holder.answer(2, bytes(10))
    assert holder.states == {2: "finished", 3: "in flight"}
    assert not holder.answer(3, bytes(5))  # the holder that is connected gets it in any case
    assert holder.states == {2: "finished", 3: "lost"}
    holder.calls.holder_changed()
    holder.calls.fetch([3])
    (header, _) = holder.sent[0]
    assert isinstance(header, Failed)
    assert "no space was left to keep its result (5 bytes)" in header.failure.message


def test_only_the_newest_results_that_were_read_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READ_CALLS", 2)
    holder = Holder()
    for number in range(1, 6):
        holder.call(number)
        holder.answer(number)
        holder.calls.mark_read([number])
    assert holder.states == {4: "read", 5: "read"}


def test_what_a_new_holder_reads_does_not_push_out_what_is_on_its_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READ_CALLS", 2)
    holder = Holder()
    for number in range(1, 6):
        holder.call(number)
        holder.answer(number)
    holder.calls.mark_read([4, 5])
    holder.calls.holder_changed()
    assert list(holder.states) == [1, 2, 3, 4, 5]
    for number in range(1, 6):
        holder.calls.fetch([number])
        holder.calls.mark_read([number])
    assert [type(header) for header, _ in holder.sent] == [Values] * 5
    assert holder.states == {4: "read", 5: "read"}


def test_results_of_several_holders_are_within_the_limit_after_a_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READ_CALLS", 2)
    holder = Holder()
    for numbers in ((1, 2), (3, 4), (5,)):
        for number in numbers:
            holder.call(number)
            holder.answer(number)
        holder.calls.mark_read(numbers)
        holder.calls.holder_changed()
    assert holder.states == {4: "read", 5: "read"}


def test_results_on_a_holders_list_make_room_first_when_space_runs_out() -> None:
    holder = Holder(Spool(memory=2 * (5 + OVERHEAD), disk=0))
    for number in (1, 2, 3):
        holder.call(number)
    holder.answer(1, bytes(5))
    holder.calls.mark_read([1])
    holder.calls.holder_changed()
    holder.answer(2, bytes(5))
    holder.calls.mark_read([2])
    holder.answer(3, bytes(5))
    assert holder.states == {2: "read", 3: "finished"}


def test_a_call_that_the_program_dropped_is_kept_while_there_is_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READ_CALLS", 1)
    holder = Holder()
    holder.call(1)
    holder.calls.mark_released([1])
    assert holder.states == {1: "in flight"}
    holder.answer(1)
    assert holder.states == {1: "finished"}
    holder.call(2)
    holder.answer(2)
    holder.calls.mark_released([2])
    assert holder.states == {2: "finished"}


def test_the_failure_to_send_a_result_replaces_it() -> None:
    holder = Holder()
    holder.call(1)
    holder.answer(1)
    holder.calls.keep(Failed(call=1, failure=TOO_LARGE), (), congested=False)
    holder.calls.holder_changed()
    holder.calls.fetch([1])
    assert [header for header, _ in holder.sent] == [Failed(call=1, failure=TOO_LARGE)]


def test_a_kept_result_that_cannot_be_sent_fails_its_call() -> None:
    holder = Holder()
    holder.call(1)
    holder.answer(1)
    holder.calls.holder_changed()
    send = holder.sent.append

    def refuse(header: Header, buffers: Sequence[Any], stream: int) -> None:
        if isinstance(header, Values):
            raise MessageTooLarge("buffers", 5, 4)
        send((header, buffers))

    holder.calls._send = refuse
    holder.calls.fetch([1])
    ((header, _),) = holder.sent
    assert isinstance(header, Failed)
    assert header.failure.message.startswith("a kept result was not sent: cannot send a message with 5 buffers")


def test_every_item_of_a_stream_is_kept_also_if_a_rank_has_failed() -> None:
    holder = Holder()
    holder.stream(1)
    items = [Item(call=1, rank=0), Failed(call=1, rank=1, failure=TOO_LARGE), Item(call=1, rank=2)]
    holder.calls.keep(items[0], (b"a",), congested=False)
    holder.calls.keep(items[1], (), congested=False)
    assert holder.states == {1: "in flight"}
    holder.calls.keep(items[2], (b"c",), congested=False)
    assert holder.sent_to_next(1) == items


def test_the_results_of_a_stream_before_the_rest_of_it_failed_are_kept() -> None:
    holder = Holder()
    holder.stream(1)
    holder.item(1, 0)
    holder.item(1, 2)
    lost = Failed(call=1, failure=Failure(kind="supervision", message="rank 1 died"))
    holder.calls.keep(lost, (), congested=False)
    assert holder.sent_to_next(1) == [Item(call=1, rank=0), Item(call=1, rank=2), lost]


def test_the_failure_to_send_an_item_of_a_stream_replaces_it() -> None:
    holder = Holder()
    holder.stream(1)
    holder.item(1, 0)
    holder.item(1, 2)
    refused = Failed(call=1, rank=2, failure=TOO_LARGE)
    holder.calls.keep(refused, (), congested=False)
    assert holder.sent_to_next(1) == [Item(call=1, rank=0), refused]


def test_a_kept_item_that_cannot_be_sent_fails_its_rank() -> None:
    holder = Holder()
    holder.stream(1)
    holder.item(1, 2)
    send = holder.calls._send

    def refuse(header: Header, buffers: Sequence[Any], stream: int) -> None:
        if isinstance(header, Item):
            raise MessageTooLarge("buffers", 5, 4)
        send(header, buffers, stream)

    holder.calls._send = refuse
    (failed,) = holder.sent_to_next(1)
    assert (type(failed), failed.rank) == (Failed, 2)


def test_results_of_a_stream_before_its_session_was_detached_are_named_as_such() -> None:
    holder = Holder()
    holder.stream(1, given=[2, 0])
    assert not holder.item(1, 1)
    assert holder.sent == []
    first, second, item = holder.sent_to_next(1)
    assert [(each.rank, each.failure.message) for each in (first, second)] == [
        (2, "this result arrived before the session was detached"),
        (0, "this result arrived before the session was detached"),
    ]
    assert item == Item(call=1, rank=1)


def test_results_of_a_stream_that_are_sent_back_follow_those_that_the_program_had_already() -> None:
    holder = Holder()
    request = Call(call=1, target=MeshRef(object=3), endpoint="step", adverb="stream")
    for rank in (2, 0):
        holder.calls.returned(Returned(request=request, reply=Item(call=1, rank=rank), given=1), (b"value",))
    assert holder.states == {1: "finished"}
    first, *others = holder.sent_to_next(1)
    assert isinstance(first, Failed)
    assert [item.rank for item in others[:2]] == [2, 0]


def test_results_of_a_stream_that_were_not_sent_back_fail_for_the_next_holder() -> None:
    holder = Holder()
    request = Call(call=1, target=MeshRef(object=3), endpoint="step", adverb="stream")
    holder.calls.returned(Returned(request=request, reply=Item(call=1, rank=2)), (b"value",))
    holder.stream(2)
    holder.item(2, 0)
    alone = Call(call=3, target=MeshRef(object=3), endpoint="step", adverb="call")
    holder.calls.returned(Returned(request=alone, reply=Values(call=3)), (b"value",))
    holder.calls.holder_changed()
    item, failed, *others = holder.sent_to_next(1, 2, 3)  # the second takeover adds nothing
    assert item == Item(call=1, rank=2)
    assert (failed.call, failed.rank) == (1, None)
    assert "was on its way to the program that left" in failed.failure.message
    assert others == [Item(call=2, rank=0), Values(call=3)]


def test_what_is_sent_back_of_a_call_that_is_not_listed_is_dropped() -> None:
    holder = Holder()
    request = Call(call=1, target=MeshRef(object=3), endpoint="step", adverb="call", keep=7)
    holder.calls.returned(Returned(request=request, reply=Values(call=1)), (b"value",))
    assert holder.states == {}


def test_calls_whose_results_stay_in_their_processes_are_not_on_the_list() -> None:
    holder = Holder()
    holder.call(1, keep=7)
    assert holder.states == {}
    assert not holder.answer(1)
    holder.call(2, keep=7)
    holder.calls.holder_changed(2)
    assert holder.answer(2)


def test_a_result_that_is_being_fetched_does_not_make_room() -> None:
    holder = Holder(Spool(memory=2 * (5 + OVERHEAD), disk=0))
    for number in (1, 2, 3):
        holder.call(number)
    holder.answer(1, bytes(5))
    holder.calls.mark_read([1])
    holder.answer(2, bytes(5))
    holder.calls.mark_read([2])
    holder.calls.holder_changed()
    holder.queued = module.MAX_QUEUED
    holder.calls.fetch([1])
    holder.answer(3, bytes(5))
    assert holder.states == {1: "read", 3: "finished"}
    holder.queued = 0
    holder.calls.feed()
    assert [header.call for header, _ in holder.sent] == [1]  # type: ignore[union-attr]


def test_a_result_that_was_fetched_but_not_read_makes_room_after_the_next_takeover() -> None:
    holder = Holder(Spool(memory=5 + OVERHEAD, disk=0))
    holder.call(1)
    holder.call(2)
    holder.answer(1, bytes(5))
    holder.calls.mark_read([1])
    holder.calls.holder_changed()
    holder.calls.fetch([1])
    holder.calls.holder_changed()
    holder.answer(2, bytes(5))
    assert holder.states == {2: "finished"}


def test_items_that_find_no_space_on_a_congested_wire_fail_the_stream_once() -> None:
    holder = Holder(Spool(memory=2 * (5 + OVERHEAD), disk=0))
    holder.stream(1)
    assert holder.item(1, 0, bytes(5), congested=True)
    assert holder.item(1, 1, bytes(5), congested=True)
    holder.item(1, 2, bytes(5), congested=True)
    assert holder.states == {1: "lost"}
    holder.calls.feed()
    ((failed, _),) = holder.sent
    assert isinstance(failed, Failed)
    assert "no space was left to keep its result (5 bytes)" in failed.failure.message
    assert failed.rank is None
    assert holder.item(1, 3, bytes(5))
    assert len(holder.sent) == 1


def test_a_stream_that_the_program_dropped_is_kept_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READ_CALLS", 0)
    holder = Holder()
    holder.call(1)
    holder.calls.keep(Item(call=1, rank=0), (b"a",), congested=False)
    holder.calls.mark_released([1])
    assert holder.states == {1: "in flight"}
    holder.running.clear()
    holder.calls.mark_released([1])
    assert holder.states == {}


def test_a_result_that_finds_no_space_on_a_congested_wire_is_sent() -> None:
    holder = Holder(Spool(memory=0, disk=0))
    holder.call(1)
    assert not holder.answer(1, congested=True)
    assert holder.states == {1: "lost"}


def test_results_that_were_read_are_kept_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READ_BYTES", 25)
    holder = Holder()
    for number in range(1, 6):
        holder.call(number)
        holder.answer(number, bytes(10))
        holder.calls.mark_read([number])
    assert holder.states == {4: "read", 5: "read"}


def test_a_result_that_is_read_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READ_CALLS", 2)
    holder = Holder()
    for number in (1, 2):
        holder.call(number)
        holder.answer(number)
    holder.calls.mark_read([1, 1, 1, 2])
    assert holder.states == {1: "read", 2: "read"}


def test_the_bytes_of_results_that_were_replaced_or_pushed_out_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READ_BYTES", 25)
    holder = Holder()
    holder.call(1)
    holder.answer(1, bytes(10))
    holder.calls.mark_read([1])
    holder.calls.keep(Failed(call=1, failure=TOO_LARGE), (), congested=False)  # replaces the value
    for number in (2, 3, 4):
        holder.call(number)
        holder.answer(number, bytes(10))
        holder.calls.mark_read([number])
    assert holder.states == {3: "read", 4: "read"}


def test_results_of_an_earlier_holder_that_made_room_count_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READ_BYTES", 15)
    holder = Holder(Spool(memory=0, disk=30))
    holder.call(1)
    holder.answer(1, bytes(10))
    holder.calls.mark_read([1])
    holder.calls.holder_changed()
    holder.call(2)
    holder.answer(2, bytes(25))  # makes room by pushing out the first
    holder.calls.mark_read([2])
    assert holder.states == {}


def test_a_call_that_an_earlier_holder_dropped_is_kept_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READ_CALLS", 0)
    holder = Holder()
    holder.call(1)
    holder.calls.mark_released([1])
    holder.calls.holder_changed()
    holder.answer(1)
    assert holder.states == {1: "finished"}
