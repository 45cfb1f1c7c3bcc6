from __future__ import annotations

import pickle

import pytest

from meshgate_gateway.engine.monarch import replies
from meshgate_gateway.engine.monarch.replies import COPY_LIMIT


def test_only_replies_are_left_unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps("value")
    assert replies._loads_or_bytes(data) == "value"
    monkeypatch.setattr(replies._decoding, "references", 0, raising=False)
    assert replies._loads_or_bytes(data) == (data, ())


@pytest.mark.parametrize("size", [COPY_LIMIT, COPY_LIMIT + 1])
def test_small_replies_are_copied_and_large_ones_viewed(size: int) -> None:
    content = bytearray(size)
    data = replies._as_bytes(content)
    assert bytes(data) == bytes(content)
    assert isinstance(data, bytes) == (size <= COPY_LIMIT)
