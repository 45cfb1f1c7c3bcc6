"""Titles of steps."""

from __future__ import annotations

import pytest

from meshgate.images.steps import Argument, Copy, PipInstall, RunBash, SetEnvVars, Step, SyncPackage, WorkDir, title


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (PipInstall(("a", "b>=2")), "pip install a b>=2"),
        (RunBash("make \\\n  all"), "run make \\ all"),
        (SetEnvVars((("A", "secret"), ("B", "2"))), "set A B"),
        (Argument("V", "1"), "argument V"),
        (WorkDir("/app"), "change directory to /app"),
        (Copy(("/a", "/b"), "/c/"), "copy /a /b to /c/"),
        (Copy(("/a",), ""), "copy /a to ."),
        (SyncPackage("/p"), "sync package /p"),
        (RunBash("x" * 100), f"run {'x' * 67}…"),
    ],
)
def test_a_title_is_short_and_without_values(step: Step, text: str) -> None:
    assert title(step) == text
