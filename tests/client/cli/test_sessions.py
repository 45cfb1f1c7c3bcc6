"""``meshgate sessions``."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from meshgate.cli import sessions
from meshgate.cli.app import app
from meshgate.cli.sessions import Sessions, show_sessions
from meshgate.jobs.sessions import SessionInfo

TRAIN = SessionInfo(
    id="0123456789abcdef" * 2,
    name="train",
    detached=True,
    age=120,
    holder="me@laptop (pid 7)",
    actors=("trainers", "generators", "a", "b"),
    procs=("procs",),
    calls_in_flight=3,
    calls_finished=2,
    unread_lines=40,
    code_version="cafe" * 16,
)


class Job:
    def sessions(self, cached_path: str | None) -> list[SessionInfo]:
        assert cached_path is None  # the command has found the job
        return [TRAIN]


def shown(*found: SessionInfo) -> list[str]:
    text = io.StringIO()
    show_sessions(Sessions(sessions=list(found)), Console(file=text, width=250, highlight=False, soft_wrap=True))
    return text.getvalue().splitlines()


def test_the_sessions_of_the_job_are_listed(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "find_job", lambda job, namespace: Job())
    assert json.loads(run.invoke(app, ["sessions", "--json"]).output)["sessions"][0]["name"] == "train"


def test_a_session_is_one_line() -> None:
    _, line = shown(TRAIN)
    assert line.split("  ")[0] == "train"
    for part in (
        "01234567",
        "left, detached",
        "2m",
        "trainers,generators,a,b,… (5)",
        "cafecafecafe",
        "me@laptop (pid 7)",
    ):
        assert part in line
    assert [word for word in line.split() if word.isdecimal() and len(word) < 8] == ["3", "2", "40"]


def test_a_session_that_does_not_answer_says_so() -> None:
    assert "its engine did not answer" in shown(SessionInfo(id="ab" * 16, error="its engine did not answer"))[1]
    assert "held" in shown(SessionInfo(id="ab" * 16, connected=True))[1]
    assert shown() == ["the job has no sessions"]
