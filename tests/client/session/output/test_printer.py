from __future__ import annotations

import contextvars
import io
import sys
import threading
from typing import Any

import pytest

from meshgate.session.output.printer import OutputPrinter, kind_of
from meshgate_wire.messages import OutputLine


def line(text: str, *ranks: int, **fields: Any) -> OutputLine:
    fields = {"stream": "stdout", "mesh": "trainers", "count": max(len(ranks), 1), **fields}
    return OutputLine(text=text, ranks=ranks, **fields)


def test_stdout_and_stderr_stay_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    printer = OutputPrinter()
    printed = threading.Event()
    printer.put([line("a", 0), line("a", 1), line("oops", 0, stream="stderr")], printed.set)
    printer.close(timeout=10)
    assert printed.is_set()
    assert out.getvalue() == "[trainers 2 ranks] a\n"
    assert err.getvalue() == "[trainers rank 0] oops\n"


def test_the_current_streams_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [io.StringIO(), io.StringIO()]
    printer = OutputPrinter()
    for cell in cells:
        monkeypatch.setattr(sys, "stdout", cell)
        printed = threading.Event()
        printer.put([line("a", 0)], printed.set)
        assert printed.wait(10)
    printer.close(timeout=10)
    assert [cell.getvalue() for cell in cells] == ["[trainers rank 0] a\n"] * 2


def test_a_closed_terminal_ends_only_the_printing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    printer = OutputPrinter()
    credited = [threading.Event(), threading.Event()]
    for event in credited:
        printer.put([line("a", 0)], event.set)
    printer.close(timeout=10)
    assert all(event.is_set() for event in credited)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_a_stream_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert kind_of(Terminal()) == "terminal"
    assert kind_of(io.StringIO()) == "file"
    monkeypatch.setenv("TERM", "dumb")
    assert kind_of(Terminal()) == "file"
    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    assert kind_of(notebook) == "notebook"


def test_one_terminal_shows_both_streams_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    printer = OutputPrinter()
    printer.put([line("10%", 0, stream="stderr", end="\r"), line("a", 1)], lambda: None)
    printer.close(timeout=10)
    assert out.getvalue().startswith("[trainers rank 1] a\n\n[trainers rank 0] 10%")
    assert err.getvalue() == ""


def test_output_is_printed_in_the_context_of_the_last_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = contextvars.ContextVar("cell", default="none")
    seen: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            seen.append(cell.get())
            return len(text)

    monkeypatch.setattr(sys, "stdout", Stream())
    printer = OutputPrinter()
    for name in ("first", "second"):
        cell.set(name)
        printer.follow_caller()
        printed = threading.Event()
        printer.put([line("a", 0)], printed.set)
        assert printed.wait(10)
    printer.close(timeout=10)
    assert seen[0] == "first"
    assert seen[1] == "second"
