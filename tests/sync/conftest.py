"""After every test the state of each relay that it made in this process is validated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from meshgate_sync.relay.relay import Relay


@pytest.fixture(autouse=True)
def _relays_are_valid(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    relays: list[Relay] = []
    initialize = Relay.__init__

    def record(self: Relay, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        relays.append(self)

    monkeypatch.setattr(Relay, "__init__", record)
    yield
    for relay in relays:
        relay.validate_state()
