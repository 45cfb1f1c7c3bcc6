from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_sync.errors import MalformedMessage
from meshgate_sync.upload.compress import compress, decompress


@given(st.one_of(st.binary(max_size=300), st.integers(0, 200_000).map(lambda size: b"ab" * size)))
def test_decompress_reverses_compress(data: bytes) -> None:
    compressed = compress(data)
    assert decompress(compressed, len(data)) == data
    assert len(compressed) <= len(data) + 1


def test_incompressible_data_is_sent_as_it_is() -> None:
    noise = os.urandom(500_000)
    assert compress(noise) == b"\0" + noise
    assert len(compress(b"text " * 100_000)) < 1000
    assert len(compress(noise[:200_000] + b"text " * 100_000)) < 202_000
    small = os.urandom(100)
    assert compress(small) == b"\0" + small


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (b"", 0),
        (b"\0abc", 4),
        (b"\2abc", 3),
        (b"\1abc", 3),
        (compress(b"a" * 1000), 999),
        (compress(b"a" * 1000)[:-3], 1000),
        (compress(b"a" * 1000)[:-9] + b"damage!!!", 1000),
    ],
)
def test_corrupt_data_and_wrong_sizes_are_rejected(data: bytes, size: int) -> None:
    with pytest.raises(MalformedMessage):
        decompress(data, size)
