"""A connection is established between a client and a gateway that have the same session."""

from __future__ import annotations

import importlib.metadata
import json
import re
import typing
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from meshgate_wire import PROTOCOL_VERSION, SOFTWARE_VERSION, Limits, ProtocolError, Role, SessionLost, VersionMismatch
from meshgate_wire.frames import FRAME_HEADER_BYTES, Hello
from meshgate_wire.handshake import accept_hello, make_hello
from meshgate_wire.limits import MIN_LIMITS
from meshgate_wire.messages import Header
from meshgate_wire.outbox import Frame, Unacknowledged


def sent(frames: int, acknowledged: int) -> Unacknowledged:
    frames_sent = Unacknowledged()
    for _ in range(frames):
        frames_sent.keep(Frame(FRAME_HEADER_BYTES, (bytes(FRAME_HEADER_BYTES),)))
    frames_sent.acknowledge(acknowledged)
    return frames_sent


def accept(data: bytes, frames_sent: Unacknowledged | None = None, previous: Hello | None = None) -> Hello:
    return accept_hello(data, Role.CLIENT, "0.1.0", frames_sent or Unacknowledged(), previous)


def from_gateway(received: int = 0, limits: Limits | None = None) -> bytes:
    return make_hello(Role.GATEWAY, "0.2.0", limits or Limits(), received)


def test_a_hello_has_role_versions_and_the_last_received_frame() -> None:
    hello = accept(from_gateway(2), sent(3, 1))
    assert (hello.protocol, hello.role) == (PROTOCOL_VERSION, "gateway")
    assert (hello.software, hello.received) == ("0.2.0", 2)
    assert hello.python.startswith("3.")
    assert hello.monarch == importlib.metadata.version("torchmonarch")


def test_a_side_without_monarch_has_no_version_of_it() -> None:
    without = json.loads(from_gateway()[1:])
    del without["monarch"]  # as older sides send it
    assert accept(b"\x01" + json.dumps(without).encode()).monarch == ""


@pytest.mark.parametrize("role", list(Role))
def test_two_sides_of_the_same_role_are_rejected(role: Role) -> None:
    with pytest.raises(ProtocolError, match=f"the peer is a {role.value}, as is this side"):
        accept_hello(make_hello(role, "0.1.0", Limits(), 0), role, "0.1.0", Unacknowledged(), None)


def test_another_protocol_is_a_version_mismatch() -> None:
    data = from_gateway().replace(b'"protocol":%d' % PROTOCOL_VERSION, b'"protocol":%d' % (PROTOCOL_VERSION + 1))
    with pytest.raises(VersionMismatch, match=r"upgrade the client to meshgate 0\.2\.0") as caught:
        accept(data)
    assert (caught.value.ours, caught.value.theirs) == (PROTOCOL_VERSION, PROTOCOL_VERSION + 1)


@pytest.mark.parametrize(
    ("received", "reason"),
    [
        (1, "the gateway has lost this session: it acknowledged frame 2 earlier and frame 1 now"),
        (0, "the gateway has lost this session"),
        (
            6,
            "the gateway received frame 6, but the client has sent only 5",
        ),
    ],
)
def test_sides_with_different_sessions_are_rejected(received: int, reason: str) -> None:
    with pytest.raises(SessionLost, match=reason):
        accept(from_gateway(received), sent(5, 2))


@pytest.mark.parametrize("received", [2, 3, 5])
def test_a_side_may_have_received_more_than_it_acknowledged(received: int) -> None:
    assert accept(from_gateway(received), sent(5, 2)).received == received


def test_limits_may_not_change_during_a_session() -> None:
    previous = accept(from_gateway())
    assert accept(from_gateway(), previous=previous) == previous
    with pytest.raises(ProtocolError, match="the gateway changed its limits during the session"):
        accept(from_gateway(limits=Limits(window=2**20)), previous=previous)


def test_each_role_has_the_other() -> None:
    pairs: list[Callable[[], Role]] = [lambda: Role.CLIENT.other, lambda: Role.GATEWAY.other]
    assert [pair() for pair in pairs] == [Role.GATEWAY, Role.CLIENT]


MONARCHS_OWN = {"ConfigureMonarch.settings"}  # Monarch refuses a number that is too large for a setting
DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def test_the_software_version_is_the_distributions() -> None:
    assert metadata.version("meshgate") == SOFTWARE_VERSION


def test_the_document_names_this_protocol_version() -> None:
    assert f"meshgate protocol version {PROTOCOL_VERSION}." in DOCUMENT


def test_the_document_lists_every_message() -> None:
    union = typing.get_args(typing.get_args(Header)[0])
    types = {model.model_fields["type"].default for model in union}
    assert [name for name in sorted(types) if f"| `{name}` |" not in DOCUMENT] == []


def test_the_document_has_every_field_of_every_message() -> None:
    section = DOCUMENT.partition("### Fields")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    for model in typing.get_args(typing.get_args(Header)[0]):
        name, fields = model.model_fields["type"].default, set(model.model_fields) - {"type"}
        missing = sorted(fields - set(re.findall(r"`(\w+)`", rows.get(name, ""))))
        assert not missing, f"docs/protocol.md, section Fields: the row of {name!r} does not describe {missing}"
    union = typing.get_args(typing.get_args(Header)[0])
    assert set(rows) == {model.model_fields["type"].default for model in union}


def test_every_text_and_number_in_a_message_has_a_limit() -> None:
    """Collections end with the header, which has one: see ``max_header``."""
    schema = TypeAdapter(Header).json_schema()
    unlimited = []

    def visit(found: object, where: str) -> None:
        if isinstance(found, dict):
            kind = found.get("type")
            texts = kind == "string" and not found.keys() & {"maxLength", "enum", "const"}
            numbers = kind == "integer" and not found.keys() & {"maximum", "enum"} and where not in MONARCHS_OWN
            if texts or numbers:
                unlimited.append(where)
            for key, value in found.items():
                nested = f"{where}.{key}" if where.count(".") < 1 else where
                visit(value, where if key in ("properties", "anyOf", "items", "additionalProperties") else nested)
        elif isinstance(found, list):
            for value in found:
                visit(value, where)

    for name, model in schema["$defs"].items():
        visit(model, name)
    assert not unlimited, f"give these fields of messages a limit, as in fields.py: {unlimited}"


def test_the_document_lists_every_limit_with_minimum_and_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", DOCUMENT, re.MULTILINE))
    for name, minimum in MIN_LIMITS.items():
        assert rows[name] == f"{amount(name, minimum)} | {amount(name, getattr(Limits(), name))}"


def amount(name: str, value: int) -> str:
    if name in ("max_buffers", "max_partial_messages"):
        return f"{value:,}"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if value >= size:
            return f"{value // size} {unit}"
    return f"{value // 1024} KiB"
