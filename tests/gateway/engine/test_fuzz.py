"""A bounded number of the mutations of ``fuzz_messages``."""

from __future__ import annotations

import asyncio

import pytest

from meshgate_gateway.engine.failures import FailureReports
from tests.gateway.engine import fuzz_messages


def run_seeds(count: int) -> None:
    for seed in range(count):
        asyncio.run(fuzz_messages.run(seed))


def test_any_valid_messages_are_answered_or_reported() -> None:
    run_seeds(60)


def test_an_exception_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FailureReports, "report")
    with pytest.raises(AssertionError, match="report"):
        run_seeds(30)
