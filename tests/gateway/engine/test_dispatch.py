"""Messages are handled in order within a stream, and one that waits holds up its own stream only."""

from __future__ import annotations

import asyncio
import pickle
from unittest import mock

from meshgate_gateway.engine.calls import batches
from meshgate_gateway.engine.calls.batches import OPEN_CALLS
from meshgate_wire import Limits, Session
from meshgate_wire.messages import (
    Argument,
    Call,
    CancelCall,
    Done,
    EndSession,
    Failed,
    MeshRef,
    NameKept,
    OpenChannel,
    PortSend,
    ReadKept,
    Region,
    Release,
    SendTo,
    Values,
)
from tests.gateway.engine.detached_session import detached, end, take_over
from tests.gateway.engine.fakes import FakeMesh
from tests.gateway.engine.in_memory import MANY, PIECE, EngineClient, call


async def test_a_pipeline_of_requests_needs_no_answer_in_between() -> None:
    client = EngineClient()
    actors = client.spawn_all()
    client.send(call(1, actors), b"arguments", stream=actors)
    await client.until(lambda: client.monarch.casts)
    for rank in range(2):
        client.monarch.ports[-1].put(b"value", rank)
    await client.until(lambda: client.of(Values))
    await client.end()


async def test_calls_that_wait_for_their_actors_keep_their_credit() -> None:
    client = EngineClient()
    hosts, procs = client.attach(), client.number()
    actors = client.spawn_actors(procs)
    for number in range(MANY):
        client.send(call(number, actors, adverb="broadcast"), PIECE, stream=actors)
    await client.turns()
    assert client.engine.link.session.statistics().queued_bytes == 0
    delivered = MANY * len(PIECE) - client.session.queued_bytes
    assert delivered < Limits().window + 2 * len(PIECE)
    client.spawn_procs(hosts, number=procs)  # what they wait for arrives on another stream: theirs is full
    await client.until(lambda: len(client.monarch.casts) == MANY)
    assert client.session.queued_bytes == 0
    await client.end()


async def test_a_request_that_fails_does_not_hold_up_the_requests_behind_it() -> None:
    client = EngineClient()
    actors = client.spawn_all()
    channel = await client.open_channel()
    client.send(Release(objects=(channel,)), stream=channel)
    client.send(PortSend(port=channel), b"value", stream=channel)
    client.send(SendTo(target=MeshRef(object=actors), endpoint="step", port=channel), b"arguments", stream=actors)
    client.send(call(2, actors, adverb="broadcast"), b"arguments", stream=actors)
    await client.until(lambda: client.monarch.casts)
    await client.end()


async def test_what_waits_is_known_until_it_is_handled() -> None:
    client = EngineClient()
    actors = client.spawn_all()
    procs = client.spawn_procs(client.attach())
    first, second = client.number(), client.number()
    await client.turns()
    for number, used in enumerate((first, second), 1):
        argument = Argument(kind="procs", ref=MeshRef(object=used))
        header = call(number, actors).model_copy(update={"arguments": (argument,)})
        client.send(header, b"arguments", stream=actors)
    dispatch, handled = client.engine._dispatch, []  # type: ignore[var-annotated]
    await client.turns()
    assert [header.call for _, header in dispatch.waiting() if isinstance(header, Call)] == [1, 2]
    dispatch.call_after(actors, lambda: handled.append(len(client.monarch.casts)))
    client.spawn_procs(procs - 1, number=first)
    await client.until(lambda: client.monarch.casts)
    assert [header.call for header in client.engine._open_calls()] == [1, 2]  # each once
    assert not handled
    client.spawn_procs(procs - 1, number=second)
    await client.until(lambda: handled)
    assert handled == [2]
    assert not [*dispatch.waiting()]
    for port in client.monarch.ports:
        for rank in range(2):
            port.put(b"value", rank)
    await client.turns()
    await client.end()


async def test_a_name_behind_a_message_that_waits_is_known_at_a_takeover() -> None:
    client, actors = await detached()
    kept = client.number()
    client.send(call(2, actors).model_copy(update={"keep": kept}), b"arguments", stream=actors)
    await client.until(lambda: client.monarch.casts)
    region = Region(labels=("hosts",), offset=0, sizes=(2,), strides=(1,))
    name = NameKept(kept=kept, name="batch", label="actors.step.keep()", procs=actors - 1, region=region)
    client.send(ReadKept(call=3, target=MeshRef(object=kept)), stream=kept)  # which waits for the call
    client.send(name, stream=kept)
    await client.turns()
    await take_over(client)
    assert client.of(NameKept) == [name]
    for rank in range(2):
        client.monarch.ports[-1].put(pickle.dumps({"nbytes": 100}), rank)
    await client.until(lambda: client.monarch.casts[-1][0] == "read")
    await end(client)
    assert not [args for _, endpoint, args in client.monarch.engine_calls if endpoint == "drop"]


async def test_more_messages_than_one_turn_handles_stay_in_order() -> None:
    client = EngineClient()
    actors = client.spawn_all()
    await client.turns()
    for number in range(MANY):
        client.send(call(number, actors, adverb="broadcast"), str(number).encode(), stream=actors)
    assert len(client.monarch.casts) < MANY
    await client.until(lambda: len(client.monarch.casts) == MANY)
    assert [payload for _, payload, _ in client.monarch.casts] == [str(number).encode() for number in range(MANY)]
    await client.end()


async def test_other_messages_do_not_overtake_calls_that_are_collected() -> None:
    with mock.patch.object(batches, "PATIENCE", 3600):
        await _send_between_calls()


async def _send_between_calls() -> None:
    client = EngineClient()
    actors = client.spawn_all()
    channel = await client.open_channel()
    numbers = [str(number).encode() for number in range(2 * OPEN_CALLS)]
    for number, data in enumerate(numbers):
        client.send(call(number, actors), data, stream=actors)
        await client.turns(5)
    assert len(client.monarch.casts) < len(numbers), "no call waits for earlier batches"
    client.send(SendTo(target=MeshRef(object=actors), endpoint="step", port=channel), b"sent", stream=actors)
    await client.until(lambda: len(client.monarch.casts) > len(numbers))
    assert [payload for _, payload, _ in client.monarch.casts] == [*numbers, b"sent"]
    for _, _, port in client.monarch.casts[:-1]:
        for rank in range(2):
            port.put(b"value", rank)
    await client.until(lambda: len(client.of(Values)) == len(numbers))
    await client.end()


async def test_what_is_created_after_a_flood_of_calls_is_known_at_once() -> None:
    client = EngineClient()
    actors = client.spawn_all()
    await client.turns()
    for number in range(MANY):
        client.send(call(number, actors, adverb="broadcast"), b"arguments", stream=actors)
    client.send(OpenChannel(object=90), stream=90)
    assert len(client.monarch.casts) < MANY
    assert client.engine._objects.require(90) is not None
    await client.until(lambda: len(client.monarch.casts) == MANY)
    await client.end()


async def test_the_end_of_the_session_does_not_wait_for_the_calls_sent_before_it() -> None:
    client = EngineClient()
    actors = client.spawn_all()
    await client.turns()
    for number in range(1, MANY):
        client.send(call(number, actors, adverb="broadcast"), b"arguments", stream=actors)
    client.send(EndSession(call=MANY), stream=0)
    await client.until(lambda: client.of(Done))
    sent = len(client.monarch.casts)
    assert sent < MANY - 1
    await client.turns()
    assert len(client.monarch.casts) == sent  # nothing calls actors that have stopped
    assert client.engine.ended.is_set()
    await client.end()


async def test_calls_that_arrive_while_the_session_ends_are_dropped() -> None:
    client = EngineClient()
    actors = client.spawn_all()
    await client.turns()
    stopped = asyncio.get_running_loop().create_future()

    async def stopping(mesh: FakeMesh) -> None:
        await stopped

    client.monarch.stopping = stopping
    client.send(EndSession(call=1), stream=0)
    await client.turns()
    client.send(call(2, actors), b"arguments", stream=actors)
    await client.turns()
    assert not client.monarch.casts
    stopped.set_result(None)
    await client.until(lambda: client.of(Done))
    await client.end()


async def test_a_message_that_only_a_gateway_sends_is_rejected() -> None:
    client = EngineClient()
    client.send(Done(call=7), stream=0)
    await client.until(lambda: client.of(Failed))
    (failed,) = client.of(Failed)
    assert (failed.call, failed.failure.message) == (7, "a gateway does not accept Done messages")
    await client.end()


async def test_a_cancelled_call_does_not_wait_for_its_turn_in_its_stream() -> None:
    client = EngineClient()
    hosts, procs = client.attach(), client.number()
    actors = client.spawn_actors(procs)
    for number in (1, 2, 3):
        client.send(call(number, actors), b"arguments", stream=actors)
    with mock.patch.object(Session, "consume", autospec=True, side_effect=Session.consume) as consume:
        for number in (1, 2):
            client.send(CancelCall(cancelled=number), stream=actors)
        await client.until(lambda: len(client.of(Failed)) == 2)
    returned = [each.args[1].header for each in consume.call_args_list]
    assert [each.cancelled for each in returned if isinstance(each, CancelCall)] == [1, 2]
    assert [(failed.call, failed.failure.kind) for failed in client.of(Failed)] == [(1, "cancelled"), (2, "cancelled")]
    assert [header.call for header in client.engine._open_calls()] == [3]
    client.spawn_procs(hosts, number=procs)
    await client.until(lambda: client.monarch.casts)
    for rank in range(2):
        client.monarch.ports[-1].put(b"value", rank)
    await client.until(lambda: client.of(Values))
    assert [header.call for header in client.of(Values)] == [3]
    assert client.session.queued_bytes == 0
    await client.end()


async def behind_a_get() -> tuple[EngineClient, int, int]:
    """A detached session with values that are not there yet, and are named while a request for them waits."""
    client, actors = await detached()
    kept = client.number()
    client.send(call(2, actors).model_copy(update={"keep": kept}), b"arguments", stream=actors)
    await client.until(lambda: client.monarch.casts)
    region = Region(labels=("hosts",), offset=0, sizes=(2,), strides=(1,))
    client.send(ReadKept(call=3, target=MeshRef(object=kept)), stream=kept)
    name = NameKept(kept=kept, name="batch", label="actors.step.keep()", procs=actors - 1, region=region)
    client.send(name, stream=kept)
    await client.turns()
    return client, actors, kept


async def answer_get(client: EngineClient) -> None:
    for endpoint in ("step", "read"):
        await client.until(lambda endpoint=endpoint: client.monarch.casts[-1][0] == endpoint)
        for rank in range(2):
            client.monarch.ports[-1].put(pickle.dumps({"nbytes": 100}), rank)
    await client.turns()


async def test_what_is_released_behind_a_message_that_waits_is_hidden_from_the_next_holder() -> None:
    client, _, kept = await behind_a_get()
    client.send(Release(objects=(kept,)), stream=kept)
    await client.turns()
    for _ in range(2):
        await take_over(client)
        assert not client.of(NameKept)
    await answer_get(client)
    await client.until(lambda: "drop" in [endpoint for _, endpoint, _ in client.monarch.engine_calls])
    await take_over(client)
    assert not client.of(NameKept)
    await end(client)


async def test_a_name_that_waits_does_not_outlive_a_release_that_has_partly_arrived() -> None:
    client, actors, kept = await behind_a_get()
    client.send(Release(objects=(kept,), parts=2), stream=actors)
    await client.turns()
    for _ in range(2):
        await take_over(client)
        assert not client.of(NameKept)
        if client.monarch.casts[-1][0] == "step":
            await answer_get(client)
            await client.until(lambda: "drop" in [endpoint for _, endpoint, _ in client.monarch.engine_calls])
    await end(client)
