"""Checks, after each test of the wire, the invariants of the sessions that it created."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.wire import channel


@pytest.fixture(autouse=True)
def _check_sessions() -> Iterator[None]:
    yield
    channel.check_sessions()
