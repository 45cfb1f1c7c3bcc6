"""Waits for the workers of a submitted job, and shows what it waits for on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from typing_extensions import Self

from meshgate.errors import JobStartFailed
from meshgate.progress import Block, progress_mode
from meshgate_slurm.messages import JobReport

FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0
GATEWAY_TIMEOUT = 60.0  # seconds for which a gateway that does not answer is asked again
INTERRUPT_WINDOW = 3.0  # seconds in which a second Ctrl-C cancels the job


class Progress(Protocol):
    """Shows one text at a time, as a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, text: str) -> None: ...


class Silent(Block):
    def show(self, text: str) -> None:
        return None


class Plain(Silent):
    """Prints each text once, until another follows."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._last = stream, ""

    def show(self, text: str) -> None:
        if text != self._last:
            self._last = text
            self._stream.write(f"{text}\n")
            self._stream.flush()


class Live(Silent):
    """One line on a terminal, with the time that has passed."""

    def __init__(self, console: Console) -> None:
        self._status = console.status("")
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def show(self, text: str) -> None:
        self._status.update(f"{text}  {time.monotonic() - self._started:.0f} s")


def choose_progress(stream: TextIO | None = None) -> Progress:
    stream = stream or sys.stderr
    match progress_mode(stream):
        case "off":
            return Silent()
        case "plain":
            return Plain(stream)
        case "live":
            return Live(Console(file=stream))


def describe(report: JobReport) -> str:
    """``Slurm job 12 is PENDING (Resources: waits for nodes to become free); expected to start at 14:05``."""
    text = f"Slurm job {report.job_id} is {report.state}"
    if report.why:
        text += f" ({report.why})"
    if report.expected_start is not None and report.expected_start > time.time():
        text += f"; expected to start at {_clock(report.expected_start)}"
    if not report.pending and not report.ended:
        text += f", {report.registered} of {report.nodes} workers are connected"
    return text


def wait_for_workers(
    ask: Callable[[], JobReport], progress: Progress, timeout: float | None, interval: float = 2.0
) -> JobReport:
    """Waits until every worker has connected. ``ask`` asks for the job, and raises OSError; at the latest every
    ``interval`` seconds while it is in the queue.

    Raises JobStartFailed if the job ends or its workers cannot start, or if that takes longer than ``timeout`` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    delay = FIRST_DELAY
    while True:
        report = _ask(ask)
        if report.registered < report.nodes or delay != FIRST_DELAY:  # says nothing if there is nothing to wait for
            progress.show(describe(report))
        if report.failed is not None or report.ended:
            raise JobStartFailed(report.failed or f"Slurm job {report.job_id} has ended: {report.why}")
        if report.registered == report.nodes:
            return report
        if deadline is not None and time.monotonic() > deadline:
            raise JobStartFailed(f"{describe(report)}, after {timeout:g} s (job_start_timeout)")
        time.sleep(delay)  # between two questions
        delay = min(1.5 * delay, interval if report.pending else interval / 8)


def _ask(ask: Callable[[], JobReport]) -> JobReport:
    """Asks again for a while after errors: the connection to the login node may have been cut."""
    deadline = time.monotonic() + GATEWAY_TIMEOUT
    delay = FIRST_DELAY
    while True:
        try:
            return ask()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(delay)
        delay = min(2 * delay, LONGEST_DELAY)


def _clock(when: float) -> str:
    local = time.localtime(when)
    return time.strftime("%H:%M" if when - time.time() < 12 * 3600 else "%a %d %b, %H:%M", local)


def second_interrupt(job_id: int, seconds: float = INTERRUPT_WINDOW) -> bool:
    """Says what becomes of the job, and returns whether another Ctrl-C follows."""
    try:
        sys.stderr.write(
            f"\nSlurm job {job_id} stays in the queue, and state() waits for it again. Ctrl-C within {seconds:g} s "
            "cancels it\n"
        )
        sys.stderr.flush()
        threading.Event().wait(seconds)
    except KeyboardInterrupt:
        return True
    return False
