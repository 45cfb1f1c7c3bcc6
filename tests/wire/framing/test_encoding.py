"""Messages are encoded without copying large buffers."""

from __future__ import annotations

import pytest

from meshgate_wire import Limits, MessageTooLarge
from meshgate_wire.framing.encoding import encode_message
from meshgate_wire.framing.header_codec import dump_header
from meshgate_wire.messages import Done


def test_the_bytes_of_a_message() -> None:
    head = dump_header(Done(call=1))
    nbytes, pieces = encode_message(Done(call=1), [b"ab", [b"c", b"de"], b""], Limits())
    data = b"".join(pieces)
    assert len(data) == nbytes
    lengths = (2).to_bytes(8, "big") + (3).to_bytes(8, "big") + bytes(8)
    assert data == len(head).to_bytes(4, "big") + (3).to_bytes(4, "big") + lengths + head + b"abcde"


def test_a_message_without_buffers_is_a_preamble_and_a_header() -> None:
    nbytes, pieces = encode_message(Done(call=1), (), Limits())
    assert b"".join(pieces) == (24).to_bytes(4, "big") + bytes(4) + b'{"type":"done","call":1}'
    assert nbytes == 32


def test_a_large_buffer_is_not_copied() -> None:
    large = bytes(10_000)
    assert any(piece is large for piece in encode_message(Done(call=1), [large], Limits()).pieces)


def test_a_message_that_exceeds_the_limit_is_rejected() -> None:
    limits = Limits(max_message=65536, max_partial_bytes=65536)
    with pytest.raises(MessageTooLarge, match="cannot send a message with 65576 bytes: the peer's limit is 65536"):
        encode_message(Done(call=1), [bytes(65536)], limits)
