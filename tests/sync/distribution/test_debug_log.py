from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshgate_sync
from meshgate_sync.distribution.debug_log import VARIABLE, enable_debug_log

SOURCES = str(Path(meshgate_sync.__file__).parent.parent)
PROGRAM = """
import logging
from meshgate_sync.distribution.debug_log import enable_debug_log
enable_debug_log(); enable_debug_log()
logging.getLogger("meshgate_sync.relay.versions").debug("version=%s", "abc")
logging.getLogger("other").debug("not ours")
"""


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    log = logging.getLogger("meshgate_sync")
    before = log.level
    yield
    log.setLevel(before)


def stderr(**environment: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**variables, "PYTHONPATH": SOURCES, **environment},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stderr


def test_a_bare_process_is_silent_unless_debug_is_enabled() -> None:
    assert stderr() == ""
    assert stderr(MESHGATE_LOG_LEVEL="info") == ""


def test_a_bare_process_logs_each_line_once_to_stderr() -> None:
    (line,) = stderr(MESHGATE_LOG_LEVEL="DEBUG").splitlines()
    assert line.endswith(" DEBUG meshgate_sync.relay.versions: version=abc")


def test_a_process_that_configured_its_logging_keeps_its_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "debug")
    log = logging.getLogger("meshgate_sync")
    assert log.hasHandlers()
    enable_debug_log()
    assert log.handlers == []
    assert log.getEffectiveLevel() == logging.DEBUG
