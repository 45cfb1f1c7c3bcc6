from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_sync.errors import MalformedMessage, PeerRefused
from meshgate_sync.handshake import Answering, Asking


def shake(asking: Asking, answering: Answering, step: int, behind: bytes = b"") -> bytes:
    """Runs the handshake ``step`` bytes at a time; returns what the parent got behind it."""
    to_parent = asking.opening
    to_child = b""
    for start in range(0, len(to_parent), step):
        to_child += answering.receive(to_parent[start : start + step])
    proof = None
    for start in range(0, len(to_child), step):
        proof = asking.receive(to_child[start : start + step])
    assert proof is not None
    reply, rest = proof
    assert rest == b""
    last = reply + behind
    for start in range(0, len(last), step):
        if answering.name is None:
            assert answering.receive(last[start : start + step]) == b""
            rest = answering.rest
        else:
            rest += last[start : start + step]
    return rest


@given(st.integers(1, 200), st.binary(max_size=20))
def test_both_sides_learn_who_the_other_is(step: int, behind: bytes) -> None:
    answering = Answering(b"secret")
    assert shake(Asking(b"secret", "höst-1"), answering, step, behind) == behind
    assert answering.name == "höst-1"


def test_a_parent_without_the_secret_is_refused() -> None:
    asking = Asking(b"secret", "host")
    reply = Answering(b"other").receive(asking.opening)
    with pytest.raises(PeerRefused, match="parent"):
        asking.receive(reply)


def test_a_child_without_the_secret_is_refused() -> None:
    answering = Answering(b"secret")
    answering.receive(Asking(b"secret", "host").opening)
    with pytest.raises(PeerRefused, match="child"):
        answering.receive(bytes(32))


def test_a_recorded_proof_is_of_no_use_again() -> None:
    asking, first, second = Asking(b"secret", "host"), Answering(b"secret"), Answering(b"secret")
    outcome = asking.receive(first.receive(asking.opening))
    assert outcome is not None
    second.receive(asking.opening)
    with pytest.raises(PeerRefused):
        second.receive(outcome[0])


@pytest.mark.parametrize("opening", [b"GET / HTTP/1.1\r\n", b"MGR1" + bytes(16) + b"\xff\xff"])
def test_strangers_are_sent_away(opening: bytes) -> None:
    with pytest.raises(MalformedMessage):
        Answering(b"secret").receive(opening)
