"""Reads what the actors of a job's sessions print, as the gateway keeps it, and says what of it is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from meshgate_wire.status import OutputPage, PrintedLine, SessionOutput

Printed: TypeAlias = "tuple[str, PrintedLine | str]"
"""A session, and a line of it or what to tell the user about its lines."""


class OutputReader:
    """``read(seen)`` returns what each session printed after the line numbered ``seen[session]``.

    Of the sessions that the first page has, only the ``tail`` latest lines are wanted, and those that are at most
    ``since`` seconds old by the clock of the gateway.
    """

    def __init__(
        self, read: Callable[[dict[str, int]], OutputPage], tail: int | None = None, since: float = math.inf
    ) -> None:
        self._read, self._tail, self._since = read, tail, since
        self._seen: dict[str, int] = {}
        self._starting: set[str] | None = None  # sessions of the first page whose engines have not answered yet
        self._oldest: dict[str, float] = {}  # the time of the first line that is wanted
        self._unread: dict[str, int] = {}  # how many lines each session has after those of the last page
        self._silent: set[str] = set()  # sessions whose engines have not answered the last request
        self._lost = False

    @property
    def complete(self) -> bool:
        """Whether no line was missed after the first that was read, and all engines have answered."""
        return not self._lost and not self._silent

    def fresh(self, pages: float = math.inf) -> Iterator[Printed]:
        """What is new, at most so many ``pages``."""
        more = True
        while more and pages > 0:
            page = self._read(self._seen)
            if self._starting is None:
                self._starting = {each.session for each in page.sessions}
            for session in self._unread.keys() - {each.session for each in page.sessions}:
                if unread := self._unread.pop(session):
                    yield session, self._missing(unread, "the session ended before they were read")
            for each in page.sessions:
                yield from self._take(each, self._starting)
            more, pages = any(each.lines for each in page.sessions), pages - 1

    def _take(self, output: SessionOutput, starting: set[str]) -> Iterator[Printed]:
        session = output.session
        if output.problem:
            if session not in self._silent:
                self._silent.add(session)
                yield session, output.problem
            return
        self._silent.discard(session)
        starts_here = session in starting
        starting.discard(session)
        if starts_here:
            self._oldest[session] = output.now - self._since
            if self._tail is not None:
                self._seen[session] = max(output.dropped, output.last - self._tail)
                self._unread[session] = output.last - self._seen[session]
                return  # the next page has them
        if output.dropped and session in self._unread:
            yield session, self._missing(output.dropped, "the gateway no longer kept them when they were read")
        elif output.dropped and self._since == math.inf:
            yield session, f"{output.dropped:,} older lines are no longer kept"
        self._unread[session] = output.last - (output.lines[-1].number if output.lines else output.last)
        for line in output.lines:
            self._seen[session] = line.number
            if line.time >= self._oldest.get(session, -math.inf):
                yield session, line

    def _missing(self, count: int, reason: str) -> str:
        self._lost = True
        return f"{'1 line is' if count == 1 else f'{count:,} lines are'} missing here, because {reason}"
