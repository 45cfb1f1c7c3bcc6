"""Turns the reports of the ranks of a failed run into one error. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshgate.errors import SPMDFailed, ranks_text

TAIL_LINES = 30
TRACEBACK = re.compile(r"^Traceback \(most recent call last\):$", re.MULTILINE)
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)  # torch puts it before lines of a traceback
CONSEQUENCE = re.compile(r"connection (closed|reset|refused)|broken pipe|remote process exited", re.IGNORECASE)
EXCEPTION_LINE = re.compile(r"^[A-Za-z_][\w.]*(: .*)?$")


@dataclass(frozen=True, slots=True)
class RankReport:
    """How the script of a rank ended. ``code`` is None if it was never started; ``stopped``: another rank, or the
    laptop, ended it."""

    rank: int
    host: str
    code: int | None
    stopped: bool
    tail: str
    error: str
    logs: str

    @property
    def failed(self) -> bool:
        """Whether the script failed by itself."""
        return not self.stopped and self.code != 0

    @property
    def exception(self) -> str:
        """The line that names the exception, or ""."""
        return self.error.strip().partition("\n")[0] or exception_of(self.tail)


def failure_of(reports: Sequence[RankReport]) -> SPMDFailed | None:
    """The error of a run, of which ``reports`` arrived in this order; None if every rank succeeded."""
    bad = [report for report in reports if report.code != 0]
    if not bad:
        return None
    first = min(bad, key=_precedence)  # the first to arrive among equals
    exception = first.exception
    tail = "\n".join(first.tail.rstrip().splitlines()[-TAIL_LINES:])
    parts = [f"rank {first.rank} on {first.host} {_ending(first.code)}{f': {exception}' if exception else ''}"]
    if others := _others(reports, first):
        parts.append(others)
    if first.logs:
        parts.append(f"log files on {first.host}: {first.logs}")
    message = ". ".join(parts)
    return SPMDFailed(
        f"{message}. Last output of rank {first.rank}:\n{tail}" if tail else message,
        rank=first.rank,
        host=first.host,
        exit_code=first.code,
        exception=exception,
        log_tail=tail,
        exit_codes={report.rank: report.code for report in reports},
    )


def _precedence(report: RankReport) -> int:
    """Ranks that only lost the connection to another one are not the cause. The cause may be ended by their failure
    while it is still exiting."""
    is_consequence = CONSEQUENCE.search(report.exception) is not None
    if report.failed and not is_consequence:
        return 0
    if report.exception and not is_consequence:
        return 1
    return 2 if report.failed else 3


def exception_of(output: str) -> str:
    """The last line of the last traceback in ``output``, which names the exception, or ""."""
    output = RANK_PREFIX.sub("", output)
    headers = list(TRACEBACK.finditer(output))
    if not headers:
        return ""
    for line in output[headers[-1].end() :].splitlines():
        if EXCEPTION_LINE.match(line):
            return line
    return ""


def _ending(code: int | None) -> str:
    if code is None:
        return "was not started"
    if code >= 0:
        return f"failed with exit code {code}"
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL, which is how the kernel ends a process if the host or job is out of memory"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _others(reports: Sequence[RankReport], first: RankReport) -> str:
    others = [report for report in reports if report.rank != first.rank]  # the first may have been stopped as it ended
    groups: Mapping[str, list[int]] = {
        "failed too": [report.rank for report in others if report.failed],
        "ended by this failure": [report.rank for report in others if report.stopped and report.code != 0],
    }
    return "; ".join(f"{ranks_text(ranks)} {what}" for what, ranks in groups.items() if ranks)
