"""Calls between a client and actors, without an engine around."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Sequence

import pytest

from meshgate_gateway.engine.calls import calling
from meshgate_gateway.engine.calls.calling import Calling
from meshgate_gateway.engine.calls.kept_values import Prepared
from meshgate_gateway.engine.calls.pending_calls import PendingCall, Response
from meshgate_gateway.engine.failures import RequestFailed
from meshgate_gateway.engine.memory import SMALL, ValueMemory
from meshgate_gateway.engine.objects.records import ActorMesh
from meshgate_gateway.engine.objects.table import Lookup, ObjectTable
from meshgate_wire import Fragments, MessageTooLarge
from meshgate_wire.messages import (
    Argument,
    Call,
    CallProgress,
    CancelCall,
    Failed,
    Failure,
    Header,
    Item,
    MeshRef,
    Progress,
    Region,
    Values,
    stream_of,
)
from tests.gateway.engine.fakes import FakeMonarch, Sent, actor_mesh, proc_mesh, turns, until

ACTORS = 3
ARGUMENTS = [Fragments((b"arguments",))]


class Called:
    """Actors on two hosts, and the calls to them."""

    def __init__(self) -> None:
        self.monarch, self.objects, self.sent = FakeMonarch(), ObjectTable(), Sent()
        self.idle = 0
        self.unsent = 0
        self.ended: list[bool] = []  # whether each ended call failed
        self.casts = 0
        self.memory = ValueMemory(self._awaits, lambda: self.unsent, limit=100)
        lookup = Lookup(self.objects, self.monarch)
        self.prepared: Prepared | None = None
        self.refusal: RequestFailed | None = None
        self.unread: asyncio.Future[None] | None = None  # what the next response waits for
        self.asked: list[tuple[int, list[int]]] = []
        self.told: list[tuple[int, set[int], int]] = []  # which processes know that which call is cancelled
        self.notices: list[str] = []
        self.calling = Calling(
            self.objects,
            lookup,
            self.monarch,
            self.sent,
            idle=self._idle,
            metrics=self,
            memory=self.memory,
            kept=self,
            unread_output=self._unread_output,
            cancel_on=lambda procs, ranks, call: self.told.append((procs, set(ranks), call)),
            notice=self.notices.append,
        )
        self.actors = actor_mesh()
        self.objects.add(ACTORS, self.actors)

    async def prepare(self, header: Call, target: object, arguments: Sequence[object]) -> Prepared | None:
        """As ``KeptValues.prepare``."""
        if self.refusal is not None:
            raise self.refusal
        return self.prepared

    def _awaits(self, mesh: int, rank: int) -> bool:
        return self.calling.awaits(mesh, rank)

    async def read_all(self) -> None:
        """What the response waited for has been read, and it is sent."""
        assert self.unread is not None
        self.unread.set_result(None)
        await until(lambda: self.sent.messages)

    def _unread_output(self, procs: int, ranks: Sequence[int]) -> asyncio.Future[None] | None:
        self.asked.append((procs, list(ranks)))
        return self.unread

    def _idle(self) -> None:
        self.idle += 1

    def call_ended(self, seconds: float, *, failed: bool) -> None:
        assert 0 <= seconds < 60
        self.ended.append(failed)

    def cast(self) -> None:
        self.casts += 1

    def progress(self) -> list[CallProgress]:
        """What the client has been sent of the progress of calls."""
        return [each for header in self.sent.of(Progress) for each in header.calls]

    def call(self, number: int = 1, adverb: str = "call", target: int = ACTORS) -> object:
        header = Call(call=number, target=MeshRef(object=target), endpoint="step", adverb=adverb)  # type: ignore[arg-type]
        return self.calling.call(header, ARGUMENTS)

    def cancel(self, number: int = 1, waiting: Sequence[Call] = ()) -> None:
        self.calling.cancel(CancelCall(cancelled=number), waiting)

    def reply(
        self, rank: int, data: bytes = b"value", *, exception: bool = False, references: tuple[str, ...] = ()
    ) -> None:
        self.monarch.ports[-1].put(data, rank, exception=exception, references=references)


def _note(
    ended: list[Response | None],
    sent: list[PendingCall | None],
    response: Response | None,
    pending: PendingCall | None,
) -> None:
    ended.append(response)
    sent.append(pending)


def _header(response: Response | None) -> Header:
    assert response is not None
    return response.header


async def cancel_receives() -> None:
    """Ends the receives that the fake Monarch still waits in."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await turns()


async def test_a_call_to_actors_that_exist_is_sent_at_once_and_answered_on_their_stream() -> None:
    called = Called()
    assert called.call() is None
    ((endpoint, payload, port),) = called.monarch.casts
    assert (endpoint, payload, port) == ("step", b"arguments", called.monarch.ports[0])
    called.reply(1, b"second")
    called.reply(0, b"first")
    await until(lambda: called.sent.messages)
    ((header, stream, buffers),) = called.sent.messages
    assert isinstance(header, Values)
    assert (stream, buffers) == (stream_of(ACTORS), (b"first", b"second"))


async def test_a_call_to_actors_that_do_not_exist_yet_waits_for_them() -> None:
    called = Called()
    waiting = asyncio.ensure_future(called.call(target=9))  # type: ignore[arg-type]
    await turns()
    assert called.monarch.casts == []
    called.objects.add(9, actor_mesh(name="late"))
    await waiting
    assert len(called.monarch.casts) == 1
    await cancel_receives()


async def test_a_call_with_meshes_among_its_arguments_passes_monarchs_own_objects() -> None:
    called = Called()
    called.objects.add(2, procs := proc_mesh())
    arguments = (Argument(kind="procs", ref=MeshRef(object=2)),)
    header = Call(call=1, target=MeshRef(object=ACTORS), endpoint="step", adverb="broadcast", arguments=arguments)
    await called.calling.call(header, ARGUMENTS)  # type: ignore[misc]
    assert called.monarch.casts[0][1] == (b"arguments", procs.mesh)


async def test_a_broadcast_expects_no_reply_and_is_never_answered() -> None:
    called = Called()
    called.call(adverb="broadcast")
    called.actors.dead[0] = "killed"
    called.call(adverb="broadcast")
    assert [port for _, _, port in called.monarch.casts] == [None]
    assert called.sent.messages == []
    totals = called.actors.totals["step"]
    assert (totals.casts, totals.ended, totals.failed) == (1, 1, 1)


async def test_a_broadcast_that_cannot_be_sent_is_reported_as_nothing_waits_for_it() -> None:
    called = Called()
    called.refusal = RequestFailed(Failure(kind="lost", message="gone"))
    for adverb in ("call", "broadcast"):
        target = MeshRef(object=ACTORS)
        header = Call(call=1, target=target, endpoint="step", adverb=adverb, keep=9)  # type: ignore[arg-type]
        with pytest.raises(RequestFailed):
            await called.calling.call(header, ARGUMENTS)  # type: ignore[misc]
    assert called.notices == ["a broadcast of step was not sent: gone"]


async def test_a_call_to_dead_ranks_or_failed_actors_fails_without_being_sent() -> None:
    called = Called()
    called.actors.dead[1] = "process 12 of rank 1 ended"
    called.call(1)
    called.actors.failed = Failure(kind="supervision", message="the constructor raised")
    called.call(2)
    assert [failed.failure.message for failed in called.sent.of(Failed)] == [
        "process 12 of rank 1 ended",
        "the constructor raised",
    ]
    assert called.monarch.casts == []


async def test_choose_calls_a_living_rank_alone_and_fails_if_it_dies() -> None:
    called = Called()
    called.actors.dead[0] = "killed"
    for number in range(8):
        called.call(number, "choose")
    assert {payload for _, payload, _ in called.monarch.casts} == {("at", 1, (2,), b"arguments")}
    called.actors.dead[1] = "killed too"
    called.calling.fail(called.actors)
    assert [failed.failure.message for failed in called.sent.of(Failed)] == ["killed too"] * 8
    called.call(9, "choose")
    assert called.sent.of(Failed)[-1].call == 9
    await cancel_receives()


async def test_ranks_that_die_fail_the_pending_calls_of_their_mesh_only() -> None:
    called = Called()
    other = actor_mesh(name="others")
    called.objects.add(5, other)
    called.call(1)
    called.call(2, target=5)
    called.actors.dead[0] = "killed"
    called.calling.fail(called.actors)
    assert [failed.call for failed in called.sent.of(Failed)] == [1]
    assert [port.closed for port in called.monarch.ports] == [True, False]
    assert called.idle == 0
    _fail(called, other, Failure(kind="supervision", message="the constructor raised"))
    assert [failed.call for failed in called.sent.of(Failed)] == [1, 2]
    assert called.idle == 1
    await cancel_receives()


def _fail(called: Called, actors: ActorMesh, failure: Failure) -> None:
    actors.failed = failure
    called.calling.fail(actors)


async def test_the_first_exception_is_sent_although_other_ranks_have_not_replied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calling, "GATHER_FAILURES", 0.01)
    called = Called()
    called.call()
    called.reply(0, b"boom", exception=True)
    await until(lambda: called.sent.of(Failed))
    (failed,) = called.sent.of(Failed)
    assert (failed.failure.kind, failed.failure.unanswered) == ("actor", 1)
    called.reply(1)
    await turns()
    assert len(called.sent.messages) == 1


async def test_exceptions_are_gathered_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "GATHER_FAILURES", 3600.0)
    called = Called()
    called.call()
    called.reply(0, b"boom", exception=True)
    await turns()
    assert called.sent.messages == []
    called.reply(1, b"boom", exception=True)
    await until(lambda: called.sent.of(Failed))
    (failed,) = called.sent.of(Failed)
    assert (failed.failure.kind, failed.failure.unanswered) == ("actor", 0)


NOT_SPAWNED = b"error spawning actor mesh: Cannot spawn new actors on mesh with supervision events"


@pytest.mark.parametrize("adverb", ["call", "choose", "stream"])
async def test_calls_to_actors_that_could_not_be_spawned_fail_with_the_reason(adverb: str) -> None:
    """Monarch's own answer to the call, which lacks the reason, may come before the spawn has failed."""
    called = Called()
    called.actors.up = up = asyncio.get_running_loop().create_future()
    called.call(adverb=adverb)
    called.reply(0, NOT_SPAWNED, exception=True)
    called.reply(1, NOT_SPAWNED, exception=True)
    await until(lambda: called.monarch.ports[-1].received)
    await turns()
    assert called.sent.messages == []
    _fail(called, called.actors, Failure(kind="supervision", message="worker workers-0 has Python 3.99.1"))
    up.set_result(None)
    await turns()
    assert [failed.failure.message for failed in called.sent.of(Failed)] == ["worker workers-0 has Python 3.99.1"]
    assert len(called.sent.messages) == 1
    await cancel_receives()


async def test_exceptions_that_come_before_the_spawn_is_known_to_have_succeeded_are_the_answer() -> None:
    called = Called()
    called.actors.up = up = asyncio.get_running_loop().create_future()
    called.call()
    called.reply(0)
    called.reply(1, b"boom", exception=True)
    await until(lambda: called.monarch.ports[-1].received == 2)
    await turns()
    assert called.sent.messages == []
    up.set_result(None)
    await until(lambda: called.sent.messages)
    ((header, _, buffers),) = called.sent.messages
    assert isinstance(header, Failed)
    assert (header.failure.ranks, buffers) == ((1,), (b"boom",))


async def test_the_items_of_a_stream_are_sent_one_by_one() -> None:
    called = Called()
    called.call(adverb="stream")
    called.reply(1)
    await until(lambda: called.sent.of(Item))
    called.reply(0)
    await until(lambda: len(called.sent.of(Item)) == 2)
    assert [item.rank for item in called.sent.of(Item)] == [1, 0]


async def test_meshes_that_an_endpoint_returns_get_numbers() -> None:
    called = Called()
    called.call(adverb="choose")
    called.reply(0, references=("mesh a", "mesh b"))
    await until(lambda: called.sent.of(Values))
    (values,) = called.sent.of(Values)
    assert values.objects[0].objects == (-1, -2)
    assert called.objects.reference(-2) == "mesh b"


async def test_calls_on_a_returned_mesh_fail_with_the_next_fault_that_its_owner_reports() -> None:
    called = Called()
    called.actors.returned = True
    called.call(1)
    called.call(2)
    called.objects.add(9, actor_mesh(name="own"))
    called.call(3, target=9)
    fault, _ = called.monarch.faults
    fault.set_exception(RuntimeError("the actors were stopped"))
    await turns()
    assert [(failed.call, failed.failure.kind) for failed in called.sent.of(Failed)] == [
        (1, "supervision"),
        (2, "supervision"),
    ]
    assert {failed.failure.message for failed in called.sent.of(Failed)} == {"the actors were stopped"}
    called.call(4)
    assert len(called.monarch.faults) == 3
    assert called.calling.is_running(4)
    await cancel_receives()


SILENT = "stopped: no status received from process"
STOPPED = RuntimeError("Supervision event: actor <root>.<A a{'gpus': 1/2}> has status:\n  stopped: enough")


async def test_calls_to_an_actor_that_stopped_itself_fail_and_those_to_others_go_on() -> None:
    called = Called()
    first, second = (Region(labels=(), offset=rank, sizes=(), strides=()) for rank in (0, 1))
    for number, region in enumerate((first, first, second)):
        target = MeshRef(object=ACTORS, region=region)
        called.calling.call(Call(call=number, target=target, endpoint="step", adverb="call"), ARGUMENTS)
    called.monarch.faults[0].set_exception(STOPPED)
    await turns()
    failed = called.sent.of(Failed)
    assert [(each.call, each.failure.kind) for each in failed] == [(0, "supervision"), (1, "supervision")]
    assert "stopped: enough" in failed[0].failure.message
    assert called.calling.is_running(2)
    await cancel_receives()


@pytest.mark.parametrize(
    ("point", "ranks", "hosts"), [("'hosts': 1/2", (1,), {1: "workers-1"}), ("'gpus': 1/4", (), {})]
)
async def test_calls_to_a_process_that_does_not_answer_name_its_rank_and_host(
    point: str, ranks: tuple[int, ...], hosts: dict[int, str]
) -> None:
    called = Called()
    called.call(1)
    report = f"Supervision event: actor <root>.<A a{{{point}}}> has status:\n  {SILENT}"
    called.monarch.faults[0].set_exception(RuntimeError(report))
    await turns()
    (failed,) = called.sent.of(Failed)
    assert (failed.failure.kind, failed.failure.mesh) == ("supervision", "actors")
    assert (failed.failure.ranks, failed.failure.hosts) == (ranks, hosts)  # none if the point is not one of the mesh
    assert "Its host may have lost its power or its network" in failed.failure.message
    await cancel_receives()


async def test_failures_and_stops_by_the_session_are_left_to_those_that_know_more() -> None:
    called = Called()
    called.call(1)
    called.monarch.faults[-1].set_exception(RuntimeError("The actor and all its descendants have failed"))
    await turns()
    called.call(2)
    called.actors.stopping = True
    called.monarch.faults[-1].set_exception(STOPPED)
    await turns()
    assert called.sent.messages == []
    assert called.calling.is_running(1)
    assert called.calling.is_running(2)
    await cancel_receives()


async def test_only_parts_with_calls_are_supervised_if_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "MAX_SUPERVISED", 2)
    called = Called()
    for number in range(4):
        called.objects.add(10 + number, actor_mesh(name=f"mesh {number}"))
        called.call(number, target=10 + number)
        if number == 0:
            called.reply(0)
            called.reply(1)
            await until(lambda: called.sent.of(Values))
    assert [fault.cancelled() for fault in called.monarch.faults] == [True, False, False, False]
    called.monarch.faults[1].set_exception(STOPPED)
    await turns()
    assert [failed.call for failed in called.sent.of(Failed)] == [1]
    await cancel_receives()


async def test_a_fault_of_one_part_of_a_returned_mesh_leaves_calls_on_other_parts() -> None:
    called = Called()
    called.actors.returned = True
    first, second = (Region(labels=(), offset=rank, sizes=(), strides=()) for rank in (0, 1))
    for number, region in enumerate((first, second, second)):
        target = MeshRef(object=ACTORS, region=region)
        called.calling.call(Call(call=number, target=target, endpoint="step", adverb="call"), ARGUMENTS)
    called.monarch.faults[0].set_exception(RuntimeError("failed"))
    await turns()
    assert [failed.call for failed in called.sent.of(Failed)] == [0]
    assert len(called.monarch.faults) == 2
    await cancel_receives()


async def test_idle_is_reported_when_the_last_pending_call_is_answered() -> None:
    called = Called()
    called.call(1, "choose")
    first = called.monarch.ports[-1]
    called.call(2, "choose")
    called.reply(0)
    await until(lambda: len(called.sent.of(Values)) == 1)
    assert called.idle == 0
    first.put(b"value", 0)
    await until(lambda: len(called.sent.of(Values)) == 2)
    assert called.idle == 1


def whose_values_are_too_large() -> Called:
    called = Called()
    send = called.sent.__call__

    def reject(header: Header, buffers: Sequence[object] = (), *, stream: int = 0) -> None:
        if isinstance(header, Values):
            raise MessageTooLarge("bytes", 5_000_000_000, 4_294_967_296)
        send(header, buffers, stream=stream)

    called.calling._send = reject
    return called


async def test_a_reply_that_is_too_large_for_a_message_fails_the_call() -> None:
    called = whose_values_are_too_large()
    called.call()
    called.reply(0)
    called.reply(1)
    await until(lambda: called.sent.messages)
    (failed,) = called.sent.of(Failed)
    assert failed.call == 1
    assert "cannot send a message with 5000000000 bytes" in failed.failure.message
    assert "with endpoint.keep() in place of call()" in failed.failure.message


async def test_a_reply_that_the_engine_has_no_memory_for_fails_the_call() -> None:
    called = Called()
    called.unsent = 90
    called.call()
    called.reply(0, bytes(SMALL))
    called.reply(1, b"1")
    await until(lambda: called.sent.messages)
    (failed,) = called.sent.of(Failed)
    assert failed.call == 1
    assert "has room for 0.0 MB. MESHGATE_VALUE_MEMORY=100 " in failed.failure.message
    called.call(2)
    called.reply(0, b"1")
    called.reply(1, b"1")
    await until(lambda: called.sent.of(Values))


async def test_the_error_of_kept_values_too_large_for_a_message_does_not_advise_keep() -> None:
    called = whose_values_are_too_large()
    pending = PendingCall(1, "call", "procs", "read", (0,), lambda rank: "host")
    called.calling.start(pending, called.actors, called.actors.actors, ARGUMENTS, 0)
    called.reply(0)
    await until(lambda: called.sent.messages)
    (failed,) = called.sent.of(Failed)
    assert "The values stay in the cluster: fetch a slice of the kept mesh, or pass" in failed.failure.message


async def test_the_progress_of_a_call_that_takes_long_is_reported_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calling, "REPORT_INTERVAL", 0.01)
    called = Called()
    called.call(1)
    called.call(2)

    def reports() -> list[tuple[int, int, bool, list[int]]]:
        return [(each.call, each.answered, each.first, list(each.waiting)) for each in called.progress()]

    await until(lambda: len(reports()) == 2)
    assert reports() == [(1, 0, True, [0, 1]), (2, 0, False, [0, 1])]
    await asyncio.sleep(0.05)  # nothing changes meanwhile
    called.monarch.ports[0].put(b"value", 1)
    await until(lambda: len(reports()) == 3)
    assert reports()[2] == (1, 1, True, [0])
    called.monarch.ports[0].put(b"value", 0)
    await until(lambda: len(reports()) == 4)
    assert reports()[3] == (2, 0, True, [0, 1])  # it is the oldest now
    for rank in range(2):
        called.monarch.ports[1].put(b"value", rank)
    await until(lambda: called.idle)
    await until(lambda: called.calling._report_timer is None)


async def test_the_progress_of_calls_to_actors_says_whether_one_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calling, "REPORT_INTERVAL", 0.01)
    called = Called()
    called.call(1)
    called.call(2)

    def reports() -> list[tuple[int, bool]]:
        return [(each.call, each.untried) for each in called.progress()]

    await until(lambda: reports() == [(1, True), (2, True)])
    for rank in range(2):
        called.monarch.ports[1].put(b"value", rank)
    await until(lambda: reports()[2:] == [(1, False)])
    for rank in range(2):
        called.monarch.ports[0].put(b"value", rank)
    await until(lambda: called.idle)
    await until(lambda: called.calling._report_timer is None)


async def test_the_room_of_a_large_reply_is_free_once_it_has_arrived_or_its_call_has_ended() -> None:
    called = Called()
    procs = proc_mesh()
    procs.number = 7
    called.objects.add(5, actor_mesh(procs))
    called.call(1, target=5)
    await turns()
    assert called.memory.ask(7, 0, 60, reply=True) == called.memory.ask(7, 1, 30, reply=True) == ""
    assert called.memory.ask(7, 1, 11, reply=True)
    called.reply(0, bytes(60))
    await turns()
    assert [promise.nbytes for promise in called.memory.promised] == [30]
    called.call(2, target=5)
    called.monarch.ports[0].put(b"something else", 1)
    await turns()
    assert [promise.nbytes for promise in called.memory.promised] == [30]  # the second call may bring it
    for rank in range(2):
        called.monarch.ports[1].put(b"of the second", rank)
    await until(lambda: called.idle)
    assert not called.memory.promised
    assert called.memory.ask(7, 0, 60, reply=True) == ""  # late: its call has ended, and drops it
    assert not called.memory.promised


async def test_each_call_is_counted_once_with_its_outcome() -> None:
    called = Called()
    called.call(1)
    called.reply(0)
    called.reply(1)
    await until(lambda: called.ended)
    called.call(2, "stream")
    called.reply(0, exception=True)
    called.reply(1)
    await until(lambda: len(called.ended) == 2)
    called.call(3)
    called.actors.failed = Failure(kind="supervision", message="gone")
    called.calling.fail(called.actors)
    called.call(4)
    assert called.ended == [False, True, True, True]
    totals = called.actors.totals["step"]
    assert (totals.ended, totals.failed) == (4, 3)
    timelines = [(each.call, each.failed, each.answered) for each in totals.timelines]
    assert timelines == [(1, False, 2), (2, True, 2), (3, True, 0)]  # the fourth was not sent
    assert called.casts == 0
    await cancel_receives()


async def test_a_number_of_an_open_call_is_refused() -> None:
    called = Called()
    called.call(1)
    with pytest.raises(RequestFailed, match="call 1 is open: another call needs another number"):
        called.call(1)
    assert len(called.monarch.casts) == 1
    called.reply(0)
    called.reply(1)
    await until(lambda: called.ended)
    assert called.ended == [False]
    await cancel_receives()


async def test_the_last_rank_of_each_call_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    called = Called()
    late = iter([0.0, 0.5])
    monkeypatch.setattr(PendingCall, "last_rank", lambda self: (self.ranks[-1], next(late)))
    for number in (1, 2):
        called.call(number)
        called.reply(0)
        called.reply(1)
        await until(lambda: not called.calling._pending)
    step = called.actors.totals["step"]
    assert [*step.last_ranks] == [(1, 0.0), (1, 0.5)]
    assert [(each.call, each.compared) for each in step.timelines] == [(1, (1, 0.0)), (2, (1, 0.5))]
    await cancel_receives()


async def test_calls_to_several_ranks_have_timelines_while_they_run_and_when_they_have_ended() -> None:
    called = Called()
    called.call(1, "choose")
    called.call(2)
    called.call(3)
    ((running, mesh),) = called.calling.timelines(1)
    assert (running.call, running.ended, running.answered, mesh) == (2, None, 0, called.actors)
    assert [each.call for each, _ in called.calling.timelines(8)] == [2, 3]
    called.monarch.ports[0].put(b"value", 0)
    for port in called.monarch.ports[1:]:
        for rank in range(2):
            port.put(b"value", rank)
    await until(lambda: not called.calling._pending)
    assert called.calling.timelines(8) == []
    step = called.actors.totals["step"]
    assert sorted(each.call for each in step.timelines) == [2, 3]
    assert all(each.ended is not None and each.ended >= each.last[0][1] for each in step.timelines)
    await cancel_receives()


async def test_calls_without_replies_are_counted_apart() -> None:
    called = Called()
    called.call(1, "broadcast")
    assert (called.ended, called.casts) == ([], 1)


async def test_a_call_with_a_trace_is_sent_with_it() -> None:
    called = Called()
    trace = {"traceparent": "00-1-2-01"}
    target = MeshRef(object=ACTORS)
    called.calling.call(Call(call=1, target=target, endpoint="step", adverb="broadcast", trace=trace), ARGUMENTS)
    called.calling.call(Call(call=2, target=target, endpoint="step", adverb="choose", trace=trace), ARGUMENTS)
    first, second = (payload for _, payload, _ in called.monarch.casts)
    assert first == ("trace", trace, b"arguments")
    assert second[:2] == ("trace", trace)
    assert second[2][0] == "at"
    await cancel_receives()


PROCS = 2


def printing_actors() -> Called:
    called = Called()
    procs = called.actors.procs
    assert procs is not None
    procs.number = PROCS
    called.unread = asyncio.get_running_loop().create_future()
    return called


async def test_a_result_waits_for_what_its_ranks_have_printed() -> None:
    called = printing_actors()
    called.call()
    called.reply(1, b"second")
    await turns()
    assert called.asked == []  # the call waits anyhow
    called.reply(0, b"first")
    await until(lambda: called.asked)
    await turns()
    assert called.asked == [(PROCS, [0, 1])]
    assert called.sent.messages == []
    assert called.calling.is_running(1)
    await called.read_all()
    assert isinstance(called.sent.messages[0][0], Values)
    assert called.idle == 1


async def test_each_item_of_a_stream_waits_for_what_its_rank_has_printed() -> None:
    called = printing_actors()
    called.call(adverb="stream")
    called.reply(1, b"second")
    await until(lambda: called.asked)
    assert called.asked == [(PROCS, [1])]
    assert called.sent.messages == []
    await called.read_all()
    called.reply(0, b"first")
    await until(lambda: len(called.sent.messages) == 2)


async def test_items_that_arrive_together_are_sent_in_their_order_each_after_its_ranks_output() -> None:
    called = printing_actors()
    called.call(adverb="stream")
    called.reply(1, b"second")
    called.reply(0, b"first")
    await until(lambda: called.monarch.ports[-1].received == 2)
    await turns()
    assert called.asked == [(PROCS, [1])]  # the other one waits for this
    first, called.unread = called.unread, asyncio.get_running_loop().create_future()
    assert first is not None
    first.set_result(None)
    await until(lambda: len(called.asked) == 2)
    assert [item.rank for item in called.sent.of(Item)] == [1]
    called.unread.set_result(None)
    await until(lambda: len(called.sent.messages) == 2)
    assert [item.rank for item in called.sent.of(Item)] == [1, 0]
    assert called.asked == [(PROCS, [1]), (PROCS, [0])]
    assert not called.calling.is_running(1)


async def test_replies_of_several_ranks_are_received_together_unless_a_rank_may_send_more_than_one() -> None:
    called = Called()
    called.call(1)
    called.call(2, adverb="choose")
    explicit = Call(call=3, target=MeshRef(object=ACTORS), endpoint="step", adverb="call", explicit_port=True)
    called.calling.call(explicit, ARGUMENTS)
    assert [port.several for port in called.monarch.ports] == [True, False, False]
    await cancel_receives()


@pytest.mark.parametrize("adverb", ["call", "stream"])
@pytest.mark.parametrize("answers", [False, True])
async def test_replies_are_freed_with_their_call_even_if_a_rank_never_answers(answers: bool, adverb: str) -> None:
    called = Called()
    called.call(adverb=adverb)
    called.reply(0)
    await turns()
    gc.disable()  # large replies would fill the memory before a collection
    try:
        if answers:
            called.reply(1)
        else:
            called.actors.dead[1] = "killed"
            called.calling.fail(called.actors)
        await until(lambda: not called.calling.is_running(1))
        port = weakref.ref(called.monarch.ports.pop())
        called.monarch.casts.clear()
        await turns()
        assert port() is None
    finally:
        gc.enable()


async def test_a_chosen_actors_result_waits_for_what_its_rank_has_printed() -> None:
    called = printing_actors()
    called.call(adverb="choose")
    called.reply(0)
    await until(lambda: called.asked)
    ((_, ranks),) = called.asked
    assert len(ranks) == 1
    await called.read_all()


@pytest.mark.parametrize("ends", ["mesh", "rank", "part"])
async def test_a_result_that_waits_for_output_is_sent_although_its_mesh_ends(ends: str) -> None:
    called = printing_actors()
    called.call()
    called.reply(0)
    called.reply(1)
    await until(lambda: called.asked)
    if ends == "mesh":
        called.actors.failed = Failure(kind="internal", message="gone")
        called.calling.fail(called.actors)
    elif ends == "rank":
        called.actors.dead[1] = "killed"
        called.calling.fail(called.actors)
    else:
        called.monarch.faults[0].set_exception(STOPPED)
    await turns()
    await called.read_all()
    await turns()
    ((header, _, _),) = called.sent.messages
    assert isinstance(header, Values)
    assert called.ended == [False]


async def test_failures_of_a_call_wait_for_its_last_reply_if_that_has_arrived() -> None:
    called = printing_actors()
    called.call()
    called.reply(0, exception=True)
    called.reply(1, exception=True)
    await until(lambda: called.asked)
    pending, _, stream = called.calling._pending[1]
    called.calling._finish_early(pending, stream)  # the first failure has waited long enough
    assert called.sent.messages == []
    await called.read_all()
    ((header, _, _),) = called.sent.messages
    assert isinstance(header, Failed)
    assert header.failure.unanswered == 0


async def test_a_second_reply_of_a_rank_is_no_result_and_its_mesh_may_fail() -> None:
    called = printing_actors()
    called.call()
    called.reply(0)
    called.reply(0)
    await turns()
    assert called.asked == []
    called.actors.failed = Failure(kind="internal", message="gone")
    called.calling.fail(called.actors)
    assert isinstance(called.sent.messages[0][0], Failed)
    await cancel_receives()


async def test_a_call_that_keeps_says_so_to_the_actors_and_reports_its_end() -> None:
    called = Called()
    ended: list[Response | None] = []
    sent: list[PendingCall | None] = []
    called.prepared = Prepared(
        ("a value",), None, lambda *each: _note(ended, sent, *each), lambda payload: ("keep", payload)
    )
    waiting = called.calling.call(
        Call(call=1, target=MeshRef(object=ACTORS), endpoint="step", adverb="call", keep=9), ARGUMENTS
    )
    assert isinstance(waiting, Awaitable)
    await waiting
    ((_, payload, _),) = called.monarch.casts
    assert payload == ("keep", (b"arguments", "a value"))
    assert not ended
    called.reply(0)
    called.reply(1)
    await until(lambda: called.sent.of(Values))
    assert [type(each) for each in map(_header, ended)] == [Values]
    assert [each is not None and each.call for each in sent] == [1]
    await cancel_receives()


async def test_the_description_of_kept_values_is_sent_however_much_waits() -> None:
    called = Called()
    called.unsent = 90
    called.prepared = Prepared((), None, lambda *each: None)
    keeping = Call(call=1, target=MeshRef(object=ACTORS), endpoint="step", adverb="call", keep=9)
    waiting = called.calling.call(keeping, ARGUMENTS)
    assert isinstance(waiting, Awaitable)
    await waiting
    called.reply(0, bytes(SMALL))
    called.reply(1, b"1")
    await until(lambda: called.sent.of(Values))
    await cancel_receives()


async def test_a_prepared_call_that_is_not_sent_has_ended() -> None:
    called = Called()
    ended: list[Response | None] = []
    sent: list[PendingCall | None] = []
    called.prepared = Prepared((), None, lambda *each: _note(ended, sent, *each))
    header = Call(call=1, target=MeshRef(object=ACTORS), endpoint="step", adverb="call", keep=9)
    called.actors.dead[0] = "killed"
    waiting = called.calling.call(header, ARGUMENTS)
    assert isinstance(waiting, Awaitable)
    await waiting
    assert [type(each) for each in map(_header, ended)] == [Failed]
    del called.actors.dead[0]
    waiting = called.calling.call(header, ())  # without a pickle
    assert isinstance(waiting, Awaitable)
    with pytest.raises(RequestFailed, match="no pickled arguments"):
        await waiting
    assert [type(each) for each in map(_header, ended)] == [Failed, Failed]
    assert sent == [None, None]


async def test_a_call_whose_kept_arguments_have_failed_is_not_sent() -> None:
    called = Called()
    called.refusal = RequestFailed(Failure(kind="lost", message="gone"))
    waiting = called.calling.call(
        Call(call=1, target=MeshRef(object=ACTORS), endpoint="step", adverb="call", keep=9), ARGUMENTS
    )
    assert isinstance(waiting, Awaitable)
    with pytest.raises(RequestFailed, match="gone"):
        await waiting
    assert not called.monarch.casts
    assert not called.calling.open_calls()


async def test_a_cancelled_call_is_answered_at_once_and_its_ranks_hear_of_it() -> None:
    called = Called()
    procs = called.actors.procs
    assert procs is not None
    procs.number = 2
    called.call()
    called.call(2)
    assert called.monarch.marks == [1, 2]
    called.reply(0)
    await turns()
    called.cancel(2)
    (failed,) = called.sent.of(Failed)
    assert (failed.call, failed.failure.kind, failed.failure.unanswered) == (2, "cancelled", 1)
    assert called.told == [(2, {1}, 2)]
    assert not called.calling.is_running(2)
    assert [each.call for each in called.calling.open_calls()] == [1]
    (first, second), count = called.calling.statuses(8, {})
    assert (first.cancelled, second.cancelled, count) == (False, True, 2)
    called.cancel(2)
    called.reply(1, b"late", references=("mesh",))
    await until(lambda: called.calling.statuses(8, {})[1] == 1)
    assert len(called.sent.messages) == 1  # the result is dropped, and no mesh in it gets a number
    with pytest.raises(RequestFailed, match="did not arrive"):
        called.objects.reference(-1)
    called.cancel(2)
    called.cancel(99)
    called.calling.validate_state()
    assert len(called.sent.messages) == 1
    await cancel_receives()


async def test_a_cancelled_call_does_not_wait_for_output_and_ends_with_its_mesh() -> None:
    called = Called()
    procs = called.actors.procs
    assert procs is not None
    procs.number = 2
    called.call()
    called.cancel()
    called.unread = asyncio.get_running_loop().create_future()
    for rank in range(2):
        called.reply(rank)
    await until(lambda: called.calling.statuses(8, {})[1] == 0)
    assert called.asked == []
    called.call(2)
    called.cancel(2)
    called.actors.dead[1] = "killed"
    called.calling.fail(called.actors)
    assert called.calling.statuses(8, {})[1] == 0
    assert [type(header) for header, *_ in called.sent.messages] == [Failed, Failed]
    assert called.ended == [False, False]
    await cancel_receives()


async def test_calls_that_keep_their_results_are_not_cancelled() -> None:
    called = Called()
    called.prepared = Prepared((), None, lambda *each: None)
    keeping = Call(call=1, target=MeshRef(object=ACTORS), endpoint="step", adverb="call", keep=9)
    waiting = called.calling.call(keeping, ARGUMENTS)
    called.cancel(waiting=[keeping])
    assert isinstance(waiting, Awaitable)
    await waiting
    called.cancel()
    assert called.sent.messages == []
    assert called.told == []
    await cancel_receives()


async def test_a_call_that_was_cancelled_while_it_waited_is_not_sent() -> None:
    called = Called()
    ended: list[Response | None] = []
    called.prepared = Prepared((), None, lambda response, pending: ended.append(response))
    header = Call(call=1, target=MeshRef(object=9), endpoint="step", adverb="call")
    waiting = asyncio.ensure_future(called.calling.call(header, ARGUMENTS))  # type: ignore[arg-type]
    await turns()
    called.cancel(waiting=[header])
    (failed,) = called.sent.of(Failed)
    assert (failed.call, failed.failure.kind, failed.failure.total) == (1, "cancelled", 0)
    called.objects.add(9, actor_mesh(name="late"))
    await waiting
    assert called.monarch.casts == []
    assert [type(each) for each in map(_header, ended)] == [Failed]
    # One whose actors cannot be spawned has no second answer.
    called.prepared = None
    header = header.model_copy(update={"call": 2, "target": MeshRef(object=10)})
    waiting = asyncio.ensure_future(called.calling.call(header, ARGUMENTS))  # type: ignore[arg-type]
    await turns()
    called.cancel(2, [header])
    called.objects.add(10, Failure(kind="internal", message="the constructor raised"))
    await waiting
    assert [each.call for each in called.sent.of(Failed)] == [1, 2]
    assert not called.calling.cancelled


async def test_a_line_says_which_ranks_still_run_a_cancelled_call() -> None:
    called = Called()
    called.call()
    called.call(2)
    called.cancel(2)
    pending, mesh, _ = called.calling._pending[2]
    called.calling._report_cancelled(pending, mesh)  # as its timer does
    assert called.notices == []  # the call before it is what the ranks run
    for rank in range(2):
        called.monarch.ports[0].put(b"value", rank)
    called.reply(0)
    await until(lambda: called.calling.statuses(8, {})[1] == 1 and pending.replies)
    called.calling._report_cancelled(pending, mesh)
    (line,) = called.notices
    assert line.startswith(
        "actors.step was cancelled, but has not ended on rank 1 on workers-1: only an async endpoint"
    )
    called.reply(1)
    await until(lambda: not called.calling._pending)
    called.calling._report_cancelled(pending, mesh)
    assert len(called.notices) == 1
    await cancel_receives()
