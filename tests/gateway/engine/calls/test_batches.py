"""Calls that leave together: what may, in which order, and that each is answered as if it had been sent alone."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_gateway.engine.calls import batches, calling
from meshgate_gateway.engine.calls.batches import MAX_BYTES, MAX_CALL_BYTES, MAX_CALLS, MAX_SECONDS, OPEN_CALLS
from meshgate_gateway.engine.calls.calling import Calling
from meshgate_gateway.engine.memory import ValueMemory
from meshgate_gateway.engine.monarch.interface import BatchedReply, Reply
from meshgate_gateway.engine.objects.regions import ranks_of
from meshgate_gateway.engine.objects.table import Lookup, ObjectTable
from meshgate_wire import Fragments
from meshgate_wire.messages import Call, Failed, Item, MeshRef, Region, Values
from tests.gateway.engine.fakes import FakeMesh, FakeMonarch, FakePort, Sent, actor_mesh, turns, until
from tests.waiting import run_alone

ACTORS = 3
RANKS = 2
REGION = Region(labels=("hosts",), offset=0, sizes=(RANKS,), strides=(1,))
ONE = {rank: Region(labels=(), offset=rank, sizes=(), strides=()) for rank in range(RANKS)}
PARTS: dict[str, Region | None] = {"all": None, "first": ONE[0], "second": ONE[1]}


@pytest.fixture(autouse=True)
def _no_batch_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "UNDER_WAY", 1000)


@dataclass
class Delivered:
    """A call that has reached a rank. ``position``: what its replies are known by; ``batch``: of which call it is."""

    number: int
    position: int
    port: FakePort | None
    batch: int | None


class MonarchWithMailboxes(FakeMonarch):
    """Delivers what is sent to mailboxes, from which a test answers."""

    def __init__(self) -> None:
        super().__init__()
        self.mailboxes: dict[int, list[Delivered]] = defaultdict(list)
        self.sizes: list[int] = []  # of batches
        self.broken = False

    def payload(self, data: Any, buffers: Any = (), objects: Any = ()) -> Any:
        return b"".join(data)

    def payload_at(self, payload: Any, position: int, region: Region) -> Any:
        return (payload,)

    def payload_with_trace(self, payload: Any, trace: object) -> Any:
        return (payload,)

    def _deliver(self, actors: FakeMesh, payload: Any, port: FakePort | None, batch: int | None) -> None:
        while isinstance(payload, tuple):
            payload = payload[0]
        number = int(payload.split()[0])
        for position, rank in enumerate(ranks_of(actors.region or REGION)):
            self.mailboxes[rank].append(Delivered(number, position, port, batch))

    def cast(self, actors: FakeMesh, endpoint: str, explicit_port: bool, payload: Any, port: Any) -> None:
        super().cast(actors, endpoint, explicit_port, payload, port)
        self._deliver(actors, payload, port, None)

    def call_batch(self, actors: FakeMesh, calls: Sequence[tuple[str, Any, int]]) -> FakePort:
        if self.broken:
            raise BaseException("Monarch panics")
        port, receiver = self.open_port()
        self.sizes.append(len(calls))
        for number, (_, payload, _) in enumerate(calls):
            self._deliver(actors, payload, port, number)
        return receiver


class Called:
    """Two actors, and calls to them."""

    def __init__(self) -> None:
        self.monarch, self.objects, self.sent = MonarchWithMailboxes(), ObjectTable(), Sent()
        self.unread: asyncio.Future[None] | None = None  # what responses wait for
        self.asked = 0
        self.calling = Calling(
            self.objects,
            Lookup(self.objects, self.monarch),
            self.monarch,
            self.sent,
            idle=lambda: None,
            metrics=self,
            memory=ValueMemory(lambda mesh, rank: False),
            kept=self,
            unread_output=self._unread_output,
        )
        self.mesh = actor_mesh()
        assert self.mesh.procs is not None
        self.mesh.procs.number = 1
        self.objects.add(ACTORS, self.mesh)
        self.calls: list[Call] = []

    def _unread_output(self, procs: int, ranks: Sequence[int]) -> asyncio.Future[None] | None:
        self.asked += 1
        return self.unread

    async def prepare(self, header: Call, target: object, arguments: Sequence[object]) -> None:
        """As ``KeptValues.prepare``, of calls without kept values."""

    def call_ended(self, seconds: float, *, failed: bool) -> None: ...

    def cast(self) -> None: ...

    def post(
        self, part: str = "first", adverb: str = "call", endpoint: str = "step", size: int = 0, **more: Any
    ) -> int:
        number = len(self.calls)
        header = Call(
            call=number,
            target=MeshRef(object=ACTORS, region=PARTS[part]),
            endpoint=endpoint,
            adverb=adverb,  # type: ignore[arg-type]
            **more,
        )
        self.calls.append(header)
        self.calling.call(header, [Fragments((b"%d " % number + b"x" * size,))])
        return number

    async def warm_up(self) -> int:
        """Opens as many calls as it takes for the next ones to be collected. Returns their number."""
        for _ in range(OPEN_CALLS):
            self.post(endpoint="open")
        self.mesh.totals_of("step").took(0.0)
        await turns()
        return OPEN_CALLS

    async def answer(self, rank: int, count: int = 1, *, seconds: float = 0.0, exception: bool = False) -> None:
        """Answers what ``rank`` got first, those of one batch together."""
        together: dict[int, list[BatchedReply]] = defaultdict(list)
        ports: dict[int, FakePort] = {}
        for _ in range(min(count, len(self.monarch.mailboxes[rank]))):
            call = self.monarch.mailboxes[rank].pop(0)
            reply = Reply(call.position, exception, b"%d at %d" % (call.number, rank), ())
            if call.port is None:
                continue
            if call.batch is None:
                call.port.messages.put_nowait(reply)
            else:
                ports[id(call.port)] = call.port
                together[id(call.port)].append(BatchedReply(call.batch, seconds, reply))
        for port, replies in together.items():
            ports[port].messages.put_nowait(replies)
        await turns()

    def responses(self, number: int) -> list[tuple[Any, tuple[Any, ...]]]:
        return [
            (header, buffers)
            for header, _, buffers in self.sent.messages
            if isinstance(header, (Values, Item, Failed)) and header.call == number
        ]

    async def close(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        timer = self.calling._report_timer
        if timer is not None:
            timer.cancel()
        for fault in self.monarch.faults:
            fault.cancel()
        await turns()


async def test_calls_of_one_turn_leave_together_while_others_are_open() -> None:
    called = Called()
    open_calls = await called.warm_up()
    for _ in range(5):
        called.post()
    assert called.monarch.sizes == []
    await turns()
    assert called.monarch.sizes == [5]
    await called.answer(0, open_calls + 5)
    for number in range(open_calls + 5):
        ((header, buffers),) = called.responses(number)
        assert isinstance(header, Values)
        assert buffers == (b"%d at 0" % number,)
    await called.close()


async def test_a_call_leaves_at_once_while_few_are_open() -> None:
    called = Called()
    for expected in range(1, OPEN_CALLS + 1):
        called.post()
        assert len(called.monarch.mailboxes[0]) == expected
    await called.close()


async def test_a_batch_is_limited_in_calls_bytes_and_time() -> None:
    called = Called()
    await called.warm_up()
    for _ in range(MAX_CALLS + 1):
        called.post()
    await turns()
    assert called.monarch.sizes == [MAX_CALLS, 1]
    size = MAX_BYTES // 8
    for _ in range(8):
        called.post(size=size)
    await turns()
    assert called.monarch.sizes[2:] == [7, 1]
    called.mesh.totals_of("step").expected = MAX_SECONDS / 4
    for _ in range(5):
        called.post()
    await turns()
    assert called.monarch.sizes[4:] == [4, 1]
    await called.close()


async def test_calls_of_an_endpoint_that_is_unknown_or_takes_long_leave_alone() -> None:
    called = Called()
    await called.warm_up()
    for _ in range(3):
        called.post(endpoint="new")
    await turns()
    assert called.monarch.sizes == [1, 1, 1]
    await called.answer(0, OPEN_CALLS + 2)
    await called.answer(0, 1, seconds=10 * MAX_SECONDS)
    await called.warm_up()
    for _ in range(3):
        called.post(endpoint="new")
        assert called.monarch.mailboxes[0][-1].batch is None
    for _ in range(10):
        called.post(endpoint="new")
        await turns()
    assert called.monarch.sizes[3:4] == [1], "it is not measured again"
    await called.answer(0, 100)
    await called.close()


@pytest.mark.parametrize(
    "alone",
    [
        {"explicit_port": True},
        {"trace": {"traceparent": "x"}},
        {"adverb": "broadcast"},
        {"adverb": "choose"},
        {"size": MAX_CALL_BYTES},
    ],
    ids=str,
)
async def test_what_must_be_sent_alone_does_not_overtake_what_was_collected(alone: dict[str, Any]) -> None:
    called = Called()
    await called.warm_up()
    first = [called.post() for _ in range(3)]
    middle = called.post(**alone)
    last = [called.post() for _ in range(3)]
    await turns()
    assert called.monarch.sizes == [3, 3]
    for mailbox in called.monarch.mailboxes.values():
        numbers = [each.number for each in mailbox if each.number >= OPEN_CALLS]
        assert numbers == [each for each in (*first, middle, *last) if each in numbers]
    await called.close()


async def test_calls_wait_while_two_batches_are_under_way_until_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "PATIENCE", 3600)
    monkeypatch.setattr(batches, "UNDER_WAY", 2)
    called = Called()
    open_calls = await called.warm_up()
    for _ in range(2):
        called.post()
        await turns()
    assert called.monarch.sizes == [1, 1]
    for _ in range(3):
        called.post()
        await turns()
    assert called.monarch.sizes == [1, 1]
    await called.answer(0, open_calls + 1)
    assert called.monarch.sizes == [1, 1, 3]
    await called.close()


async def test_calls_wait_for_earlier_batches_only_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "UNDER_WAY", 2)
    called = Called()
    await called.warm_up()
    for _ in range(3):
        called.post()
        await turns()
    await until(lambda: len(called.monarch.sizes) == 3)
    await called.close()


async def test_a_call_does_not_overtake_one_that_waits_although_few_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "PATIENCE", 3600)
    monkeypatch.setattr(batches, "UNDER_WAY", 2)
    called = Called()
    open_calls = await called.warm_up()
    numbers = []
    for _ in range(3):
        numbers.append(called.post())
        await turns()
    await called.answer(0, open_calls)
    numbers.append(called.post())
    called.calling.flush()
    assert [each.number for each in called.monarch.mailboxes[0]] == numbers
    await called.close()


async def test_what_is_not_a_call_waits_for_flush() -> None:
    called = Called()
    await called.warm_up()
    called.post()
    called.calling.flush()
    assert called.monarch.sizes == [1]
    await called.close()


@pytest.mark.parametrize("reason", ["returned", "not set up", "coming up"])
async def test_calls_leave_alone_to_actors_that_cannot_run_batches(reason: str) -> None:
    called = Called()
    await called.warm_up()
    assert called.mesh.procs is not None
    if reason == "returned":
        called.mesh.returned = True
    elif reason == "not set up":
        called.mesh.procs.number = 0
    else:
        called.mesh.up = asyncio.get_running_loop().create_future()
    called.post()
    assert called.monarch.mailboxes[0][-1].batch is None
    await called.close()


async def test_a_death_fails_what_a_batch_has_not_answered_and_nothing_else() -> None:
    called = Called()
    open_calls = await called.warm_up()
    numbers = [called.post() for _ in range(6)]
    await turns()
    await called.answer(0, open_calls + 2)
    called.mesh.dead[0] = "killed"
    called.calling.fail(called.mesh)
    await called.answer(0, 4)  # too late
    for number in numbers[:2]:
        assert isinstance(called.responses(number)[0][0], Values)
    for number in numbers[2:]:
        ((header, _),) = called.responses(number)
        assert isinstance(header, Failed)
        assert (header.failure.kind, header.failure.message) == ("supervision", "killed")
    assert called.monarch.ports[-1].closed
    await called.close()


async def test_calls_that_end_before_their_batch_leaves_are_not_sent() -> None:
    called = Called()
    await called.warm_up()
    called.post()
    called.mesh.dead[0] = "killed"
    called.calling.fail(called.mesh)
    await turns()
    assert called.monarch.sizes == []
    await called.close()


async def test_an_answer_of_monarchs_own_is_for_all_that_the_rank_has_not_answered() -> None:
    called = Called()
    open_calls = await called.warm_up()
    numbers = [called.post() for _ in range(3)]
    await turns()
    port = called.monarch.mailboxes[0][-1].port
    assert port is not None
    await called.answer(0, open_calls + 1)
    port.put(b"no such actor", 0, exception=True)
    await turns()
    headers = [called.responses(number)[0][0] for number in numbers]
    assert [type(header) for header in headers] == [Values, Failed, Failed]
    await called.close()


async def test_a_batch_that_monarch_does_not_take_fails_its_calls() -> None:
    called = Called()
    await called.warm_up()
    numbers = [called.post(), called.post()]
    called.monarch.broken = True
    await turns()
    for number in numbers:
        ((header, _),) = called.responses(number)
        assert isinstance(header, Failed)
        assert "Monarch panics" in header.failure.message
    await called.close()


async def test_output_is_looked_for_once_for_replies_that_arrive_together() -> None:
    called = Called()
    open_calls = await called.warm_up()
    await called.answer(0, open_calls)
    await called.warm_up()
    numbers = [called.post() for _ in range(10)]
    await turns()
    await called.answer(0, open_calls)
    called.asked = 0
    called.unread = asyncio.get_running_loop().create_future()
    await called.answer(0, 10)
    assert called.asked == 1
    assert not any(called.responses(number) for number in numbers)
    called.mesh.dead[0] = "killed"  # too late for calls whose last reply is here, as is what Monarch says itself
    called.calling.fail(called.mesh)
    called.monarch.ports[-1].put(b"no such actor", 0, exception=True)
    await turns()
    called.unread.set_result(None)
    await turns()
    assert all(isinstance(called.responses(number)[0][0], Values) for number in numbers)
    assert called.asked == 1
    await called.close()


POSTS = st.tuples(
    st.just("post"),
    st.sampled_from(sorted(PARTS)),
    st.sampled_from(["call", "call", "call", "stream", "choose", "broadcast"]),
    st.sampled_from(["step", "other"]),
    st.sampled_from([{}, {}, {}, {"explicit_port": True}, {"trace": {"traceparent": "x"}}, {"size": MAX_CALL_BYTES}]),
)
ANSWERS = st.tuples(
    st.just("answer"),
    st.integers(0, RANKS - 1),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.0, 0.0001, 1.0]),
    st.sampled_from([False, False, True]),
)
STEPS = st.lists(
    st.one_of(POSTS, POSTS, POSTS, ANSWERS, st.just(("turn",)), st.tuples(st.just("die"), st.integers(0, 1))),
    max_size=60,
)


@given(steps=STEPS, under_way=st.sampled_from([1, 2, 1000]))
def test_each_call_runs_in_order_and_is_answered_as_if_it_were_alone(steps: list[Any], under_way: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calling, "GATHER_FAILURES", 0)
        patch.setattr(batches, "PATIENCE", 3600)
        patch.setattr(batches, "UNDER_WAY", under_way)
        run_alone(_run(steps))


async def _run(steps: list[Any]) -> None:
    called = Called()
    await called.warm_up()
    answered: dict[tuple[int, int], bool] = {}  # (call, rank): whether with an exception
    delivered: dict[int, list[int]] = defaultdict(list)

    async def answer(rank: int, count: int, seconds: float, exception: bool) -> None:
        if rank in called.mesh.dead:
            return
        for each in called.monarch.mailboxes[rank][:count]:
            delivered[rank].append(each.number)
            answered[each.number, rank] = exception
        await called.answer(rank, count, seconds=seconds, exception=exception)

    for step in steps:
        match step:
            case ("post", part, adverb, endpoint, more):
                called.post(part, adverb, endpoint, **more)
            case ("answer", rank, count, seconds, exception):
                await turns()
                await answer(rank, count, seconds, exception)
            case ("die", rank):
                called.mesh.dead.setdefault(rank, "killed")
                called.calling.fail(called.mesh)
            case _:
                await turns()
        called.calling.validate_state()
    called.calling.flush()
    await turns()
    for rank in range(RANKS):
        await answer(rank, 1000, 0.0, False)
    await turns(200)
    for rank, numbers in delivered.items():
        assert numbers == sorted(numbers), f"rank {rank} has run calls in another order"
    for header in called.calls:
        _check_answer(
            called, header, {rank: failed for (call, rank), failed in answered.items() if call == header.call}
        )
    await called.close()


def _check_answer(called: Called, header: Call, answered: dict[int, bool]) -> None:
    responses = called.responses(header.call)
    if header.adverb == "broadcast":
        assert responses == []
        return
    ranks = ranks_of(header.target.region or REGION)
    wrong = [data for _, buffers in responses for data in buffers if not data.startswith(b"%d at " % header.call)]
    assert wrong == [], "a call has another call's result"
    if header.adverb == "stream":
        assert len(responses) >= 1
        assert all(isinstance(each, (Item, Failed)) for each, _ in responses)
        return
    ((response, buffers),) = responses
    whole = len(answered) == (1 if header.adverb == "choose" else len(ranks))
    if whole and not any(answered.values()):
        assert isinstance(response, Values)
        assert buffers == tuple(b"%d at %d" % (header.call, rank) for rank in sorted(answered))
    else:
        assert isinstance(response, Failed)
        assert response.failure.kind in (("actor",) if whole else ("actor", "supervision"))


async def test_a_batch_ends_with_its_calls_although_their_replies_wait_for_output() -> None:
    called = Called()
    opened = await called.warm_up()
    for rank in (0, 1):
        called.monarch.mailboxes[rank].clear()
    calls = [called.post() for _ in range(4)]
    await turns()
    called.unread = asyncio.get_running_loop().create_future()
    for rank in (0, 1):
        await called.answer(rank, 4)
    assert sum(called.calling._batches._under_way.values()) == 1
    called.unread.set_result(None)
    await turns()
    assert all(called.responses(call) for call in calls)
    assert opened
    assert not called.calling._batches._under_way
    await called.close()


async def test_a_batch_ends_with_its_calls_if_a_rank_dies() -> None:
    called = Called()
    await called.warm_up()
    called.post()
    await turns()
    assert sum(called.calling._batches._under_way.values()) == 1
    called.mesh.dead[0] = "killed"
    called.calling.fail(called.mesh)
    await turns()
    assert not called.calling._batches._under_way
    await called.close()
