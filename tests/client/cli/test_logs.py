"""``meshgate logs``."""

from __future__ import annotations

import io
import itertools
import json
import sys

import pytest

from meshgate.cli import logs
from meshgate.cli.logs import LogLine, follow_lines, printed_lines, show
from meshgate_wire.status import OutputPage, PrintedLine, SessionOutput


class Gateway:
    """Keeps lines, and gives out at most two of a session at a time."""

    def __init__(self, **sessions: int) -> None:
        self.counts = sessions

    def read(self, after: dict[str, int]) -> OutputPage:
        return OutputPage(sessions=tuple(self._session(name, after.get(name, 0)) for name in self.counts))

    _output = read

    def _session(self, name: str, after: int) -> SessionOutput:
        numbers = range(after + 1, min(after + 2, self.counts[name]) + 1)
        return SessionOutput(session=name, lines=tuple(map(printed, numbers)), last=self.counts[name])


def printed(number: int) -> PrintedLine:
    return PrintedLine(
        number=number, stream="stdout", mesh="m", ranks=(number % 2,), count=1, host="h", text=f"t{number}", end="\n"
    )


def numbers(lines: object) -> list[tuple[str, int]]:
    return [(line.session, line.number) for line in lines]  # type: ignore[attr-defined]


def test_all_lines_come_once_and_in_order() -> None:
    found = numbers(printed_lines(Gateway(a=5, b=1).read, None))
    assert [number for session, number in found if session == "a"] == [1, 2, 3, 4, 5]
    assert [number for session, number in found if session == "b"] == [1]


def test_the_tail_is_of_each_session() -> None:
    assert sorted(numbers(printed_lines(Gateway(a=5, b=1).read, 2))) == [("a", 4), ("a", 5), ("b", 1)]


def test_following_yields_lines_printed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway(a=1)
    monkeypatch.setattr(logs.time, "sleep", lambda seconds: gateway.counts.update(a=gateway.counts["a"] + 1))
    lines = follow_lines(gateway, None)  # type: ignore[arg-type]
    assert numbers(itertools.islice(lines, 3)) == [("a", 1), ("a", 2), ("a", 3)]


def test_lines_are_labelled_or_json_and_filtered_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    show(printed_lines(Gateway(a=3).read, None), 1, as_json=False)
    assert capsys.readouterr().out == "[h m rank 1] t1\n[h m rank 1] t3\n"
    show(printed_lines(Gateway(a=1).read, None), None, as_json=True)
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["session"], line["number"], line["text"]) == ("a", 1, "t1")


def test_a_bar_that_the_encoding_of_stdout_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    bar = printed(1).model_copy(update={"text": "50%|█", "end": "\r"})
    show(iter([LogLine(session="a", **bar.model_dump())]), None, as_json=False)
    assert written.getvalue() == b"[h m rank 1] 50%|\\u2588\n"
