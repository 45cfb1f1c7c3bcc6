"""A detached session in a whole engine, and the clients that take it over."""

from __future__ import annotations

from meshgate_gateway.engine.detached.holders import Applicant
from meshgate_wire.messages import (
    Attached,
    Call,
    Detach,
    Done,
    MeshRef,
)
from tests.gateway.engine.in_memory import EngineClient, client_session


def applicant(name: str, *, takes_over: bool = False) -> Applicant:
    return Applicant(name, name, takes_over=takes_over)


def call(number: int, actors: int, tag: str = "") -> Call:
    return Call(call=number, target=MeshRef(object=actors), endpoint="step", adverb="call", tag=tag)


async def detached() -> tuple[EngineClient, int]:
    """A client of a detached session, and the number of its actors."""
    client = EngineClient()
    assert client.engine.admission.admit(applicant("first")) is None
    actors = client.spawn_all()
    await client.turns()
    client.send(Detach(call=1, name="train"), stream=0)
    await client.until(lambda: client.of(Done))
    return client, actors


async def take_over(client: EngineClient) -> None:
    """Makes ``client`` another process, which takes over the session."""
    holders = client.engine._ledger.holders
    assert client.engine.admission.admit(applicant(f"holder {holders.takeovers + 2}", takes_over=True)) is None
    client.closed.clear()
    client.received.clear()
    client._arriving.clear()
    client.session = client_session()
    client.session.connection_made()
    client.engine.link.connection_opened(client)  # type: ignore[arg-type]
    await client.until(lambda: client.of(Attached))


async def end(client: EngineClient) -> None:
    """Answers every call that is in flight, and ends."""
    for port in client.monarch.ports:
        for rank in range(2):
            port.put(b"late", rank)
    await client.turns()
    await client.end()
