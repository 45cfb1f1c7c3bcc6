"""What a terminal shows while a job comes up."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from meshgate.kubernetes.progress import (
    PlainDisplay,
    RichDisplay,
    SilentDisplay,
    choose_display,
    duration,
    told_when_up,
)
from meshgate_kubernetes.readiness import MeshProgress, Progress
from meshgate_kubernetes.waiting import Problem, Stage

PULLING = Progress((MeshProgress("workers", 3, ((Stage.PULLING, 1), (Stage.READY, 2))),), ())
STUCK = Progress(PULLING.meshes, (Problem("pod a", "Unschedulable", "Insufficient cpu"),), "the API server is away")
UP = Progress((MeshProgress("workers", 3, ((Stage.READY, 3),)),), ())
SECRET = {"kind": "Secret", "metadata": {"name": "a-token"}}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_tell_what_is_new_once() -> None:
    stream = io.StringIO()
    with PlainDisplay("team/a", stream) as display:
        display.created(SECRET)
        for progress in (PULLING, PULLING, STUCK, UP):
            display.progress(progress)
        display.done("is up")
    assert stream.getvalue().splitlines() == [
        "team/a: created 1 objects: Secret",
        "team/a: workers: 1 pulling, 2 ready (of 3)",
        "team/a: pod a: Unschedulable: Insufficient cpu",
        "team/a: the API server is away",
        "team/a: workers: 3 ready (of 3)",
        "team/a: is up",
    ]


def test_a_terminal_has_a_picture_and_keeps_one_line() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    display = RichDisplay("team/a", console)
    display.created(SECRET)
    with console.capture() as before:
        console.print(display._picture())
    display.progress(STUCK)
    with console.capture() as during:
        console.print(display._picture())
    assert "1 objects created" in before.get()
    assert "workers  2/3 ready  1 pulling" in during.get()
    assert "! pod a: Unschedulable: Insufficient cpu" in during.get()
    with display:
        display.done("is up")
    assert isinstance(console.file, io.StringIO)
    assert "✓ team/a is up" in console.file.getvalue()


def test_the_display_fits_the_terminal_and_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHGATE_PROGRESS", raising=False)
    assert isinstance(choose_display("a", Terminal()), RichDisplay)
    assert isinstance(choose_display("a", io.StringIO()), PlainDisplay)
    monkeypatch.setenv("MESHGATE_PROGRESS", "plain")
    assert isinstance(choose_display("a", Terminal()), PlainDisplay)
    monkeypatch.setenv("MESHGATE_PROGRESS", "off")
    assert type(choose_display("a", Terminal())) is SilentDisplay
    monkeypatch.setenv("MESHGATE_PROGRESS", "loud")
    with pytest.raises(ValueError, match="MESHGATE_PROGRESS='loud'"):
        choose_display("a", Terminal())


def test_the_line_that_remains_says_when_the_job_ends_itself() -> None:
    assert told_when_up({"a": 2, "b": 1}, 3600) == "is up: a 2, b 1; ends itself after 1 h without a session"
    assert told_when_up({"a": 2}, 0) == "is up: a 2; runs until killed"
    assert [duration(seconds) for seconds in (90, 1800, 5400)] == ["90 s", "30 min", "1.5 h"]


def test_the_end_of_a_job_is_shown_while_it_takes_its_time() -> None:
    stream = io.StringIO()
    with PlainDisplay("team/a", stream) as display:
        display.doing("is being removed")
        display.done("is gone")
    assert stream.getvalue().splitlines() == ["team/a: is being removed", "team/a: is gone"]
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    picture = RichDisplay("team/a", console)
    picture.doing("is being removed")
    with console.capture() as during:
        console.print(picture._picture())
    assert during.get().split()[1:5] == ["team/a", "is", "being", "removed"]
