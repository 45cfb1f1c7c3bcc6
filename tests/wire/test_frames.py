"""The bytes of websocket messages."""

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


def test_a_hello_is_decoded_as_encoded() -> None:
    decoded = f.decode_hello(hello(received=7), protocol=1)
    assert isinstance(decoded, f.Hello)
    assert f.decode_hello(f.encode_hello(decoded), protocol=1) == decoded


def test_unknown_fields_of_a_hello_are_ignored() -> None:
    assert isinstance(f.decode_hello(hello(weather="fine"), protocol=1), f.Hello)


def test_a_hello_of_another_protocol_needs_only_the_common_fields() -> None:
    data = b"\x01" + json.dumps({"protocol": 9, "role": "gateway", "software": "3.0", "shape": []}).encode()
    assert f.decode_hello(data, protocol=1) == (9, "3.0", "gateway")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "must be a hello .* not type empty"),
        (b"\x02{}", "not type 02"),
        (b"\x01{", "invalid hello: value: Invalid JSON"),
        (b"\x01[]", "invalid hello: value"),
        (hello(role="mesh"), "role"),
        (hello(received=-1), "received"),
        (hello(received=2**63), "received"),
        (hello(software="x" * 65), "software"),
        (hello(limits={}), r"limits\.window"),
        (hello(limits={**f.PeerLimits.of(Limits()).model_dump(), "window": 1}), r"limits\.window: .* 262144"),
        (
            hello(limits={**f.PeerLimits.of(Limits()).model_dump(), "max_frame": 2**40}),
            "max_websocket_message must exceed",
        ),
        (
            hello(limits={**f.PeerLimits.of(Limits()).model_dump(), "max_message": 2**40}),
            "max_partial_bytes be at least",
        ),
    ],
)
def test_the_error_of_an_invalid_hello_names_the_field(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason) as caught:
        f.decode_hello(data, protocol=1)
    assert caught.value.resumable


def test_an_oversized_hello_is_not_parsed() -> None:
    with pytest.raises(LimitExceeded, match="sent 16385 bytes in a hello, but this side's limit is 16384"):
        f.decode_hello(b"\x01" + b"[" * 16384, protocol=1)


def test_the_bytes_of_a_websocket_message_of_frames() -> None:
    data = f.encode_frames_header(f.FRAMES, 5, 9)
    assert data.hex(" ") == "02 00 00 00 00 00 00 00 05 00 00 00 00 00 00 00 09"
    assert f.read_frames_header(data) == (f.FRAMES, 5, 9)


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


def test_as_many_grants_as_possible_fit_into_a_credit_frame() -> None:
    for size in range(100):
        count = f.grants_that_fit(size)
        assert count == 0 or len(f.encode_credits([(1, 1)] * count)) <= size
        assert len(f.encode_credits([(1, 1)] * (count + 1))) > size
