from __future__ import annotations

from collections.abc import Callable

import pytest

from meshgate_wire import Limits, ProtocolError, Role, SessionLost, VersionMismatch
from meshgate_wire.frames import FRAME_HEADER_BYTES, Hello
from meshgate_wire.handshake import greet, read_greeting
from meshgate_wire.retransmission import Frame, Unacknowledged


def sent(frames: int, acknowledged: int) -> Unacknowledged:
    made = Unacknowledged()
    for _ in range(frames):
        made.keep(Frame(FRAME_HEADER_BYTES, (bytes(FRAME_HEADER_BYTES),)))
    made.acknowledge(acknowledged)
    return made


def read(data: bytes, made: Unacknowledged | None = None, before: Hello | None = None) -> Hello:
    return read_greeting(data, Role.CLIENT, "0.1.0", made or Unacknowledged(), before)


def from_gateway(received: int = 0, limits: Limits | None = None) -> bytes:
    return greet(Role.GATEWAY, "0.2.0", limits or Limits(), received)


def test_a_greeting_says_who_speaks_and_what_has_come() -> None:
    hello = read(from_gateway(2), sent(3, 1))
    assert (hello.protocol, hello.role, hello.software, hello.received) == (1, "gateway", "0.2.0", 2)
    assert hello.python.startswith("3.")


@pytest.mark.parametrize("role", list(Role))
def test_a_side_does_not_talk_to_its_own_kind(role: Role) -> None:
    with pytest.raises(ProtocolError, match=f"both sides say that they are the {role.value}"):
        read_greeting(greet(role, "0.1.0", Limits(), 0), role, "0.1.0", Unacknowledged(), None)


def test_another_protocol_is_a_version_mismatch() -> None:
    data = from_gateway().replace(b'"protocol":1', b'"protocol":2')
    with pytest.raises(VersionMismatch, match=r"upgrade the client to meshgate 0\.2\.0") as caught:
        read(data)
    assert (caught.value.ours, caught.value.theirs) == (1, 2)


@pytest.mark.parametrize(
    ("received", "refusal"),
    [
        (1, "the gateway has lost this session: it had received frame 2 of ours and now knows of 1"),
        (0, "the gateway has lost this session"),
        (6, "the client has lost the session that the gateway resumes: that has received frame 6 of ours"),
    ],
)
def test_sides_that_remember_different_sessions_do_not_go_on(received: int, refusal: str) -> None:
    with pytest.raises(SessionLost, match=refusal):
        read(from_gateway(received), sent(5, 2))


@pytest.mark.parametrize("received", [2, 3, 5])
def test_a_side_may_have_received_what_it_did_not_acknowledge(received: int) -> None:
    assert read(from_gateway(received), sent(5, 2)).received == received


def test_limits_hold_for_the_whole_session() -> None:
    before = read(from_gateway())
    assert read(from_gateway(), before=before) == before
    with pytest.raises(ProtocolError, match="the gateway changed its limits within the session"):
        read(from_gateway(limits=Limits(window=2**20)), before=before)


def test_each_role_has_another() -> None:
    pairs: list[Callable[[], Role]] = [lambda: Role.CLIENT.other, lambda: Role.GATEWAY.other]
    assert [pair() for pair in pairs] == [Role.GATEWAY, Role.CLIENT]
