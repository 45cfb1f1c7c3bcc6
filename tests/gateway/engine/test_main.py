"""The engine's process: how it handles the control channel."""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

import pytest
from websockets.asyncio.client import connect

from meshgate_gateway.control import (
    AssignSession,
    ControlChannel,
    EndSession,
    HostLost,
    NewConnection,
    ReportState,
    RunEnded,
    SessionState,
    control_pair,
)
from meshgate_gateway.engine import __main__ as process
from tests.gateway.engine.fakes import WAIT_TIMEOUT, FakeMonarch


async def end_reason(server: socket.socket, engine: socket.socket, data: bytes) -> str:
    """Why the session ends once the server has sent ``data``."""
    control = ControlChannel(engine)
    server.sendall(data)
    reason = await asyncio.wait_for(process.EngineMain(control, None, None).run(), WAIT_TIMEOUT)
    control.close()
    server.close()
    return reason


@pytest.fixture(autouse=True)
def _no_monarch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.interface, "connect", lambda address, on_fault: FakeMonarch())
    monkeypatch.setattr(process.gc, "freeze", lambda: None)  # it would hide what a test leaves open from this module


def test_an_invalid_message_of_the_server_ends_the_session_with_the_reason() -> None:
    reason = asyncio.run(end_reason(*control_pair(), b"{}"))
    assert "could not handle a message of the gateway's server: " in reason
    assert "ValidationError" in reason or "validation error" in reason


def test_an_engine_that_is_ready_collects_garbage() -> None:
    gc.disable()  # as the program does while it imports
    try:
        asyncio.run(end_reason(*control_pair(), b"{}"))
        assert gc.isenabled()
    finally:
        gc.enable()


def test_a_message_that_the_engine_cannot_handle_ends_the_session_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(process.Engine, "host_lost", fail)
    lost = HostLost(mesh="workers", host="workers-0", reason="OOMKilled")
    assert "ZeroDivisionError('a bug')" in asyncio.run(end_reason(*control_pair(), lost.model_dump_json().encode()))


async def test_the_end_of_a_run_closes_its_connections_and_ends_its_session_unless_that_is_detached() -> None:
    server, engine = control_pair()
    control, channel = ControlChannel(engine), ControlChannel(server)
    main = process.EngineMain(control, None, None)
    serving = asyncio.create_task(main.run())
    channel.send(AssignSession(session="0" * 32, lease=1))

    async def opened(run: str) -> Any:
        near, far = socket.socketpair()
        near.setblocking(False)
        opening = asyncio.ensure_future(connect("ws://gateway/", sock=near, compression=None, proxy=None))
        head = b""
        while b"\r\n\r\n" not in head:
            far.setblocking(False)
            head += await asyncio.get_running_loop().sock_recv(far, 65_536)
        channel.send(NewConnection(head=head.decode("latin-1"), run=run), [far.fileno()])
        far.close()
        return await asyncio.wait_for(opening, WAIT_TIMEOUT)

    async def end(run: str) -> None:
        """Returns once the engine has handled the end: it answers the next message on the control channel."""
        channel.send(RunEnded(run=run))
        channel.send(ReportState())
        while (message := await asyncio.wait_for(channel.receive(), WAIT_TIMEOUT)) is not None:
            if isinstance(message[0], SessionState):
                return

    of_run = await opened("night")
    await end("day")
    await (await of_run.ping())
    of_driver = await opened("")
    await end("night")
    await (await of_driver.ping())  # it holds the session now
    of_run = await opened("night")
    main._engine._ledger.active = True
    await end("night")
    await asyncio.wait_for(of_run.wait_closed(), WAIT_TIMEOUT)
    assert (of_run.close_code, of_run.close_reason) == (1008, "the run night has ended, and with it its access")
    main._engine._ledger.active = False
    channel.send(RunEnded(run="night"))
    reason = await asyncio.wait_for(serving, WAIT_TIMEOUT)
    assert reason == "the program of the run night has ended, and the session is not detached"
    await of_driver.close()
    for end in (control, channel):
        end.close()


async def test_another_server_learns_whether_a_client_is_connected_and_the_pending_requests() -> None:
    server, engine = control_pair()
    control, channel = ControlChannel(engine), ControlChannel(server)
    serving = asyncio.create_task(process.EngineMain(control, None, None).run())
    for message in (AssignSession(session="0" * 32, lease=1), ReportState(), AssignSession(session="1", lease=1)):
        channel.send(message)
    channel.send(EndSession(reason="the test is over"))
    received = await asyncio.wait_for(channel.receive(), WAIT_TIMEOUT)
    await asyncio.wait_for(serving, WAIT_TIMEOUT)
    for end in (control, channel):
        end.close()
    assert received is not None
    state = received[0]
    assert isinstance(state, SessionState)
    assert not state.connected
    assert 0 <= state.disconnected_for < WAIT_TIMEOUT
