from __future__ import annotations

import json
from typing import Any

import pytest

from meshgate_wire import LimitExceeded, Limits, ProtocolError
from meshgate_wire import frames as f


def hello(**changes: Any) -> bytes:
    fields = {
        "protocol": 1,
        "role": "client",
        "software": "0.1.0",
        "python": "3.12.1",
        "received": 0,
        "limits": f.PeerLimits.of(Limits()).model_dump(),
    }
    return b"\x01" + json.dumps({**fields, **changes}).encode()


def test_a_hello_is_read_as_it_was_written() -> None:
    greeting = f.decode_hello(hello(received=7), protocol=1)
    assert isinstance(greeting, f.Hello)
    assert f.decode_hello(f.encode_hello(greeting), protocol=1) == greeting


def test_what_a_later_hello_adds_is_ignored() -> None:
    assert isinstance(f.decode_hello(hello(weather="fine"), protocol=1), f.Hello)


def test_of_another_protocol_a_hello_needs_only_what_all_have_in_common() -> None:
    data = b"\x01" + json.dumps({"protocol": 9, "role": "gateway", "software": "3.0", "shape": []}).encode()
    assert f.decode_hello(data, protocol=1) == (9, "3.0", "gateway")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "must be a hello .* not type empty"),
        (b"\x02{}", "not type 02"),
        (b"\x01{", "malformed hello: the whole: Invalid JSON"),
        (b"\x01[]", "malformed hello: the whole"),
        (hello(role="mesh"), "role"),
        (hello(received=-1), "received"),
        (hello(received=2**63), "received"),
        (hello(software="x" * 65), "software"),
        (hello(limits={}), r"limits\.window"),
        (hello(limits={**f.PeerLimits.of(Limits()).model_dump(), "window": 1}), r"limits\.window: .* 262144"),
        (hello(limits={**f.PeerLimits.of(Limits()).model_dump(), "max_frame": 2**40}), "a websocket message holds"),
        (hello(limits={**f.PeerLimits.of(Limits()).model_dump(), "max_message": 2**40}), "unfinished messages hold"),
    ],
)
def test_a_malformed_hello_says_what_is_wrong(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason) as caught:
        f.decode_hello(data, protocol=1)
    assert caught.value.resumable


def test_an_oversized_hello_is_not_parsed() -> None:
    with pytest.raises(LimitExceeded, match="a hello in bytes of 16385, the limit here is 16384"):
        f.decode_hello(b"\x01" + b"[" * 16384, protocol=1)


def test_the_bytes_of_a_websocket_message_of_frames() -> None:
    data = f.encode_frames_header(5, 9)
    assert data.hex(" ") == "02 00 00 00 00 00 00 00 05 00 00 00 00 00 00 00 09"
    assert f.read_frames_header(data) == (5, 9)


def test_the_bytes_of_an_acknowledgement() -> None:
    data = f.encode_ack(258)
    assert data.hex(" ") == "03 00 00 00 00 00 00 01 02"
    assert f.read_ack(data) == 258


def test_the_bytes_of_a_frame_header() -> None:
    data = f.encode_frame_header(f.FIRST | f.LAST, -2, 77)
    assert data.hex(" ") == "03 ff ff ff ff ff ff ff fe 00 00 00 4d"
    assert f.read_frame_header(b"skip" + data, 4) == (3, -2, 77)


def test_the_bytes_of_a_credit_frame() -> None:
    data = f.encode_credits([(7, 100), (-1, 2)])
    assert data.hex(" ", 1) == (
        "04 00 00 00 00 00 00 00 00 00 00 00 18 00 00 00 00 00 00 00 07 00 00 00 64 ff ff ff ff ff ff ff ff 00 00 00 02"
    )
    assert f.decode_credits(data[f.FRAME_HEADER_BYTES :]) == [(7, 100), (-1, 2)]


def test_a_credit_frame_fits_the_room_it_is_made_for() -> None:
    for room in range(100):
        count = f.credits_in(room)
        assert count == 0 or len(f.encode_credits([(1, 1)] * count)) <= room
        assert len(f.encode_credits([(1, 1)] * (count + 1))) > room
