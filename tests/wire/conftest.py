"""Every test of the wire ends with the invariants of the sessions that it made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.wire import channel


@pytest.fixture(autouse=True)
def _sessions_are_sound() -> Iterator[None]:
    yield
    channel.check_sessions()
