"""What a new holder of a detached session receives first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from meshgate_gateway.engine.failures import invalid
from meshgate_wire import Limits
from meshgate_wire.messages import (
    Adopt,
    Attached,
    AttachHosts,
    Failed,
    Fetch,
    Host,
    HostEnding,
    HostsAttached,
    ObjectFailed,
    Region,
    Resume,
)
from tests.gateway.engine.detached_session import call, detached, end, take_over
from tests.gateway.engine.in_memory import EngineClient

PIECE = bytes(100_000)


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


async def test_what_is_being_created_when_a_session_is_taken_over_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the new holder that wait for it keep their credit."""
    found = asyncio.Event()
    find_hosts = EngineClient._find_hosts

    async def find_hosts_later(client: EngineClient, mesh: str) -> Sequence[Host]:
        await found.wait()
        return await find_hosts(client, mesh)

    monkeypatch.setattr(EngineClient, "_find_hosts", find_hosts_later)
    client, actors = await detached()
    client.send(call(2, actors), b"arguments", stream=actors)
    await client.turns()
    await take_over(client)
    client.send(Resume(), stream=0)
    sent = 3 * Limits().window // len(PIECE)
    for number in range(3, 3 + sent):
        client.send(call(number, actors), PIECE, stream=actors)
    await client.turns()
    assert client.session.queued_bytes > Limits().window
    found.set()
    await client.until(lambda: len(client.monarch.casts) == 1 + sent)
    assert not client.of(ObjectFailed)
    assert [attached.object for attached in client.of(HostsAttached)] == [1]
    await end(client)


async def test_a_new_holder_learns_which_hosts_are_about_to_end() -> None:
    client, _ = await detached()
    client.engine.host_ending("workers-1", "drained", 30.0)
    await take_over(client)
    await client.turns()
    assert [(notice.object, notice.host, notice.reason) for notice in client.of(HostEnding)] == [
        (1, "workers-1", "drained")
    ]
    await end(client)


async def test_a_new_holder_learns_what_has_failed_and_adopts_meshes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    find_hosts = EngineClient._find_hosts

    async def find_workers(client: EngineClient, mesh: str) -> Sequence[Host]:
        if mesh != "workers":
            raise invalid(f"no mesh {mesh!r}")
        return await find_hosts(client, mesh)

    monkeypatch.setattr(EngineClient, "_find_hosts", find_workers)
    client, _ = await detached()
    failed = client.number()
    client.send(AttachHosts(object=failed, mesh="other"), stream=failed)
    returned = client.engine._objects.add_reference(object())
    adopt = Adopt(object=returned, kind="hosts", region=Region(labels=("hosts",), offset=0, sizes=(2,), strides=(1,)))
    client.send(adopt, stream=2**31 - returned)
    await client.turns()
    await take_over(client)
    client.send(adopt, stream=2**31 - returned)
    await client.turns()
    (failure,) = client.of(ObjectFailed)
    assert (failure.object, failure.failure.message) == (failed, "no mesh 'other'")
    assert [attached.object for attached in client.of(HostsAttached)] == [1]
    await end(client)
