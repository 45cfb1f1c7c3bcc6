"""The private parts of ``websockets`` that meshgate uses exist in the installed version, which the pin admits."""

from __future__ import annotations

import asyncio
import inspect
from importlib.metadata import version
from pathlib import Path

import pytest
from websockets import frames, http11, streams
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection
from websockets.client import ClientProtocol
from websockets.protocol import Protocol
from websockets.server import ServerProtocol
from websockets.sync.client import ClientConnection as BlockingConnection
from websockets.uri import parse_uri

PINNED = "websockets>=15,<18"


def test_the_installed_version_is_one_that_the_pin_admits() -> None:
    assert f'"{PINNED}",' in (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert 15 <= int(version("websockets").partition(".")[0]) < 18


@pytest.mark.parametrize("connection", [ClientConnection, ServerConnection])
@pytest.mark.parametrize("method", ["data_received", "process_event", "resume_writing", "send_data"])
def test_connections_have_the_methods_that_our_code_overrides_or_calls(connection: type, method: str) -> None:
    assert inspect.isfunction(getattr(connection, method))


def test_a_blocking_connection_has_the_method_that_our_code_overrides() -> None:
    assert inspect.isfunction(BlockingConnection.handshake)


class FakeTransport(asyncio.Transport):
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


def test_a_connection_has_the_attributes_that_our_code_reads() -> None:
    async def attributes() -> set[str]:
        connection = ClientConnection(ClientProtocol(parse_uri("ws://gateway")))
        connection.connection_made(FakeTransport())
        return set(vars(connection))

    assert {"protocol", "loop", "transport", "response", "connection_lost_waiter"} <= asyncio.run(attributes())


def test_the_library_calls_process_event_for_each_event() -> None:
    assert "self.process_event(event)" in inspect.getsource(ClientConnection.data_received)


def test_connect_takes_a_factory_of_connections() -> None:
    assert "create_connection" in inspect.signature(connect).parameters


@pytest.mark.parametrize("method", ["receive_data", "events_received", "data_to_send", "fail"])
def test_the_sans_io_protocol_has_the_methods_that_we_call(method: str) -> None:
    assert inspect.isfunction(getattr(Protocol, method))


def test_the_server_protocol_checks_a_handshake_that_we_have_parsed() -> None:
    assert list(inspect.signature(ServerProtocol.process_request).parameters) == ["self", "request"]
    assert list(inspect.signature(http11.Request.parse).parameters) == ["read_line"]
    assert inspect.isfunction(streams.StreamReader.feed_data)
    assert inspect.isfunction(streams.StreamReader.read_line)


def test_masking_and_opcodes_can_be_imported() -> None:
    assert frames.apply_mask(b"abcd", b"\0\0\0\1") == b"abce"  # type: ignore[attr-defined]
    assert frames.Opcode.BINARY in frames.DATA_OPCODES
