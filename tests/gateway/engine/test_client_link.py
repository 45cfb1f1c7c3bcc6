"""Connections that come and go, between a client and a whole engine."""

from __future__ import annotations

import asyncio

import pytest

from meshgate_wire import ProtocolError
from tests.gateway.engine.fakes import async_test
from tests.gateway.engine.in_memory import EngineClient


@async_test
async def test_a_new_connection_takes_over_and_the_old_one_is_ignored() -> None:
    client = EngineClient()
    newer = _Connection()
    client.engine.link.connection_opened(newer)  # type: ignore[arg-type]
    assert client.closed == ["another connection has taken over this session"]
    client.engine.link.connection_data(client, b"late")  # type: ignore[arg-type]
    client.engine.link.connection_closed(client, "late")  # type: ignore[arg-type]
    assert client.connected == [True, False, True]
    await client.engine.close("the test is over")


@async_test
async def test_an_unknown_message_closes_the_connection_but_not_the_session() -> None:
    client = EngineClient()
    client.engine.link.connection_data(client, b"\xff")  # type: ignore[arg-type]
    await client.turns()
    assert len(client.closed) == 1
    assert client.connected == [True, False]
    assert not client.engine.ended.is_set()
    await client.engine.close("the test is over")


@async_test
async def test_a_violation_of_the_protocol_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: object) -> None:
        raise ProtocolError("a header that is not JSON", resumable=False)

    client = EngineClient()
    monkeypatch.setattr(client.engine.link.session, "receive_data", fail)
    client.engine.link.connection_data(client, b"data")  # type: ignore[arg-type]
    await asyncio.wait_for(client.engine.ended.wait(), 10)
    assert client.closed == ["a header that is not JSON"]
    assert client.engine.end_reason == "the client violated the protocol: a header that is not JSON"


class _Connection:
    """A connection of which nothing is expected."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def write(self, pieces: object) -> None: ...

    def buffered(self) -> int:
        return 0

    def call_later(self, delay: float, callback: object) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay, callback)  # type: ignore[arg-type]

    def close(self, code: int, reason: str) -> None:
        self.closed.append(reason)
