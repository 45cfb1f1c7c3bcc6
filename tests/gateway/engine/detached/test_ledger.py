"""A detached session in a whole engine, between a client and a fake Monarch."""

from __future__ import annotations

from meshgate_gateway.engine.detached.holders import Applicant
from meshgate_gateway.engine.output.lines import PrintedLine
from meshgate_wire import Role, Session
from meshgate_wire.messages import (
    Attached,
    AttachHosts,
    Call,
    Detach,
    Done,
    Failed,
    Fault,
    Fetch,
    HostsAttached,
    KeptCalls,
    MeshRef,
    OpenChannel,
    Output,
    PortMessage,
    Read,
    Resume,
    SpawnActors,
    SpawnProcs,
    Values,
)
from tests.gateway.engine.fakes import async_test
from tests.gateway.engine.in_memory import EngineClient


def applicant(name: str, *, takes_over: bool = False) -> Applicant:
    return Applicant(name, name, takes_over=takes_over)


def call(number: int, actors: int, tag: str = "") -> Call:
    return Call(call=number, target=MeshRef(object=actors), endpoint="step", adverb="call", tag=tag)


async def detached() -> tuple[EngineClient, int]:
    """A client of a detached session, and the number of its actors."""
    client = EngineClient()
    assert client.engine.admit(applicant("first")) is None
    actors = client.spawn_all()
    await client.turns()
    client.send(Detach(call=1, name="train"), stream=0)
    await client.until(lambda: client.of(Done))
    return client, actors


async def take_over(client: EngineClient) -> None:
    """Makes ``client`` another process, which takes over the session."""
    assert client.engine.admit(applicant("second", takes_over=True)) is None
    client.closed.clear()
    client.received.clear()
    client._arriving.clear()
    client.session = Session(Role.CLIENT, manual_streams=lambda stream: stream > 0)
    client.session.connection_made()
    client.engine.connection_opened(client)  # type: ignore[arg-type]
    await client.until(lambda: client.of(Attached))


async def end(client: EngineClient) -> None:
    """Answers every call that is in flight, and ends."""
    for port in client.monarch.ports:
        for rank in range(2):
            port.put(b"late", rank)
    await client.turns()
    await client.end()


def say(client: EngineClient, text: str) -> None:
    client.engine._send_output([PrintedLine("stdout", "actors", 0, "workers-0", text, "\n")])


@async_test
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


@async_test
async def test_output_faults_and_channels_wait_for_the_new_holder() -> None:
    client, _ = await detached()
    number = client.number()
    client.send(OpenChannel(object=number), stream=number)
    await client.turns()
    port = client.monarch.ports[-1]
    say(client, "one")
    port.put(b"a")
    for report in ("first", "second"):
        client.engine.send(Fault(object=None, mesh="actors", ranks=(0,), report=report))
    await client.until(lambda: client.of(PortMessage) and client.of(Output) and len(client.of(Fault)) == 2)
    client.send(Read(output=1, ports={number: 1}, faults=1), stream=0)
    await client.turns()
    await take_over(client)
    say(client, "two")
    port.put(b"b")
    client.engine.send(Fault(object=None, mesh="actors", ranks=(0,), report="third"))
    await client.turns()
    assert not client.of(Output)
    assert not client.of(Fault)
    assert not client.of(PortMessage)
    client.send(Resume(), stream=0)
    await client.until(lambda: client.of(Output) and client.of(PortMessage))
    assert [(output.first, output.lines[0].text) for output in client.of(Output)] == [(2, "two")]
    assert [message.number for message in client.of(PortMessage)] == [2]
    assert [(fault.number, fault.report) for fault in client.of(Fault)] == [(2, "second"), (3, "third")]
    await client.end()


@async_test
async def test_calls_in_flight_when_the_session_is_detached_are_kept() -> None:
    client = EngineClient()
    client.engine.admit(applicant("first"))
    actors = client.spawn_all()
    client.send(call(1, actors), b"arguments", stream=actors)
    client.send(Detach(call=2, name="train"), stream=0)
    await client.until(lambda: client.monarch.ports)
    await take_over(client)
    assert [each.call for header in client.of(KeptCalls) for each in header.calls] == [1]
    await end(client)


@async_test
async def test_what_waits_for_an_object_that_never_arrived_fails() -> None:
    client, _ = await detached()
    client.send(call(2, 50), b"arguments", stream=50)
    await client.turns()
    await take_over(client)
    (attached,) = client.of(Attached)
    assert attached.next_object == 51
    client.send(Fetch(calls=(2,)), stream=0)
    await client.until(lambda: client.of(Failed))
    assert "ended before the gateway had received this object" in client.of(Failed)[0].failure.message
    await client.end()


@async_test
async def test_a_session_describes_itself() -> None:
    client, actors = await detached()
    client.send(call(2, actors), b"arguments", stream=actors)
    await client.until(lambda: client.monarch.ports)
    facts = client.engine.describe()
    assert (facts["name"], facts["detached"], facts["holder"]) == ("train", True, "first")
    assert (facts["hosts"], facts["procs"], facts["actors"]) == (["workers"], ["procs"], ["actors"])
    assert (facts["calls_in_flight"], facts["calls_finished"]) == (1, 0)
    await end(client)
