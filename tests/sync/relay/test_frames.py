from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_sync.errors import MalformedMessage
from meshgate_sync.relay.frames import (
    Ack,
    Cancel,
    Data,
    Heartbeat,
    Hello,
    Hold,
    Message,
    Offer,
    RequestFullDelta,
    Unreachable,
    Want,
    Withdraw,
    decode_frame,
    encode_frame,
)

digests = st.binary(min_size=32, max_size=32)
lists = st.lists(digests, max_size=4).map(tuple)
names = st.text(min_size=1, max_size=20).filter(lambda name: name.encode(errors="ignore").decode() == name and name)
pieces = st.binary(min_size=1, max_size=50)

messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, names, lists),
    st.builds(
        Offer, digests, digests, digests, st.booleans(), st.binary(max_size=50),
        st.lists(st.tuples(digests, pieces), max_size=3).map(tuple), st.integers(0, 2**32 - 1), lists,
    ),
    st.builds(RequestFullDelta, digests),
    st.builds(Want, digests, lists),
    st.builds(Cancel, lists),
    st.builds(Data, digests, pieces),
    st.builds(
        Ack, digests, st.lists(names, max_size=3).map(tuple),
        st.lists(st.tuples(names, st.text(max_size=20).filter(lambda text: text.isascii())), max_size=3).map(tuple),
    ),
    st.builds(Unreachable, st.lists(st.tuples(names, st.just("refused")), max_size=3).map(tuple)),
    st.builds(Withdraw, digests),
    st.builds(Hold, digests),
    st.builds(Heartbeat, st.booleans()),
)  # fmt: skip


@given(messages)
def test_decode_reverses_encode(message: Message) -> None:
    frame = b"".join(encode_frame(message))
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert decode_frame(frame[4:]) == message


@given(messages, st.data())
def test_a_truncated_or_extended_frame_is_rejected(message: Message, data: st.DataObject) -> None:
    frame = b"".join(encode_frame(message))[4:]
    short = frame[: data.draw(st.integers(0, len(frame) - 1))]
    for damaged in (short, frame + b"x"):
        if isinstance(message, Data) and len(damaged) > 33:
            continue  # a part of a piece is a valid piece; the receiver checks its digest
        with pytest.raises(MalformedMessage):
            decode_frame(damaged)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_malformed(random_bytes: bytes) -> None:
    try:
        message = decode_frame(random_bytes)
    except MalformedMessage:
        return
    assert b"".join(encode_frame(message))


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff",
        b"\x05" + bytes(32),
        b"\x05" + bytes(32) + bytes(256 * 1024 + 1),
        b"\x00\x00\x00" + bytes(4),
        b"\x00\x00\x02\xff\xff" + bytes(4),
        b"\x00\x10\x00" + b"x" * 4096 + bytes(4),
        b"\x03" + bytes(32) + b"\xff\xff\xff\xff",
    ],
)
def test_invalid_lengths_and_names_are_rejected(frame: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_frame(frame)


def test_a_long_reason_is_truncated() -> None:
    ack = Ack(bytes(32), (), (("h", "x" * 10_000),))
    read = decode_frame(b"".join(encode_frame(ack))[4:])
    assert isinstance(read, Ack)
    assert len(read.failed[0][1]) == 4096
