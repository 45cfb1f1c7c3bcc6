"""The terminal output of a pull."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from meshgate.transfer import progress_bar
from meshgate.transfer.progress_bar import PullProgress
from meshgate.transfer.pulled import Pulled


@pytest.mark.parametrize("mode", ["auto", "plain"])
def test_one_line_is_printed_without_a_terminal(
    mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHGATE_PROGRESS", mode)
    monkeypatch.setattr(progress_bar, "time", SimpleNamespace(monotonic=iter((100.0, 102.5)).__next__))
    with PullProgress("/data") as progress:
        progress.expect(10)
        progress.advance(10)
        progress.done(Pulled(2, 5_000_000, 999, tuple("abcdefg")))
    assert capsys.readouterr().err == (
        "pulled /data: 2 files, 5.0 MB, 999 B transferred, in 2.5 s; left out, as special files, links out of the "
        "directory and files removed meanwhile are: a, b, c, d, e and 2 more\n"
    )


def test_nothing_is_printed_when_progress_is_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHGATE_PROGRESS", "off")
    with PullProgress("/data") as progress:
        progress.done(Pulled(1, 1, 1))
    assert capsys.readouterr().err == ""
