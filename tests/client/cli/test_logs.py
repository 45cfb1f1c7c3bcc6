"""``meshgate logs``."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from meshgate.cli import logs
from meshgate.cli.app import app
from meshgate.cli.logs import LogLine, SessionFiles, differences, follow_output, lines_of, show
from meshgate.errors import AuthenticationError, ConnectionFailedError, JobError, JobNotRunning, MeshgateError
from meshgate.jobs import runs
from meshgate.jobs.output import OutputReader
from meshgate_wire.status import JobStatus, MeshStatus, OutputPage, SessionOutput, SessionStatus
from tests.client.jobs.test_output import Pages, page_of, printed


class Gateway:
    """Keeps lines, and gives out at most two of a session at a time."""

    def __init__(self, **sessions: int) -> None:
        self.counts = sessions

    def read(self, after: dict[str, int]) -> OutputPage:
        return OutputPage(sessions=tuple(self._session(name, after.get(name, 0)) for name in self.counts))

    _output = read

    def _session(self, name: str, after: int) -> SessionOutput:
        numbers = range(after + 1, min(after + 2, self.counts[name]) + 1)
        now = 10.0 * self.counts[name]
        return SessionOutput(session=name, now=now, lines=tuple(map(printed, numbers)), last=self.counts[name])


def printed_lines(read: Callable[[dict[str, int]], OutputPage], tail: int | None = None) -> Iterator[LogLine]:
    return lines_of(OutputReader(read, tail).fresh())


def follow_lines(job: Any, tail: int | None, since: float = math.inf) -> Iterator[LogLine]:
    return lines_of(follow_output(job, tail, since))


def numbers(lines: object) -> list[tuple[str, int]]:
    return [(line.session, line.number) for line in lines]  # type: ignore[attr-defined]


def test_all_lines_come_once_and_in_order() -> None:
    found = numbers(printed_lines(Gateway(a=5, b=1).read))
    assert [number for session, number in found if session == "a"] == [1, 2, 3, 4, 5]
    assert [number for session, number in found if session == "b"] == [1]


def test_the_tail_is_of_each_session() -> None:
    assert sorted(numbers(printed_lines(Gateway(a=5, b=1).read, 2))) == [("a", 4), ("a", 5), ("b", 1)]


def test_following_yields_lines_printed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway(a=1)
    monkeypatch.setattr(logs.time, "sleep", lambda seconds: gateway.counts.update(a=gateway.counts["a"] + 1))
    lines = follow_lines(gateway, None)
    assert numbers(itertools.islice(lines, 3)) == [("a", 1), ("a", 2), ("a", 3)]


SILENT = "meshgate: session abcdef01: its engine did not answer within 3 s"
MISSING = "3 lines are missing here, because the gateway no longer kept them when they were read"


@pytest.mark.parametrize(
    ("pages", "code", "errors"),
    [
        ([page_of(8, 9, last=9)], 0, []),
        ([page_of(8, last=9), page_of(12, 13, last=13, dropped=3)], 1, [f"meshgate: session abcdef01: {MISSING}"]),
        ([page_of(8, 9, last=99), page_of(last=0, problem="its engine did not answer within 3 s")], 1, [SILENT]),
    ],
)
def test_missing_lines_are_reported_and_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, run: CliRunner, pages: list[SessionOutput], code: int, errors: list[str]
) -> None:
    monkeypatch.setattr(logs, "find_job", lambda *_: SimpleNamespace(_output=Pages(*pages).read))
    result = run.invoke(app, ["logs"])
    assert (result.exit_code, result.stderr.splitlines()) == (code, errors)


def test_a_file_says_where_lines_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = SessionFiles(tmp_path)
    pages = Pages(page_of(8, last=8), page_of(12, 13, last=13, dropped=3))
    show(lines_of(OutputReader(pages.read).fresh(), files), None, files=files, as_json=False)
    assert capsys.readouterr().err == f"meshgate: session abcdef01: {MISSING}\n"
    found = {path.name: path.read_text() for path in tmp_path.rglob("*.log")}
    assert found == {"0.log": f"t8\n[meshgate] {MISSING}\nt12\n", "1.log": f"[meshgate] {MISSING}\nt13\n"}


class Outage(Gateway):
    """The job of a gateway that cannot be reached for the first ``failures`` requests."""

    def __init__(self, failures: float, *, ended: bool | MeshgateError = False) -> None:
        super().__init__(a=3)
        self.failures, self.ended, self._running = failures, ended, self

    def _output(self, after: dict[str, int]) -> OutputPage:
        if self.failures > 0:
            self.failures -= 1
            raise ConnectionFailedError("no answer")
        return self.read(after)

    def _has_ended(self) -> bool:
        if isinstance(self.ended, MeshgateError):
            raise self.ended
        return self.ended

    def __repr__(self) -> str:
        return "the job"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only waiting changes."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


@pytest.mark.parametrize("ended", [False, JobError("the cluster cannot be reached")])
def test_following_goes_on_after_an_outage(clock: list[float], ended: Any) -> None:
    lines = follow_lines(Outage(2, ended=ended), None)
    assert numbers(itertools.islice(lines, 3)) == [("a", 1), ("a", 2), ("a", 3)]
    assert clock == [2 * runs.RETRY]


def test_following_ends_after_a_long_outage_and_at_once_with_the_job_or_a_refusal(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConnectionFailedError, match="no answer"):
        next(follow_lines(Outage(math.inf), None))
    assert runs.OUTAGE < clock[0] <= runs.OUTAGE + 2 * runs.RETRY
    clock[0] = 0.0
    with pytest.raises(JobNotRunning, match="the job has ended"):
        next(follow_lines(Outage(math.inf, ended=True), None))
    refusing = Outage(0)
    monkeypatch.setattr(refusing, "_output", Mock(side_effect=AuthenticationError("wrong token")))
    with pytest.raises(AuthenticationError, match="wrong token"):
        next(follow_lines(refusing, None))
    assert clock == [0.0]


@pytest.mark.parametrize(("tail", "since", "first"), [(0, math.inf, 4), (1, math.inf, 3), (None, 10.0, 2), (2, 0.0, 3)])
def test_following_begins_with_the_last_lines_and_shows_none_before_them_later(
    monkeypatch: pytest.MonkeyPatch, tail: int | None, since: float, first: int
) -> None:
    gateway = Gateway(a=3)
    monkeypatch.setattr(logs.time, "sleep", lambda seconds: gateway.counts.update(a=gateway.counts["a"] + 1))
    lines = follow_lines(gateway, tail, since)
    assert numbers(itertools.islice(lines, 3)) == [("a", number) for number in range(first, first + 3)]


def test_lines_can_be_those_of_the_last_seconds_and_those_with_a_pattern(
    monkeypatch: pytest.MonkeyPatch, run: CliRunner
) -> None:
    monkeypatch.setattr(logs, "find_job", lambda *_: job_with(Gateway(a=13)))
    result = run.invoke(app, ["logs", "--since", "1m", "--grep", "t(8|1)"])
    assert result.stdout == "".join(f"[h m rank {number % 2}] t{number}\n" for number in (8, 10, 11, 12, 13))
    for option, wrong, text in (
        ("--since", "yesterday", "a duration such as '30m'"),
        ("--grep", "loss(", "is not a regular expression: missing )"),
    ):
        result = run.invoke(app, ["logs", option, wrong])
        assert result.exit_code == 2
        assert text in " ".join(result.stderr.replace("│", " ").split())


def test_lines_are_labelled_or_json_and_filtered_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    show(printed_lines(Gateway(a=3).read), 1, as_json=False)
    assert capsys.readouterr().out == "[h m rank 1] t1\n[h m rank 1] t3\n"
    show(printed_lines(Gateway(a=1).read), None, as_json=True)
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["session"], line["number"], line["text"]) == ("a", 1, "t1")


def test_a_rank_finds_a_line_of_many_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    many = printed(1).model_copy(update={"ranks": tuple(range(64)), "more_ranks": ((64, 511),), "count": 512})
    lines = [LogLine(session="a", **many.model_dump())]
    assert show(iter(lines), 511, as_json=False)
    assert not show(iter(lines), 512, as_json=False)
    assert capsys.readouterr().out == "[h m 512 ranks] t1\n"


def of_ranks(text: str, *ranks: int, mesh: str = "m", end: str = "\n", session: str = "a") -> LogLine:
    line = printed(1).model_dump() | {"text": text, "ranks": ranks, "count": len(ranks), "mesh": mesh, "end": end}
    return LogLine(session=session, **line)


LOSSES = [
    of_ranks("1 loss 3", 0, 1, 2),
    of_ranks("50%", 1, end="\r"),
    of_ranks("2 loss 2", 0, 2),
    of_ranks("2 loss nan", 1),
    of_ranks("saved", 0),
    of_ranks("loaded", 0, 1, mesh="loaders"),
]


def test_what_two_ranks_printed_differently_is_shown_by_mesh() -> None:
    assert list(differences(LOSSES, 0, 1)) == [
        "--- m rank 0",
        "+++ m rank 1",
        "@@ -1,3 +1,2 @@",
        " 1 loss 3",
        "-2 loss 2",
        "-saved",
        "+2 loss nan",
        "loaders: ranks 0 and 1 printed the same lines (1)",
    ]
    assert list(differences(LOSSES, 0, 2, re.compile("loss"))) == ["m: ranks 0 and 2 printed the same lines (2)"]
    sessions = list(differences([LOSSES[2], of_ranks("2 loss 2", 1, session="b")], 0, 1))
    assert [line for line in sessions if line.startswith("---")] == [
        "--- m rank 0 of session a",
        "--- m rank 0 of session b",
    ]


def test_logs_compares_two_ranks_that_exist(monkeypatch: pytest.MonkeyPatch, run: CliRunner) -> None:
    monkeypatch.setattr(logs, "find_job", lambda *_: job_with(Gateway(a=5), TRAINERS))
    shown = run.invoke(app, ["logs", "--rank", "0", "--diff", "1", "--grep", "t[12]"])
    assert shown.stdout.splitlines()[2:] == ["@@ -1 +1 @@", "-t2", "+t1"]
    assert run.invoke(app, ["logs", "--rank", "0", "--diff", "9"]).exit_code == 1
    assert run.invoke(app, ["logs", "--rank", "9", "--diff", "0"]).exit_code == 1
    for wrong in (["--diff", "1"], ["--rank", "1", "--diff", "1"], ["--rank", "0", "--diff", "1", "-f"]):
        refused = run.invoke(app, ["logs", *wrong])
        assert refused.exit_code == 2
        assert "needs another rank in --rank" in " ".join(refused.output.split())


def test_a_directory_gets_a_file_for_each_rank_of_each_session(
    monkeypatch: pytest.MonkeyPatch, run: CliRunner, tmp_path: Path
) -> None:
    monkeypatch.setattr(logs, "find_job", lambda *_: job_with(Gateway(a=3, b=1)))
    result = run.invoke(app, ["logs", "--log-dir", str(tmp_path / "logs")])
    assert (result.exit_code, result.stdout.count("t1")) == (0, 2)
    files = {str(path.relative_to(tmp_path / "logs")): path.read_text() for path in tmp_path.rglob("*.log")}
    assert files == {"a/m/1.log": "t1\nt3\n", "a/m/0.log": "t2\n", "b/m/1.log": "t1\n"}
    again = run.invoke(app, ["logs", "--log-dir", str(tmp_path / "logs")])
    assert (again.exit_code, "name a new directory" in " ".join(again.stderr.split())) == (2, True)


def test_a_directory_that_cannot_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch, run: CliRunner) -> None:
    monkeypatch.setattr(logs, "find_job", lambda *_: job_with(Gateway(a=3)))
    result = run.invoke(app, ["logs", "--log-dir", "x" * 300])
    assert (result.exit_code, "cannot write what ranks print to" in result.stderr) == (1, True)


def test_with_a_rank_a_directory_gets_the_lines_of_that_rank(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    both = LogLine(session="a", **printed(1).model_copy(update={"ranks": (0, 1), "count": 2}).model_dump())
    show(iter([both]), 0, files=SessionFiles(tmp_path), as_json=False)
    assert [path.name for path in tmp_path.rglob("*.log")] == ["0.log"]
    assert capsys.readouterr().out == "[h m 2 ranks] t1\n"


def job_with(gateway: Gateway, *meshes: MeshStatus, problem: str = "") -> Any:
    session = SessionStatus(session="a", owner="o", connected=True, pid=1, meshes=meshes, problem=problem)
    status = JobStatus(gateway_version="1", python="3.11", meshes={"workers": 1}, sessions=(session,))
    return SimpleNamespace(status=lambda: status, _output=gateway.read)


TRAINERS = MeshStatus(kind="actors", name="trainers", sizes={"hosts": 2, "gpus": 2})
LOADER = MeshStatus(kind="actors", name="loader", sizes={})


@pytest.mark.parametrize(
    ("rank", "meshes", "problem", "text"),
    [
        (99, (TRAINERS, LOADER), "", "no process of this job has rank 99: trainers has ranks 0-3, loader has rank 0"),
        (4, (TRAINERS,), "", "no process of this job has rank 4: trainers has ranks 0-3"),
        (3, (TRAINERS,), "", ""),  # it has not printed yet
        (99, (), "", "no process of this job has rank 99: it has none"),
        (99, (), "the engine did not answer", ""),
        (1, (), "", ""),  # printed by processes that are gone
    ],
)
def test_a_rank_that_does_not_exist_is_an_error_that_names_the_ranks(
    monkeypatch: pytest.MonkeyPatch, run: CliRunner, rank: int, meshes: Any, problem: str, text: str
) -> None:
    monkeypatch.setattr(logs, "find_job", lambda *_: job_with(Gateway(a=3), *meshes, problem=problem))
    result = run.invoke(app, ["logs", "--rank", str(rank)])
    assert result.exit_code == (1 if text else 0)
    assert result.stderr == (f"meshgate: {text}\n" if text else "")


def test_following_a_rank_that_does_not_exist_says_so_and_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, run: CliRunner
) -> None:
    def follow(*_: object) -> Iterator[LogLine]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(logs, "find_job", lambda *_: job_with(Gateway(a=0), TRAINERS))
    monkeypatch.setattr(logs, "follow_output", follow)
    result = run.invoke(app, ["logs", "-f", "--rank", "4"])
    assert result.exit_code == 130
    assert result.stderr == "meshgate: no process of this job has rank 4: trainers has ranks 0-3 so far\n"


def test_a_bar_that_the_encoding_of_stdout_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    bar = printed(1).model_copy(update={"text": "50%|█", "end": "\r"})
    show(iter([LogLine(session="a", **bar.model_dump())]), None, as_json=False)
    assert written.getvalue() == b"[h m rank 1] 50%|\\u2588\n"
