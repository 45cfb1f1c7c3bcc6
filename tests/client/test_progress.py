"""What is shown while a job starts depends on the terminal and on ``MESHGATE_PROGRESS``."""

from __future__ import annotations

import io

import pytest

from meshgate.progress import progress_mode


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variable", "terminal", "pipe"),
    [(None, "live", "plain"), ("auto", "live", "plain"), ("PLAIN", "plain", "plain"), ("off", "off", "off")],
)
def test_the_mode(variable: str | None, terminal: str, pipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if variable is None:
        monkeypatch.delenv("MESHGATE_PROGRESS", raising=False)
    else:
        monkeypatch.setenv("MESHGATE_PROGRESS", variable)
    assert (progress_mode(Terminal()), progress_mode(io.StringIO())) == (terminal, pipe)


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_PROGRESS", "loud")
    with pytest.raises(ValueError, match="MESHGATE_PROGRESS='loud': expected auto, plain or off"):
        progress_mode(io.StringIO())
