"""Terminal output while a job starts or ends."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from meshgate.jobs.kubernetes.display import (
    PlainDisplay,
    RichDisplay,
    SilentDisplay,
    choose_display,
    duration_text,
    ready_message,
)
from meshgate_kubernetes.status.diagnosis import Problem, Stage
from meshgate_kubernetes.status.readiness import MeshProgress, Progress

PULLING = Progress((MeshProgress("workers", 3, ((Stage.PULLING, 1), (Stage.READY, 2))),), ())
STUCK = Progress(
    PULLING.meshes, (Problem("pod a", "Unschedulable", "Insufficient cpu"),), "the API server does not answer"
)
UP = Progress((MeshProgress("workers", 3, ((Stage.READY, 3),)),), ())
SECRET = {"kind": "Secret", "metadata": {"name": "a-token"}}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_output_prints_each_line_once() -> None:
    stream = io.StringIO()
    with PlainDisplay("team/a", stream) as display:
        display.created(SECRET)
        for progress in (PULLING, PULLING, STUCK, UP):
            display.progress(progress)
        display.done("is ready")
    assert stream.getvalue().splitlines() == [
        "team/a: created 1 object: Secret",
        "team/a: workers: 1 pulling, 2 ready (of 3)",
        "team/a: pod a: Unschedulable: Insufficient cpu",
        "team/a: the API server does not answer",
        "team/a: workers: 3 ready (of 3)",
        "team/a: is ready",
    ]


def test_plain_output_shows_a_thousand_pods_in_few_lines() -> None:
    stream = io.StringIO()
    seconds = iter(range(1000))
    with PlainDisplay("team/a", stream, clock=lambda: float(next(seconds))) as display:
        for ready in range(25):
            stages = ((Stage.PENDING, 1000 - ready), (Stage.READY, ready))
            display.progress(Progress((MeshProgress("workers", 1000, stages),), ()))
        display.progress(Progress((MeshProgress("workers", 1000, ((Stage.READY, 1000),)),), ()))
    assert stream.getvalue().splitlines() == [
        *(f"team/a: workers: {1000 - ready} pending, {ready} ready (of 1000)" for ready in (0, 10, 20)),
        "team/a: workers: 1000 ready (of 1000)",
    ]


def test_a_terminal_gets_a_live_display_that_leaves_one_line() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    display = RichDisplay("team/a", console)
    display.created(SECRET)
    with console.capture() as before:
        console.print(display._render())
    display.progress(STUCK)
    with console.capture() as during:
        console.print(display._render())
    assert "1 object created" in before.get()
    assert "workers  2/3 ready  1 pulling" in during.get()
    assert "! pod a: Unschedulable: Insufficient cpu" in during.get()
    with display:
        display.done("is ready")
    assert isinstance(console.file, io.StringIO)
    assert "✓ team/a is ready" in console.file.getvalue()


def test_the_display_depends_on_the_terminal_and_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_final_line_says_when_the_job_ends() -> None:
    assert ready_message({"a": 2, "b": 1}, 3600) == "is ready (a=2, b=1); ends after 1 h without a session"
    assert ready_message({"a": 2}, 0) == "is ready (a=2); runs until killed"
    assert [duration_text(seconds) for seconds in (90, 1800, 5400)] == ["90 s", "30 min", "1.5 h"]


def test_deleting_a_job_is_shown_while_it_runs() -> None:
    stream = io.StringIO()
    with PlainDisplay("team/a", stream) as display:
        display.activity("is being deleted")
        display.done("is deleted")
    assert stream.getvalue().splitlines() == ["team/a: is being deleted", "team/a: is deleted"]
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    live = RichDisplay("team/a", console)
    live.activity("is being deleted")
    with console.capture() as during:
        console.print(live._render())
    assert during.get().split()[1:5] == ["team/a", "is", "being", "deleted"]
