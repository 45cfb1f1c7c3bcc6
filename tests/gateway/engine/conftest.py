"""What every test of the engine needs."""

from __future__ import annotations

import pytest

from meshgate_gateway.engine.calls import calling


@pytest.fixture(autouse=True)
def progress_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a machine that stalls for a quarter of a second adds a message to those that a test expects."""
    monkeypatch.setattr(calling, "REPORT_INTERVAL", 3600.0)
