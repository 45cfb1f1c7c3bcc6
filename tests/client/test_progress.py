"""What is shown while something takes long depends on the terminal and on ``MESHGATE_PROGRESS``."""

from __future__ import annotations

import io
import itertools
import queue
import re
import sys
from pathlib import Path

import pytest

import meshgate
from meshgate import progress
from meshgate.progress import Waiting, new_console, progress_mode, report_stream


class Written(io.StringIO):
    """Hands over each text as it is written."""

    def __init__(self, *, terminal: bool = False) -> None:
        super().__init__()
        self.texts: queue.Queue[str] = queue.Queue()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        self.texts.put(text)
        return len(text)

    def until(self, wanted: str) -> None:
        """Waits until ``wanted`` has been written."""
        found = ""
        while wanted not in found:
            found += self.texts.get(timeout=120)


@pytest.mark.parametrize(
    ("variable", "terminal", "pipe"),
    [(None, "live", "plain"), ("auto", "live", "plain"), ("PLAIN", "plain", "plain"), ("off", "off", "off")],
)
def test_the_mode(variable: str | None, terminal: str, pipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if variable is None:
        monkeypatch.delenv("MESHGATE_PROGRESS", raising=False)
    else:
        monkeypatch.setenv("MESHGATE_PROGRESS", variable)
    assert (progress_mode(Written(terminal=True)), progress_mode(io.StringIO())) == (terminal, pipe)


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_PROGRESS", "loud")
    with pytest.raises(ValueError, match="MESHGATE_PROGRESS='loud': expected auto, plain or off"):
        progress_mode(io.StringIO())


def test_every_console_shows_text_as_it_is() -> None:
    made_in = [
        path for path in Path(meshgate.__file__).parent.rglob("*.py") if re.search(r"\bConsole\(", path.read_text())
    ]
    assert [path.name for path in made_in] == ["progress.py"], "use meshgate.progress.new_console"
    screen = io.StringIO()
    new_console(file=screen).print("[/x] [a,b] [bold] :x:")
    assert screen.getvalue() == "[/x] [a,b] [bold] :x:\n"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait is long."""
    monkeypatch.delenv("MESHGATE_PROGRESS", raising=False)
    monkeypatch.setattr(progress, "SILENCE", 0.0)
    monkeypatch.setattr(progress, "REPEAT_INTERVAL", 0.01)


@pytest.mark.usefixtures("at_once")
def test_a_long_wait_prints_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Written()
    monkeypatch.setattr(sys, "stderr", stream)
    texts = itertools.chain(["reading"] * 3, itertools.repeat("5 MB sent"))
    with Waiting(lambda: next(texts)):
        assert [stream.texts.get(timeout=120) for _ in range(2)] == ["meshgate: reading\n", "meshgate: 5 MB sent\n"]
    assert stream.texts.empty()


@pytest.mark.usefixtures("at_once")
def test_a_long_wait_is_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Written(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    texts = itertools.chain(["reading [bold]"], itertools.repeat("5 MB sent"))
    with Waiting(lambda: next(texts)):
        stream.until("reading [bold]")
        stream.until("5 MB sent")
    stream.until("\x1b[2K")  # the line is erased


def test_a_short_wait_shows_nothing_and_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENCE", 1e6)
    stream = Written()
    monkeypatch.setattr(sys, "stderr", stream)
    with Waiting(lambda: "reading"):
        pass
    assert stream.texts.empty()


@pytest.mark.usefixtures("at_once")
def test_nothing_is_shown_if_progress_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_PROGRESS", "off")
    asked: list[str] = []
    with Waiting(lambda: asked.append("asked") or "") as waiting:
        assert waiting._thread.ident is None
    assert not asked


def test_a_report_is_no_error_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report_stream() is sys.stderr
    monkeypatch.setattr(sys, "stderr", type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})())
    assert report_stream() is sys.stdout
