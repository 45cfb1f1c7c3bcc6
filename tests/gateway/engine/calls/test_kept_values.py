"""Which values the engine has kept, delivered, dropped and lost, with Monarch's part in the hands of the test."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from meshgate_gateway.engine.calls.kept_values import KeptValues, Prepared
from meshgate_gateway.engine.calls.pending_calls import PendingCall, Response
from meshgate_gateway.engine.failures import FailureReports, RequestFailed
from meshgate_gateway.engine.monarch.interface import Reply
from meshgate_gateway.engine.objects.records import ActorMesh, KeptMesh, ProcMesh
from meshgate_gateway.engine.objects.regions import ranks_of
from meshgate_gateway.engine.objects.table import Lookup, ObjectTable
from meshgate_wire import Fragments
from meshgate_wire.messages import Argument, Call, Failed, Failure, Item, MeshRef, PutValue, ReadKept, Region, Values
from tests.gateway.engine.fakes import FakeMonarch, Sent, actor_mesh, proc_mesh, turns, until

MAKERS, TAKERS, KEPT = 3, 4, 5
ONE = Region(labels=(), offset=1, sizes=(), strides=())
HOSTS = Region(labels=("hosts",), offset=0, sizes=(2,), strides=(1,))
DESCRIPTION = pickle.dumps({"type": "bytes", "nbytes": 100, "dtype": "", "shape": None})


class Keeping:
    """Makers and takers in processes of their own, two each."""

    def __init__(self) -> None:
        self.monarch, self.objects = FakeMonarch(), ObjectTable()
        self.lookup = Lookup(self.objects, self.monarch)
        self.kept = KeptValues(self.objects, self.lookup, self.monarch)
        self.kept.servers.calls = self
        self.watched: list[tuple[int, ProcMesh]] = []
        self.kept.watch = lambda number, procs: self.watched.append((number, procs))
        self.started: list[tuple[PendingCall, Any, int]] = []
        self.failed: list[ActorMesh] = []
        self.makers, self.takers = actor_mesh(proc_mesh(name="made")), actor_mesh(proc_mesh(name="taken"))
        self.makers.name, self.takers.name = "makers", "takers"
        self.makers.procs.number, self.takers.procs.number = 1, 2  # type: ignore[union-attr]
        self.objects.add(1, self.makers.procs)  # type: ignore[arg-type]
        self.objects.add(2, self.takers.procs)  # type: ignore[arg-type]
        self.objects.add(MAKERS, self.makers)
        self.objects.add(TAKERS, self.takers)

    # as ``kept_values.Calls``

    def start(self, pending: PendingCall, mesh: ActorMesh, actors: Any, payload: Any, stream: int) -> None:
        self.started.append((pending, payload, stream))

    def fail(self, mesh: ActorMesh) -> None:
        self.failed.append(mesh)

    # calls and deaths

    def dies(self, actors: ActorMesh, rank: int) -> None:
        assert actors.procs is not None
        actors.procs.dead[rank] = "killed"
        self.kept.servers.process_died(actors.procs, rank, "killed")

    async def keep(self, number: int = KEPT) -> Prepared:
        header = Call(call=1, target=MeshRef(object=MAKERS), endpoint="make", adverb="call", keep=number)
        prepared = await self.kept.prepare(header, self.makers, ())
        assert prepared is not None
        return prepared

    async def kept_mesh(self, number: int = KEPT) -> KeptMesh:
        """Values that are there."""
        (await self.keep(number)).ended(Response(Values(call=1), (DESCRIPTION, DESCRIPTION)), None)
        found = self.objects.get(number)
        assert isinstance(found, KeptMesh)
        return found

    async def use(
        self,
        *,
        adverb: str = "call",
        region: Region | None = None,
        whole: bool = False,
        reference: bool = False,
        keep: int = 0,
    ) -> Prepared:
        ref = Argument(kind="kept", ref=MeshRef(object=KEPT, region=region), whole=whole, reference=reference)
        header: Any = Call(
            call=2,
            target=MeshRef(object=TAKERS),
            endpoint="take",
            adverb=adverb,
            arguments=(ref,),  # type: ignore[arg-type]
            keep=keep,
        )
        arguments = await self.lookup.arguments(header.arguments)
        prepared = await self.kept.prepare(header, self.takers, arguments)
        assert prepared is not None
        return prepared

    def deliveries(self) -> list[tuple[Any, ...]]:
        return [payload for endpoint, payload, _ in self.monarch.casts if endpoint == "deliver"]

    def drops(self) -> list[tuple[Any, ...]]:
        return [args for _, endpoint, args in self.monarch.engine_calls if endpoint == "drop"]


async def delivered(keeping: Keeping, using: asyncio.Task[Prepared], ranks: int = 2) -> Prepared:
    """Answers the delivery that ``using`` waits for."""
    await until(keeping.deliveries)
    for rank in range(ranks):
        keeping.monarch.ports[-1].put(b"done", rank)
    return await using


async def test_a_call_without_kept_values_needs_nothing() -> None:
    keeping = Keeping()
    header = Call(call=1, target=MeshRef(object=MAKERS), endpoint="make", adverb="call")
    assert await keeping.kept.prepare(header, keeping.makers, ("a port",)) is None
    assert not keeping.monarch.meshes


async def test_values_are_delivered_to_all_ranks_before_the_call_is_sent() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    assert keeping.kept.meshes.kept_bytes() == {id(keeping.makers.procs): {0: 100, 1: 100}}
    using = asyncio.create_task(keeping.use())
    await until(keeping.deliveries)
    assert kept.uses == 1
    ((delivery, target, at, ((argument, number, label, _, labels, sizes, positions, whole),)),) = keeping.deliveries()
    assert (target, at, argument, number, label, labels, sizes, positions, whole) == (
        TAKERS,
        None,
        0,
        KEPT,
        kept.label,
        ("hosts",),
        (2,),
        (),
        False,
    )
    assert not using.done()
    prepared = await delivered(keeping, using)
    assert prepared.objects == [("take", delivery, 0)]
    assert (kept.uses, prepared.chosen) == (0, None)


async def test_a_part_is_named_by_its_positions_and_a_chosen_rank_by_its_own() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    prepared = await delivered(keeping, asyncio.create_task(keeping.use(adverb="choose", region=ONE)), ranks=1)
    ((_, _, at, ((*_, positions, _whole),)),) = keeping.deliveries()
    assert at == prepared.chosen
    assert positions == (1,)


async def test_a_use_waits_for_the_call_that_keeps_and_fails_with_its_error() -> None:
    keeping = Keeping()
    prepared = await keeping.keep()
    using = asyncio.create_task(keeping.use())
    await turns()
    assert not keeping.deliveries()
    failure = Failure(kind="actor", message="no", mesh="makers", ranks=(1,))
    prepared.ended(Response(Failed(call=1, failure=failure), (b"the exception",)), None)
    with pytest.raises(RequestFailed) as raised:
        await using
    assert raised.value.failure == failure.model_copy(update={"step": "makers.make.keep()"})
    assert raised.value.buffers == (b"the exception",)
    await until(keeping.drops)
    assert keeping.drops() == [([KEPT], True)]  # what other ranks keep, also later


async def test_a_kept_call_that_is_not_sent_has_its_error_with_the_exception_for_what_uses_it() -> None:
    keeping = Keeping()
    failure = Failure(kind="actor", message="no", mesh="makers", ranks=(1,))
    (await keeping.keep()).ended(Response(Failed(call=1, failure=failure), (b"the exception",)), None)
    other = await keeping.kept_mesh(12)
    reports = FailureReports(keeping.objects.add, Sent())
    with pytest.raises(RequestFailed) as raised:
        await keeping.use(keep=9)
    reports.report(Call(call=2, target=MeshRef(object=TAKERS), endpoint="take", adverb="call", keep=9), raised.value)
    put = PutValue(call=3, target=MeshRef(object=MAKERS), keep=10, arguments=(kept_argument(9),))
    with pytest.raises(RequestFailed) as raised_again:
        await keeping.kept._put(put, [Fragments((b"pickle",))])
    reports.report(put, raised_again.value)
    keeping.kept.meshes.release(other)
    (argument,) = await keeping.lookup.arguments((kept_argument(10),))
    with pytest.raises(RequestFailed) as at_last:
        await keeping.kept.meshes.wait(argument.kept)
    expected = failure.model_copy(update={"step": "makers.make.keep()"}), (b"the exception",)
    for each in (raised, raised_again, at_last):
        assert (each.value.failure, each.value.buffers) == expected
    await until(lambda: len(keeping.drops()) > 1)
    assert keeping.drops() == [([KEPT], True), ([12], False)]  # of the calls that were sent


async def test_a_process_that_has_died_has_lost_its_values() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    using = asyncio.create_task(keeping.use())
    await until(keeping.deliveries)
    keeping.dies(keeping.makers, 1)
    with pytest.raises(RequestFailed) as raised:
        await using
    failure = raised.value.failure
    assert (failure.kind, failure.step, failure.ranks) == ("lost", "makers.make.keep()", (1,))
    assert failure.hosts == {1: "workers-1"}
    with pytest.raises(RequestFailed, match="killed"):
        await keeping.kept._read(ReadKept(call=3, target=MeshRef(object=KEPT)), ())
    assert keeping.failed == [kept.servers.actors]
    living = Region(labels=("hosts",), offset=0, sizes=(1,), strides=(1,))
    await delivered(keeping, asyncio.create_task(keeping.use(region=living)))


async def test_the_death_of_a_process_that_gets_values_ends_its_call() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    using = asyncio.create_task(keeping.use())
    await until(keeping.deliveries)
    keeping.dies(keeping.takers, 0)
    with pytest.raises(RequestFailed) as raised:
        await using
    assert (raised.value.failure.kind, raised.value.failure.mesh) == ("supervision", "takers")


async def test_nothing_is_sent_to_a_process_that_has_died() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    await delivered(keeping, asyncio.create_task(keeping.use()))
    keeping.dies(keeping.takers, 0)
    with pytest.raises(RequestFailed, match="killed"):
        await keeping.use()
    put = PutValue(call=3, target=MeshRef(object=TAKERS), keep=9)
    with pytest.raises(RequestFailed, match="killed"):
        await keeping.kept._put(put, [Fragments((b"pickle",))])
    assert (len(keeping.deliveries()), keeping.started) == (1, [])


async def test_a_process_that_dies_while_those_that_take_its_value_start_gets_no_request() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    keeping.monarch.hold = True
    using = asyncio.create_task(keeping.use())
    started = len(keeping.monarch.meshes)
    await until(lambda: len(keeping.monarch.meshes) > started)
    keeping.dies(keeping.makers, 1)
    keeping.monarch.meshes[-1].ready.set_result(None)  # type: ignore[union-attr]
    with pytest.raises(RequestFailed, match="killed") as raised:
        await using
    assert (raised.value.failure.kind, keeping.deliveries()) == ("lost", [])


async def test_a_value_that_a_process_cannot_take_fails_the_call_and_forgets_nothing_else() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    using = asyncio.create_task(keeping.use())
    await until(keeping.deliveries)
    keeping.monarch.ports[-1].put(b"ImportError", 1, exception=True)
    with pytest.raises(RequestFailed) as raised:
        await using
    assert raised.value.failure.message == "Actor call takers.take failed."
    assert raised.value.buffers == (b"ImportError",)


def sent_call(keeping: Keeping, *failed: int, chosen: int | None = None) -> PendingCall:
    """The call that uses values, with the replies of rank 0 and of those that have ``failed``."""
    ranks = ranks_of(HOSTS)
    sent = PendingCall(2, "call", "takers", "take", ranks, keeping.takers.host_of, chosen)
    sent.failed.update(failed)
    sent.replies.update(dict.fromkeys({0, *failed}, Reply(0, False, b"", ())))
    return sent


def forgotten(keeping: Keeping, endpoint: str = "forget") -> list[Any]:
    return [payload for each, payload, _ in keeping.monarch.casts if each == endpoint]


async def test_processes_forget_what_a_call_has_not_taken() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    prepared = await delivered(keeping, asyncio.create_task(keeping.use()))
    died = Response(Failed(call=2, failure=Failure(kind="supervision", message="died")))
    raised = Response(Failed(call=2, failure=Failure(kind="actor", message="raised")))
    for response, sent, count in (
        (Response(Values(call=2)), sent_call(keeping), 0),
        (raised, sent_call(keeping, 1), 1),  # perhaps before it took them; what rank 0 has not taken, it will
        (Response(Item(call=2, rank=0)), sent_call(keeping, 1), 1),  # the last of a stream
        (died, sent_call(keeping), 1),  # it is not known which actor has stopped
        (died, None, 2),  # the call was not sent
    ):
        prepared.ended(response, sent)
        assert forgotten(keeping) == [(1,)] * count
        keeping.monarch.casts.clear()
    keeping.takers.dead[1] = "killed"
    prepared.ended(died, sent_call(keeping))
    assert not forgotten(keeping)


async def test_processes_forget_a_call_that_others_cannot_get_values_for() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    using = asyncio.create_task(keeping.use())
    await until(keeping.deliveries)
    keeping.monarch.ports[-1].put(b"done", 0)
    keeping.monarch.ports[-1].put(b"ImportError", 1, exception=True)
    with pytest.raises(RequestFailed):
        await using
    assert forgotten(keeping) == [(1,)] * 2


async def test_put_and_get_are_calls_of_the_actors_that_serve_the_values() -> None:
    keeping = Keeping()
    put = PutValue(call=1, target=MeshRef(object=1), keep=KEPT)
    await keeping.kept._put(put, [Fragments((b"pickle",))])
    ((pending, payload, stream),) = keeping.started
    assert (pending.endpoint, pending.mesh, payload, stream) == ("put", "made", b"pickle", 1)
    assert keeping.watched == [(1, keeping.makers.procs)]  # an endpoint may have returned it
    assert pending.on_end is not None
    pending.on_end(Response(Values(call=1), (DESCRIPTION, DESCRIPTION)))
    await keeping.kept._read(ReadKept(call=2, target=MeshRef(object=KEPT, region=ONE)), ())
    _, (read, payload, stream) = keeping.started
    assert (read.endpoint, read.ranks, payload, stream) == ("read", [1], (KEPT, (1,)), KEPT)
    kept = keeping.objects.get(KEPT)
    assert isinstance(kept, KeptMesh)
    assert kept.uses == 1
    assert read.on_end is not None
    read.on_end(None)
    assert kept.uses == 0


def kept_argument(number: int = KEPT, region: Region | None = ONE, *, whole: bool = False) -> Argument:
    return Argument(kind="kept", ref=MeshRef(object=number, region=region), whole=whole)


async def test_what_is_put_takes_kept_values_that_were_delivered_before() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    put = PutValue(call=1, target=MeshRef(object=TAKERS), keep=9, arguments=(kept_argument(region=None),))
    putting = asyncio.ensure_future(keeping.kept._put(put, [Fragments((b"pickle",))]))
    await until(keeping.deliveries)
    keeping.kept.actors_ended(keeping.takers)  # which take nothing of it
    keeping.takers.dead[1] = "raised"
    keeping.kept.actors_ended(keeping.takers)
    assert not keeping.started
    for rank in range(2):
        keeping.monarch.ports[-1].put(b"done", rank)
    await putting
    assert kept.uses == 0
    assert not forgotten(keeping, "forget_calls_of")
    ((pending, payload, _),) = keeping.started
    assert payload == (b"pickle", ("take", 1, 0))
    assert pending.on_end is not None
    pending.failed.add(1)  # perhaps before it took its value
    pending.on_end(Response(Failed(call=1, failure=Failure(kind="actor", message="no room"))))
    assert forgotten(keeping) == [(1,)]
    assert keeping.kept.meshes.kept_bytes() == {id(keeping.makers.procs): {0: 100, 1: 100}}


async def test_processes_forget_what_was_delivered_for_a_put_that_is_not_sent() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    put = PutValue(call=1, target=MeshRef(object=TAKERS), keep=9, arguments=(kept_argument(),))
    putting = asyncio.ensure_future(keeping.kept._put(put, []))
    await until(keeping.deliveries)
    for rank in range(2):
        keeping.monarch.ports[-1].put(b"done", rank)
    with pytest.raises(RequestFailed, match="no pickled arguments"):
        await putting
    assert forgotten(keeping) == [(1,)] * 2


async def sending(keeping: Keeping, *arguments: Argument) -> tuple[asyncio.Task[None], list[tuple[Any, ...]]]:
    """A message to a port under way, whose values are delivered, and what the process that sends it was asked to."""
    found = await keeping.lookup.arguments(arguments)
    task = asyncio.ensure_future(keeping.kept.send("a port", [Fragments((b"pickle",))], found))
    await until(keeping.deliveries)
    keeping.monarch.ports[-1].put(b"done", 0)
    await until(lambda: any(endpoint == "send_to" for endpoint, *_ in keeping.monarch.casts) or task.done())
    return task, [payload for endpoint, payload, _ in keeping.monarch.casts if endpoint == "send_to"]


async def test_a_message_to_a_port_is_sent_by_the_process_that_keeps_its_first_value() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    task, sent = await sending(keeping, kept_argument(), kept_argument(region=None, whole=True))
    ((_, target, at, requests),) = keeping.deliveries()
    assert (target, at, [each[0] for each in requests]) == (0, None, [0, 1])
    assert sent == [(("port", "a port"), (b"pickle", ("take", 1, 0), ("take", 1, 1)))]
    await turns()
    assert not task.done()  # what follows in the stream must not overtake it
    keeping.monarch.ports[-1].put(b"sent", 0)
    await task
    assert not forgotten(keeping)


async def test_a_message_to_a_port_that_cannot_be_sent_is_forgotten() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    task, _ = await sending(keeping, kept_argument())
    keeping.monarch.ports[-1].put(b"MemoryError", 0, exception=True)
    with pytest.raises(RequestFailed, match=r"Actor call port\.send failed"):
        await task
    assert forgotten(keeping) == [(1,)]
    with pytest.raises(RequestFailed, match="takes kept values of 2"):
        await keeping.kept.send("a port", [], await keeping.lookup.arguments([kept_argument(region=None)]))


async def test_values_stay_until_a_message_to_a_port_that_refers_to_them_has_left() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    reference = Argument(kind="kept", ref=MeshRef(object=KEPT, region=ONE), reference=True)
    task, _ = await sending(keeping, kept_argument(), reference)
    assert kept.uses
    keeping.monarch.ports[-1].put(b"sent", 0)
    await task
    assert kept.uses == 0


async def test_a_message_waits_until_the_call_that_keeps_its_value_has_been_sent() -> None:
    keeping = Keeping()
    made = await keeping.kept_mesh()
    servers, done = made.servers, made.done
    made.servers, made.done = None, asyncio.get_running_loop().create_future()
    sent = asyncio.ensure_future(sending(keeping, kept_argument()))
    await turns()
    made.servers = servers
    made.done.set_result(done.result())
    task, requests = await sent
    assert requests == [(("port", "a port"), (b"pickle", ("take", 1, 0)))]
    keeping.monarch.ports[-1].put(b"sent", 0)
    await task


async def test_the_death_of_the_process_that_sends_a_message_ends_it() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    task, _ = await sending(keeping, kept_argument())
    keeping.dies(keeping.makers, 1)
    with pytest.raises(RequestFailed, match="killed"):
        await task
    assert keeping.monarch.ports[-1].closed


async def test_actors_that_ended_before_a_cast_forget_its_values() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    ref = MeshRef(object=TAKERS)
    found = await keeping.lookup.arguments([kept_argument()])
    keeping.takers.dead[1] = "raised"
    casting = asyncio.ensure_future(keeping.kept.deliver_cast(keeping.takers, "take", ref, found, None))
    await until(keeping.deliveries)
    for rank in range(2):
        keeping.monarch.ports[-1].put(b"done", rank)
    assert await casting == [("take", 1, 0)]
    assert forgotten(keeping) == [(1,)]


async def test_references_take_the_place_of_values_without_a_delivery() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    places = ((0, 0), (1, 1))
    by_rank = await keeping.use(reference=True)
    assert by_rank.objects == [("refer", KEPT, "makers.make.keep()", places, None, None, None)]
    one = await keeping.use(reference=True, region=ONE)
    assert one.objects == [("refer", KEPT, "makers.make.keep()", ((1, 1),), 0, None, None)]
    whole = await keeping.use(reference=True, whole=True)
    assert whole.objects == [("refer", KEPT, "makers.make.keep()", places, None, HOSTS, None)]
    chosen = await keeping.use(reference=True, adverb="choose")
    assert chosen.objects == [("refer", KEPT, "makers.make.keep()", places, chosen.chosen, None, None)]
    assert not keeping.deliveries()


async def test_processes_that_an_actor_has_spawned_have_no_references() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    keeping.takers.procs.number = 0  # type: ignore[union-attr]
    with pytest.raises(RequestFailed, match="as an actor has spawned its processes"):
        await keeping.use(reference=True)


async def test_a_call_that_cannot_be_sent_with_references_does_not_keep_their_values() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    keeping.dies(keeping.makers, 1)
    with pytest.raises(RequestFailed, match="killed"):
        await keeping.use(reference=True)
    assert kept.uses == 0
    with pytest.raises(RequestFailed, match="runs on 2 ranks and takes kept values of 3"):
        await keeping.use(reference=True, region=Region(labels=("hosts",), offset=0, sizes=(3,), strides=(0,)))
    assert kept.uses == 0


async def test_a_value_is_fetched_to_the_process_that_asks_for_it() -> None:
    keeping = Keeping()
    kept = await keeping.kept_mesh()
    fetching = asyncio.create_task(keeping.kept.fetch(2, 1, KEPT, 0))
    await until(keeping.deliveries)
    ((delivery, target, at, ((argument, number, _, _, labels, _, positions, whole),)),) = keeping.deliveries()
    assert (target, at, argument, number, labels, positions, whole) == (0, None, 0, KEPT, (), (0,), False)
    assert kept.uses == 1
    keeping.monarch.ports[-1].put(b"done", 0)
    assert await fetching == b"+%d" % delivery
    assert kept.uses == 0
    assert await keeping.kept.fetch(TAKERS, 1, KEPT, 0) == b"-this process does not belong to the session"


async def test_a_process_that_asks_for_a_value_learns_why_it_cannot_get_it() -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    fetching = asyncio.create_task(keeping.kept.fetch(2, 0, KEPT, 1))
    await until(keeping.deliveries)
    keeping.monarch.ports[-1].put(b"the exception", 0, exception=True)
    assert await fetching == b"!the exception"
    fetching = asyncio.create_task(keeping.kept.fetch(2, 0, KEPT, 1))
    await until(lambda: len(keeping.deliveries()) == 2)
    keeping.dies(keeping.makers, 1)
    lost = b"?the process that kept it has ended: killed"
    assert await fetching == lost
    assert await keeping.kept.fetch(2, 0, KEPT, 1) == lost
    keeping.dies(keeping.takers, 0)
    assert (await keeping.kept.fetch(2, 0, KEPT, 0))[:1] == b"-"


async def test_a_defect_does_not_leave_the_process_that_asks_for_a_value_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeping = Keeping()
    await keeping.kept_mesh()
    monkeypatch.setattr(keeping.kept, "_deliver", lambda *_, **__: 1 / 0)
    assert await keeping.kept.fetch(2, 0, KEPT, 0) == b"-ZeroDivisionError: division by zero"
