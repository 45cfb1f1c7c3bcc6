from __future__ import annotations

import contextvars
import errno
import io
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from meshgate.session.output import printer as printer_module
from meshgate.session.output.log_files import LogFiles
from meshgate.session.output.printer import OutputPrinter, kind_of
from meshgate_wire.messages import OutputLine
from tests.waiting import DEADLINE


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
    printer.close(timeout=DEADLINE)
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
        assert printed.wait(DEADLINE)
    printer.close(timeout=DEADLINE)
    assert [cell.getvalue() for cell in cells] == ["[trainers rank 0] a\n"] * 2


def encoded(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")


def written(stream: io.TextIOWrapper) -> bytes:
    return stream.buffer.getvalue()  # type: ignore[attr-defined, no-any-return]


def show(printer: OutputPrinter, *lines: OutputLine) -> None:
    """Returns once the lines are printed."""
    printed = threading.Event()
    printer.put(lines, printed.set)
    assert printed.wait(DEADLINE)


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"caf\\xe9 \\u2713"), ("latin-1", b"caf\xe9 \\u2713")])
def test_a_character_that_the_stream_cannot_encode_is_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str, shown: bytes
) -> None:
    out = encoded(encoding)
    monkeypatch.setattr(sys, "stdout", out)
    printer = OutputPrinter()
    show(printer, line("café \N{CHECK MARK}", 0))
    show(printer, line("next", 0))
    printer.close(timeout=DEADLINE)
    assert written(out) == b"[trainers rank 0] " + shown + b"\n[trainers rank 0] next\n"


def test_lines_for_a_closed_stream_are_missed_only_until_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    restored, closed, err = io.StringIO(), io.StringIO(), io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "stderr", err)
    printer = OutputPrinter()
    show(printer, line("lost", 0), line("for stderr", 0, stream="stderr"))
    show(printer, line("lost too", 0))
    monkeypatch.setattr(sys, "stdout", restored)
    show(printer, line("a", 0))
    show(printer, line("b", 0))
    printer.close(timeout=DEADLINE)
    notice, *lines = restored.getvalue().splitlines()
    assert notice.startswith("[meshgate] 2 lines are missing here, because writing failed: I/O operation on closed")
    assert lines == ["[trainers rank 0] a", "[trainers rank 0] b"]
    assert err.getvalue() == "[trainers rank 0] for stderr\n"


def test_a_full_disk_loses_lines_only_while_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk(io.StringIO):
        full = True

        def flush(self) -> None:
            if self.full:
                self.truncate(0)
                self.seek(0)
                raise OSError(errno.ENOSPC, "No space left on device")

    out = Disk()
    monkeypatch.setattr(sys, "stdout", out)
    printer = OutputPrinter()
    show(printer, line("lost", 0))
    out.full = False
    show(printer, line("a", 0))
    printer.close(timeout=DEADLINE)
    missing = "[meshgate] 1 line is missing here, because writing failed: [Errno 28] No space left on device\n"
    assert out.getvalue() == f"{missing}[trainers rank 0] a\n"


def test_a_stream_that_is_gone_when_the_program_ends_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    printer = OutputPrinter()
    show(printer, line("10%", 0, end="\r"))
    out.close()
    printer.close(timeout=DEADLINE)
    assert not caplog.records


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
    printer.close(timeout=DEADLINE)
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
        assert printed.wait(DEADLINE)
    printer.close(timeout=DEADLINE)
    assert seen[0] == "first"
    assert seen[1] == "second"


def test_a_bar_on_a_terminal_rewrites_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    controller, terminal = os.openpty()
    with os.fdopen(controller, "rb", 0) as shown, os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        printer = OutputPrinter()
        for percent in range(10, 40, 10):
            show(printer, line(f"{percent}%", 0, end="\r", stream="stderr"))
        printer.close(timeout=DEADLINE)
        text = b""
        while b"30%" not in text or not text.endswith(b"\n"):
            text += shown.read(4096)
    rows = [b"\r\n[trainers rank 0] %d%%\r\x1b[1A" % percent for percent in (10, 20, 30)]
    assert text == b"\r\x1b[J".join(rows) + b"\x1b[1B\r\n"


class Slow(io.StringIO):
    """Writes when ``open`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()

    def write(self, text: str) -> int:
        assert self.open.wait(30)
        return super().write(text)


def test_a_reader_waits_until_what_arrived_before_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printer_module, "PRINT_TIMEOUT", 30)
    out = Slow()
    monkeypatch.setattr(sys, "stdout", out)
    printer = OutputPrinter()
    assert printer.unprinted() is None
    printer.put([line("a", 0)], lambda: None)
    wait = printer.unprinted()
    assert wait is not None
    out.open.set()
    wait()
    assert out.getvalue() == "[trainers rank 0] a\n"
    assert printer.unprinted() is None
    printer.close(timeout=DEADLINE)


def test_no_reader_waits_for_a_stopped_terminal_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printer_module, "PRINT_TIMEOUT", 0.001)
    out = Slow()
    monkeypatch.setattr(sys, "stdout", out)
    printer = OutputPrinter()
    printer.put([line("a", 0)], lambda: None)
    first, second = printer.unprinted(), printer.unprinted()
    assert first is not None
    assert second is not None
    first()
    monkeypatch.setattr(printer_module, "PRINT_TIMEOUT", 10_000)
    second()
    assert printer.unprinted() is None
    out.open.set()
    show(printer, line("b", 0))  # it has caught up
    out.open.clear()
    printer.put([line("c", 0)], lambda: None)
    assert printer.unprinted() is not None
    out.open.set()
    printer.close(timeout=DEADLINE)


def test_batches_of_several_threads_are_counted_and_printed_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer's thread posts lines that were aggregated, while the connection's thread posts others."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    printer = OutputPrinter()
    call, between = printer._thread.call, threading.Event()

    def call_late(function: Any) -> None:
        if threading.current_thread() is other:
            between.set()
            threading.Event().wait(0.05)  # time for a batch that overtakes this one
        call(function)

    monkeypatch.setattr(printer._thread, "call", call_late)
    monkeypatch.setattr(printer_module, "PRINT_TIMEOUT", 60)
    other = threading.Thread(target=lambda: printer.put([line("first", 0)], lambda: None))
    other.start()
    assert between.wait(DEADLINE)
    printer.put([line("second", 0)], lambda: None)
    other.join()
    wait = printer.unprinted()
    if wait is not None:
        wait()
    assert (printer.posted, printer.printed) == (2, 2)
    printer.close(timeout=DEADLINE)
    assert out.getvalue().splitlines() == ["[trainers rank 0] first", "[trainers rank 0] second"]


def test_a_line_that_comes_after_the_end_leaves_no_thread() -> None:
    """As one about a reconnection, while the client closes."""
    printer = OutputPrinter()
    printer.close(DEADLINE)
    printer.put([OutputLine(stream="stderr", mesh="meshgate", text="connected")], lambda: None)
    thread = printer._thread._thread
    assert thread is not None
    thread.join(DEADLINE)
    assert not thread.is_alive()


def test_a_stream_that_calls_actors_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printer_module, "PRINT_TIMEOUT", 10_000)
    printer = OutputPrinter()

    class Calling(io.StringIO):
        def write(self, text: str) -> int:
            wait = printer.unprinted()
            assert wait is not None
            wait()
            return super().write(text)

    out = Calling()
    monkeypatch.setattr(sys, "stdout", out)
    show(printer, line("a", 0))
    printer.close(timeout=DEADLINE)
    assert out.getvalue() == "[trainers rank 0] a\n"


def test_quiet_prints_nothing_of_the_ranks_and_writes_it_to_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    printer = OutputPrinter(LogFiles(str(tmp_path)), quiet=True)
    printed = threading.Event()
    lines = [line("a", 0), OutputLine(stream="stderr", mesh="meshgate", text="a host was lost")]
    printer.put(lines, printed.set, [*lines, line("hidden", 0)])
    printer.close(timeout=DEADLINE)
    assert printed.is_set()
    assert (out.getvalue(), err.getvalue()) == ("", "[meshgate] a host was lost\n")
    assert (tmp_path / "trainers" / "0.log").read_text() == "a\nhidden\n"


def test_files_that_cannot_be_written_are_reported_and_the_lines_are_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    (tmp_path / "trainers").write_text("in the way")
    printer = OutputPrinter(LogFiles(str(tmp_path)))
    printer.put([line("a", 0)], lambda: None, [line("a", 0)])
    printer.close(timeout=DEADLINE)
    assert out.getvalue() == "[trainers rank 0] a\n"
    assert "cannot write what ranks print" in err.getvalue()
