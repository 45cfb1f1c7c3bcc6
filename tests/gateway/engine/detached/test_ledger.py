"""A detached session in a whole engine, between a client and a fake Monarch."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from meshgate_gateway.engine.detached.ledger import MAX_GAP, CallNumbers, Creations, Ledger
from meshgate_gateway.engine.output.lines import PrintedLine
from meshgate_wire import Fragments, MessageReceived
from meshgate_wire.messages import (
    Argument,
    Attached,
    AttachHosts,
    Call,
    Detach,
    Done,
    Failed,
    Fault,
    Fetch,
    GetControllers,
    Header,
    HostsAttached,
    Keeps,
    KeptCalls,
    MeshRef,
    NameKept,
    ObjectFailed,
    OpenChannel,
    Output,
    OutputLine,
    PortMessage,
    PutValue,
    Read,
    ReadKept,
    Region,
    Release,
    Reload,
    Resume,
    Returned,
    SpawnActors,
    SpawnProcs,
    Stop,
    Values,
)
from tests.gateway.engine.detached_session import applicant, call, detached, end, take_over
from tests.gateway.engine.in_memory import EngineClient

PIECE = bytes(100_000)
DESCRIPTION = pickle.dumps({"type": "bytes", "nbytes": 100, "dtype": "", "shape": None})


def say(client: EngineClient, text: str) -> None:
    client.engine._send_output([PrintedLine("stdout", "actors", 0, "workers-0", text, "\n")])


async def test_what_waits_for_a_holder_takes_no_room_while_replies_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = await detached()
    engine = client.engine
    monkeypatch.setattr(engine.link, "queued", lambda: 90)
    monkeypatch.setattr(engine._memory, "_limit", 100)
    assert engine._memory.room() == 10
    engine.link.connection_closed(client, "the laptop sleeps")  # type: ignore[arg-type]
    assert engine._memory.room() == 100
    await engine.close("the test is over")


async def test_a_new_holder_learns_what_was_created_and_called() -> None:
    client, actors = await detached()
    client.send(call(2, actors, "done"), b"arguments", stream=actors)
    client.send(call(3, actors, "running"), b"arguments", stream=actors)
    client.send(call(6, actors), b"arguments", stream=actors)  # 4 and 5 were posted and never arrived
    await client.until(lambda: len(client.monarch.ports) == 3)
    for rank in range(2):
        client.monarch.ports[0].put(b"value", rank)
    await client.until(lambda: client.of(Values))
    await take_over(client)
    kinds = [type(message.header) for message in client.received]
    assert kinds == [AttachHosts, SpawnProcs, SpawnActors, HostsAttached, KeptCalls, Attached]
    (attached,) = client.of(Attached)
    assert (attached.next_object, attached.next_call, attached.never_received) == (actors + 1, 7, 2)
    (kept,) = client.of(KeptCalls)
    assert [(each.call, each.tag, each.state) for each in kept.calls] == [
        (2, "done", "finished"),
        (3, "running", "in flight"),
        (6, "", "in flight"),
    ]
    client.send(Fetch(calls=(2, 3)), stream=0)
    for rank in range(2):
        client.monarch.ports[1].put(b"late", rank)
    await client.until(lambda: len(client.of(Values)) == 2)
    assert {header.call for header in client.of(Values)} == {2, 3}
    client.send(Fetch(calls=(99,)), stream=0)
    await client.until(lambda: client.of(Failed))
    await end(client)


async def test_a_new_holder_spawns_with_the_import_paths_of_the_newest_version() -> None:
    client, actors = await detached()
    ledger = client.engine._ledger
    ledger.record(Reload(call=2, target=MeshRef(object=actors), version="v1", paths=("src", "")))
    ledger.record(procs(9))  # by a program that has pushed no version
    (attached,) = (each for each in ledger.welcome(10, "v1") if isinstance(each, Attached))
    assert attached.code_paths == ("src", "")
    await end(client)


async def test_a_new_holder_gets_replies_to_its_own_requests_only() -> None:
    client, _ = await detached()
    client.engine._ledger._numbers.add(5)
    await take_over(client)
    (attached,) = client.of(Attached)
    for number in (5, attached.next_call):
        client.engine.link.send(Values(call=number), (DESCRIPTION,))
    await client.until(lambda: client.of(Values))
    await client.turns()
    assert [header.call for header in client.of(Values)] == [attached.next_call]
    await end(client)


async def test_output_faults_and_channels_wait_for_the_new_holder() -> None:
    client, _ = await detached()
    number = client.number()
    client.send(OpenChannel(object=number), stream=number)
    await client.turns()
    port = client.monarch.ports[-1]
    say(client, "one")
    port.put(b"a")
    for report in ("first", "second"):
        client.engine.link.send(Fault(object=None, mesh="actors", ranks=(0,), report=report))
    await client.until(lambda: client.of(PortMessage) and client.of(Output) and len(client.of(Fault)) == 2)
    client.send(Read(output=1, ports={number: 1}, faults=1), stream=0)
    await client.turns()
    await take_over(client)
    say(client, "two")
    port.put(b"b")
    client.engine.link.send(Fault(object=None, mesh="actors", ranks=(0,), report="third"))
    await client.turns()
    assert not client.of(Output)
    assert not client.of(Fault)
    assert not client.of(PortMessage)
    client.send(Resume(), stream=0)
    await client.until(lambda: client.of(Output) and client.of(PortMessage))
    assert [(output.first, output.lines[0].text) for output in client.of(Output)] == [(2, "two")]
    assert [message.number for message in client.of(PortMessage)] == [2]
    assert [(fault.number, fault.report) for fault in client.of(Fault)] == [(2, "second"), (3, "third")]
    client.send(Read(faults=99), stream=0)
    client.engine.notice("the pods move")
    client.engine.link.send(Fault(object=None, mesh="actors", ranks=(0,), report="fourth"))
    await client.until(lambda: client.of(Fault)[-1].report == "fourth")
    assert client.of(Output)[-1].lines[0].text == "the pods move"
    client.send(Release(objects=(number,)), stream=number)
    await take_over(client)
    client.send(Resume(), stream=0)
    await client.turns()
    assert not client.of(OpenChannel)
    assert not client.of(PortMessage)
    await client.end()


def keeping(number: int, actors: int, keep: int, *used: int) -> Call:
    arguments = tuple(Argument(kind="kept", ref=MeshRef(object=each)) for each in used)
    return call(number, actors).model_copy(update={"keep": keep, "arguments": arguments})


async def test_numbers_that_waiting_messages_are_going_to_use_are_not_given_again() -> None:
    client, actors = await detached()
    client.monarch.hold = True
    missing, kept, put, controllers = (client.number() for _ in range(4))
    client.send(keeping(2, actors, kept), b"arguments", stream=actors)  # waits for what serves its processes
    client.send(PutValue(call=3, target=MeshRef(object=actors), keep=put), b"value", stream=actors)  # behind it
    client.send(GetControllers(object=controllers, hosts=missing), stream=controllers)
    await client.turns()
    await take_over(client)
    (attached,) = client.of(Attached)
    assert attached.next_object == controllers + 1
    up(client)
    await client.turns()
    await end(client)


async def test_calls_of_a_killed_driver_get_their_kept_values_which_are_then_dropped() -> None:
    client, actors = await detached()
    others = client.spawn_all()
    await client.turns()
    client.monarch.hold = True
    kept, sums = client.number(), client.number()
    client.send(keeping(2, actors, kept), b"arguments", stream=actors)
    client.send(keeping(3, others, sums, kept), b"uses", stream=others)
    await client.turns()
    await take_over(client)
    up(client)
    for sent in ("keep", "deliver", "keep"):
        await client.until(lambda sent=sent: _sent(client) == sent)  # type: ignore[misc]
        for rank in range(2):
            client.monarch.ports[-1].put(DESCRIPTION, rank)
        await client.turns()
    assert [payload[1] for _, payload, _ in client.monarch.casts if payload[0] == "keep"] == [kept, sums]
    dropped = [args for _, endpoint, args in client.monarch.engine_calls if endpoint == "drop"]
    assert dropped == [([kept], False), ([sums], False)]
    await end(client)


async def keep_values(client: EngineClient, actors: int, kept: int, number: int = 2) -> None:
    """Makes the call ``number``, and answers it."""
    client.send(keeping(number, actors, kept), b"arguments", stream=actors)
    await client.until(lambda: _sent(client) == "keep")
    for rank in range(2):
        client.monarch.ports[-1].put(DESCRIPTION, rank)
    await client.turns()


async def test_a_new_holder_gets_the_values_that_the_earlier_one_has_named() -> None:
    client, actors = await detached()
    named, other, lost = client.number(), client.number(), client.number()
    whole = Region(labels=("hosts",), offset=0, sizes=(2,), strides=(1,))
    for number, kept in enumerate((named, other), 2):
        await keep_values(client, actors, kept, number)
    for kept in (named, lost):
        header = NameKept(kept=kept, name="batch", label="actors.step.keep()", procs=actors - 1, region=whole)
        client.send(header, stream=kept)
    await client.turns()
    for _ in range(2):
        await take_over(client)
        await client.turns()
        assert [header.kept for header in client.of(NameKept)] == [lost, named]
        assert [each.object for each in client.of(ObjectFailed)] == [lost]  # its call was never received
    assert [args for _, endpoint, args in client.monarch.engine_calls if endpoint == "drop"] == [([other], False)]
    client.send(ReadKept(call=9, target=MeshRef(object=named, region=whole), describe=True), stream=named)
    await client.until(lambda: client.monarch.casts[-1][0] == "describe")
    client.send(Release(objects=(named, lost)), stream=named)
    await take_over(client)
    assert not client.of(NameKept)
    await end(client)


def name_kept(kept: int, name: str, rank: int) -> NameKept:
    """A name for the value of one rank."""
    region = Region(labels=(), offset=rank, sizes=(), strides=())
    return NameKept(kept=kept, name=name, label="actors.step.keep()", procs=2, region=region)


async def test_each_name_for_a_part_of_kept_values_reaches_a_new_holder() -> None:
    client, actors = await detached()
    kept = client.number()
    await keep_values(client, actors, kept)
    for rank, name in enumerate(("first", "second")):
        client.send(name_kept(kept, name, rank), stream=kept)
    await client.turns()
    await take_over(client)
    assert client.of(NameKept) == [name_kept(kept, "second", 1), name_kept(kept, "first", 0)]
    client.send(Release(objects=(kept,)), stream=kept)
    await take_over(client)
    assert not client.of(NameKept)
    await end(client)


def up(client: EngineClient) -> None:
    """Everything that was to wait is up, as what serves kept values."""
    client.monarch.hold = False
    for mesh in client.monarch.meshes:
        if mesh.ready is not None:
            mesh.ready.set_result(None)


def _sent(client: EngineClient) -> str:
    """What the last message to actors was, if it is not answered."""
    port = client.monarch.ports[-1] if client.monarch.ports else None
    if port is None or port.received or not client.monarch.casts:
        return ""
    endpoint, payload, _ = client.monarch.casts[-1]
    return "keep" if payload[0] == "keep" else endpoint


async def test_calls_in_flight_when_the_session_is_detached_are_kept() -> None:
    client = EngineClient()
    client.engine.admission.admit(applicant("first"))
    actors = client.spawn_all()
    client.send(call(1, actors), b"arguments", stream=actors)
    client.send(Detach(call=2, name="train"), stream=0)
    await client.until(lambda: client.monarch.ports)
    await take_over(client)
    assert [each.call for header in client.of(KeptCalls) for each in header.calls] == [1]
    await end(client)


async def test_results_that_were_on_their_way_when_the_session_was_detached_are_kept_once_they_are_sent_back() -> None:
    client = EngineClient()
    client.engine.admission.admit(applicant("first"))
    actors = client.spawn_all()
    client.send(call(1, actors, "answered"), b"arguments", stream=actors)
    client.send(call(2, actors, "running"), b"arguments", stream=actors)
    await client.until(lambda: len(client.monarch.ports) == 2)
    for rank in range(2):
        client.monarch.ports[0].put(b"value", rank)
    await client.until(lambda: client.of(Values))
    client.send(Detach(call=4, name="train"), stream=0)
    await client.until(lambda: client.of(Done))
    assert client.of(Keeps) == [Keeps(calls=(2,))]
    client.send(call(3, actors, "overtaken"), b"arguments", stream=actors)  # by Detach
    (reply,) = client.of(Values)
    client.send(Returned(request=call(1, actors, "answered"), reply=reply), b"value", b"value", stream=0)
    client.send(Returned(request=call(2, actors), reply=Values(call=2)), b"of no use: it is kept", stream=0)
    await client.until(lambda: len(client.of(Keeps)) == 2)
    assert client.of(Keeps)[1:] == [Keeps(calls=(3,))]
    await take_over(client)
    kept = [each for header in client.of(KeptCalls) for each in header.calls]
    assert [(each.tag, each.state) for each in kept] == [
        ("answered", "finished"),
        ("running", "in flight"),
        ("overtaken", "in flight"),
    ]
    client.send(Fetch(calls=(1,)), stream=0)
    await client.until(lambda: client.of(Values))
    assert client.received[-1].buffers == (Fragments((b"value",)), Fragments((b"value",)))
    await end(client)


async def test_the_user_learns_which_result_is_too_large_to_be_kept() -> None:
    client, actors = await detached()
    header = Returned(request=call(1, actors), reply=Values(call=1))
    client.engine._dispatch.received(MessageReceived(header, (), 0, 10, refused="its 9 GB exceed the memory"))
    await client.until(lambda: client.of(Output))
    (line,) = client.of(Output)[0].lines
    assert line.text == "a result of step is not kept for the next program: its 9 GB exceed the memory"
    await client.end()


async def test_a_new_holder_learns_what_was_stopped_and_dropped() -> None:
    client, actors = await detached()
    client.send(call(2, actors), b"arguments", stream=actors)
    await client.until(lambda: client.monarch.ports)
    client.send(Read(released=(2,)), stream=0)
    for rank in range(2):
        client.monarch.ports[0].put(b"value", rank)
    await client.until(lambda: client.of(Values))
    assert [call.evictable for call in client.engine._ledger.calls._calls.values()] == [True]
    client.send(Stop(call=3, target=MeshRef(object=actors)), stream=actors)
    await client.until(lambda: len(client.of(Done)) == 2)
    await take_over(client)
    assert [stop.target.object for stop in client.of(Stop)] == [actors]
    await client.end()


def test_what_was_kept_is_sent_when_the_wire_has_space() -> None:
    posted: list[Any] = []
    names: list[str] = []
    queued = 2**30

    def post(header: Header, buffers: Sequence[Any] = (), *, stream: int = 0) -> None:
        posted.append(header)

    ledger = Ledger(
        post,
        lambda: queued,
        lambda stream: queued,
        running=lambda number: False,
        open_calls=lambda: [call(1, 3)],
        streamed=lambda number: (),
        connected=lambda: False,
        detached=names.append,
    )
    ledger._detach(Detach(call=2, name="train"), ())
    ledger.add_output((OutputLine(stream="stdout", mesh="actors", text="line"),), wanted=True)
    assert ledger.keep(Values(call=1), (b"value",), 3)
    assert ledger.keep(PortMessage(port=4), (b"message",), 4)
    assert (posted, names) == ([Keeps(calls=(1,)), Done(call=2)], ["train"])
    ledger.feed()
    assert posted == [Keeps(calls=(1,)), Done(call=2)]
    queued = 0
    ledger.feed()
    assert [type(header) for header in posted] == [Keeps, Done, Values, Output, PortMessage]
    ledger._detach(Detach(call=3, name="eval"), ())
    assert (posted[5:], names) == ([Done(call=3)], ["train", "eval"])
    ledger.close()


async def test_a_session_describes_itself() -> None:
    client, actors = await detached()
    client.send(call(2, actors), b"arguments", stream=actors)
    await client.until(lambda: client.monarch.ports)
    facts = client.engine.describe()
    assert (facts["name"], facts["detached"], facts["holder"]) == ("train", True, "first")
    assert (facts["hosts"], facts["procs"], facts["actors"]) == (["workers"], ["procs"], ["actors"])
    assert (facts["calls_in_flight"], facts["calls_finished"]) == (1, 0)
    await end(client)


def procs(number: int, name: str = "procs") -> SpawnProcs:
    return SpawnProcs(object=number, hosts=MeshRef(object=1), per_host={}, name=name)


def test_creations_come_parents_first_and_then_what_was_stopped() -> None:
    creations = Creations()
    for header in (procs(2), AttachHosts(object=1, mesh="workers"), OpenChannel(object=3)):
        creations.add(header)
    stop = Stop(call=1, target=MeshRef(object=2))
    creations.stopped(stop)
    assert [getattr(each, "object", each) for each in creations] == [1, 2, 3, stop]
    assert set(creations.numbers) == {1, 2, 3}
    assert creations.names(SpawnProcs) == []


def test_hosts_that_are_stopped_stay_usable_unless_they_are_shut_down() -> None:
    creations = Creations()
    creations.add(AttachHosts(object=1, mesh="workers"))
    creations.stopped(Stop(call=1, target=MeshRef(object=1)))
    assert len([*creations]) == 1
    creations.stopped(Stop(call=1, target=MeshRef(object=1), shutdown=True))
    assert len([*creations]) == 2


def test_a_channel_is_forgotten_when_it_is_released_and_a_mesh_is_not() -> None:
    creations = Creations()
    for header in (procs(2), OpenChannel(object=3)):
        creations.add(header)
    for number in (2, 3, 4):
        creations.released(number)
    assert [each.object for each in creations] == [2]  # type: ignore[union-attr]


def test_numbers_of_calls_that_are_missing_were_lost() -> None:
    numbers = CallNumbers()
    numbers.start(10)
    for number in (11, 14, 12, 5):
        numbers.add(number)
    assert (numbers.missing, numbers.highest) == (1, 14)
    numbers.add(14 + 2 * MAX_GAP)  # takes no memory for what is missing
    assert numbers.missing == 2 * MAX_GAP
    numbers.start(numbers.highest)
    assert numbers.highest == 14 + 2 * MAX_GAP
