"""Headers as JSON: unknown fields are ignored; invalid headers are rejected at little cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshgate_wire import messages as m
from meshgate_wire.framing.header_codec import dump_header, load_header, with_call_number
from tests.wire.example_messages import EXAMPLES


@pytest.mark.parametrize("header", EXAMPLES, ids=lambda header: header.type)
def test_a_header_is_loaded_as_dumped(header: m.Header) -> None:
    assert load_header(dump_header(header)) == header
    assert load_header(memoryview(dump_header(header))) == header


@pytest.mark.parametrize("header", EXAMPLES, ids=lambda header: header.type)
def test_unknown_fields_are_ignored(header: m.Header) -> None:
    data = dump_header(header)
    assert load_header(data[:-1] + b', "later": [1, {}]}') == header


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"null",
        b"\xff\xfe",
        b'{"type": "unheard_of"}',
        b'{"type": "done"}',
        b'{"type": "done", "call": -1}',
        b'{"type": "done", "call": NaN}',
        b'{"type": "done", "call": 9007199254740993}',
        b'{"type": "done", "call": ' + b"9" * 100_000 + b"}",
        b'{"type": "done", "call": 1, "x": ' + b"[" * 100_000,
        b'{"type": "done", "call": 1, "x": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"type": "open_channel", "object": 1e99}',
        b'{"type": "attach_hosts", "object": 1, "mesh": "' + b"x" * 257 + b'"}',
    ],
    ids=lambda data: data[:40].decode("latin-1"),
)
def test_an_invalid_header_is_rejected(data: bytes) -> None:
    with pytest.raises(ValidationError):
        load_header(data)


def test_a_long_list_of_invalid_elements_causes_one_error() -> None:
    data = b'{"type": "release", "objects": [' + b'"a",' * 100_000 + b'"a"]}'
    with pytest.raises(ValidationError) as caught:
        load_header(data)
    assert caught.value.error_count() == 1


@given(calls=st.lists(st.integers(0, 2**53), min_size=2, max_size=5))
@pytest.mark.parametrize(
    "header",
    [
        m.Call(call=0, target=m.MeshRef(object=7), endpoint="echo", adverb="call"),
        m.Values(call=0, ranks=(3,), objects={0: m.Adopted(objects=(-1,))}),
        m.Values(call=0),
        m.Done(call=0),
    ],
    ids=repr,
)
def test_headers_that_differ_in_the_call_number_only(header: m.Header, calls: list[int]) -> None:
    for call in calls:
        expected = header.model_copy(update={"call": call})
        other = with_call_number(header, call)
        loaded = load_header(dump_header(other))
        assert other == loaded == expected
        assert repr(other) == repr(loaded) == repr(expected)
        assert hash(other.model_dump_json()) == hash(loaded.model_dump_json())
        assert loaded.model_copy() == expected


@pytest.mark.parametrize("number", ["-1", "01", str(2**53 + 1), "1.5", "null", '"x"', "9" * 40])
def test_an_invalid_call_number_is_rejected_in_a_cached_header(number: str) -> None:
    assert load_header(b'{"type":"done","call":5}') == m.Done(call=5)
    data = f'{{"type":"done","call":{number}}}'.encode()
    with pytest.raises(ValidationError):
        load_header(data)
