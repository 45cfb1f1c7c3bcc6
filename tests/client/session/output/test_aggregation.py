from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from meshgate.session.output import aggregation
from meshgate.session.output.aggregation import Aggregator
from meshgate_wire.messages import OutputLine
from tests.waiting import wait_for

PROCS, OTHER = 7, 8


class Shown:
    def __init__(self) -> None:
        self.lines: list[OutputLine] = []
        self.aggregator = Aggregator(self.lines.extend)

    def print(self, text: str, *ranks: int, procs: int = PROCS, end: str = "\n") -> None:
        count = max(len(ranks), 1)
        line = OutputLine(stream="stdout", procs=procs, ranks=ranks, count=count, text=text, end=end)  # type: ignore[arg-type]
        self.lines.extend(self.aggregator.take([line]))

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.lines]


@pytest.fixture
def shown() -> Iterator[Shown]:
    shown = Shown()
    yield shown
    shown.aggregator.close()


def test_similar_lines_are_counted_and_shown_when_the_window_ends(shown: Shown) -> None:
    shown.aggregator.set_window(PROCS, 600)
    for step in range(3):
        shown.print(f"step {step}", 0)
        shown.print(f"step {step}", 1)
    shown.print("done", 0)
    assert shown.texts == []
    shown.aggregator.set_window(PROCS, 0.01)
    wait_for(lambda: shown.lines, "the end of the window")
    assert shown.texts == ["[6 similar log lines] step 0", "done"]
    assert (shown.lines[0].ranks, shown.lines[0].count) == ((0, 1), 2)
    shown.lines.clear()
    shown.print("again", 0)
    wait_for(lambda: shown.lines, "the end of the next window")
    assert shown.texts == ["again"]


def test_lines_of_other_meshes_and_progress_bars_are_shown_at_once(shown: Shown) -> None:
    shown.aggregator.set_window(PROCS, 60)
    shown.print("other", procs=OTHER)
    shown.print("10 %", end="\r")
    assert shown.texts == ["other", "10 %"]


def test_what_is_held_is_shown_when_aggregation_ends(shown: Shown) -> None:
    shown.aggregator.set_window(PROCS, 60)
    shown.print("a", 0, 1)
    shown.print("a", 0, 1)
    shown.aggregator.set_window(PROCS, None)
    shown.print("b", 0)
    assert shown.texts == ["[4 similar log lines] a", "b"]


def test_a_window_can_be_shortened(shown: Shown) -> None:
    shown.aggregator.set_window(PROCS, 60)
    shown.print("a", 0)
    shown.aggregator.set_window(PROCS, 0.01)
    wait_for(lambda: shown.lines, "the end of the shorter window")
    assert shown.texts == ["a"]


def test_a_mesh_that_prints_many_different_lines_does_not_fill_memory(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregation, "MAX_HELD", 2)
    shown.aggregator.set_window(PROCS, 60)
    for text in "abc":
        shown.print(text)
    assert shown.texts == ["a", "b", "c"]


def test_what_is_held_is_shown_at_the_end(shown: Shown) -> None:
    shown.aggregator.set_window(PROCS, 60)
    shown.print("last")
    shown.aggregator.close()
    assert shown.texts == ["last"]


def test_a_signal_handler_may_interrupt_it() -> None:
    """What shows the lines stands for the handler: it runs while the lines are held."""
    shown: list[str] = []

    def show(lines: Sequence[OutputLine]) -> None:
        shown.extend(line.text for line in lines)
        aggregator.set_window(OTHER, 1000)
        shown.extend(line.text for line in aggregator.take([line_of("in a handler")]))
        aggregator.close()

    def line_of(text: str) -> OutputLine:
        return OutputLine(stream="stdout", procs=PROCS, ranks=(0,), count=1, text=text, end="\n")

    aggregator = Aggregator(show)
    aggregator.set_window(PROCS, 1000)
    aggregator.take([line_of("before")])
    ending = threading.Thread(target=aggregator.set_window, args=(PROCS, None), daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive()
    assert shown == ["before", "in a handler"]
