"""What is read of a job's output, and which lines of it are missing."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate.jobs.output import OutputReader, Printed
from meshgate_wire.status import OutputPage, PrintedLine, SessionOutput


def printed(number: int) -> PrintedLine:
    """A line that came 10 s after the one before it."""
    return PrintedLine(
        number=number,
        time=10.0 * number,
        stream="stdout",
        mesh="m",
        ranks=(number % 2,),
        count=1,
        host="h",
        text=f"t{number}",
        end="\n",
    )


def page_of(*lines: int, last: int, **facts: Any) -> SessionOutput:
    return SessionOutput(session="abcdef0123", now=100.0, lines=tuple(map(printed, lines)), last=last, **facts)


class Pages:
    """Gives out pages of one session, None without it, one after the other; the last one, without lines, again and
    again."""

    def __init__(self, *pages: SessionOutput | None) -> None:
        self.pages, self.again = list(pages), pages[-1]

    def read(self, after: dict[str, int]) -> OutputPage:
        if self.pages:
            page = self.pages.pop(0)
        else:
            page = self.again and self.again.model_copy(update={"lines": (), "dropped": 0})
        return OutputPage(sessions=() if page is None else (page,))


def texts(output: list[Printed]) -> list[str]:
    return [each if isinstance(each, str) else each.text for _, each in output]


SILENT = page_of(last=0, problem="it did not answer")
NOT_KEPT = "the gateway no longer kept them when they were read"
UNREAD = "the session ended before they were read"


@pytest.mark.parametrize(
    ("pages", "expected", "complete"),
    [
        ([page_of(8, 9, last=9, dropped=1007)], ["1,007 older lines are no longer kept", "t8", "t9"], True),
        (
            [page_of(8, last=9), page_of(12, last=12, dropped=3)],
            ["t8", f"3 lines are missing here, because {NOT_KEPT}", "t12"],
            False,
        ),
        ([page_of(8, last=9), None], ["t8", f"1 line is missing here, because {UNREAD}"], False),
        ([page_of(8, 9, last=9), None], ["t8", "t9"], True),
        ([SILENT], ["it did not answer"], False),
        ([page_of(8, last=9), SILENT], ["t8", "it did not answer"], False),
    ],
)
def test_what_is_missing_is_reported_in_its_place(pages: list[Any], expected: list[str], complete: bool) -> None:
    reader = OutputReader(Pages(*pages).read)
    assert texts(list(reader.fresh())) == expected
    assert reader.complete == complete


def test_lines_from_before_the_first_wanted_one_are_not_missing() -> None:
    pages = [page_of(8, 9, last=9, dropped=7), page_of(9, last=9)]
    assert texts(list(OutputReader(Pages(*pages).read, tail=1).fresh())) == ["t9"]
    assert texts(list(OutputReader(Pages(pages[0]).read, since=15.0).fresh())) == ["t9"]


def test_an_engine_that_answers_late_is_named_once_and_its_last_lines_follow() -> None:
    reader = OutputReader(Pages(SILENT, SILENT, page_of(6, last=9), page_of(8, 9, last=9)).read, tail=2)
    assert [texts(list(reader.fresh())) for _ in range(2)] == [["it did not answer"], []]
    assert not reader.complete
    assert texts(list(reader.fresh())) == ["t8", "t9"]
    assert reader.complete


def test_what_was_printed_between_two_looks_is_read_at_most_so_many_pages_at_a_time() -> None:
    reader = OutputReader(Pages(*(page_of(number, last=5) for number in range(1, 6))).read)
    assert [texts(list(reader.fresh(2))) for _ in range(4)] == [["t1", "t2"], ["t3", "t4"], ["t5"], []]
