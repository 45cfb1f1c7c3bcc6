from __future__ import annotations

import gc

import pytest

from meshgate.session.detached import read_marks as module
from meshgate.session.detached.read_marks import ReadMarks
from meshgate.session.futures import FutureProxy
from meshgate_wire.messages import Read


@pytest.fixture
def due() -> list[int]:
    return []


@pytest.fixture
def marks(due: list[int]) -> ReadMarks:
    return ReadMarks(lambda: due.append(1))


def test_one_message_is_due_for_many_marks(marks: ReadMarks, due: list[int]) -> None:
    marks.call_read(1)
    marks.call_read(2)
    marks.port_taken(4, 7)
    marks.port_taken(4, 8)
    marks.printed(12)
    marks.fault_reported(3)
    assert len(due) == 1
    assert marks.take() == Read(calls=(1, 2), ports={4: 8}, output=12, faults=3)
    assert marks.take() is None
    marks.printed(13)
    assert len(due) == 2
    assert marks.take() == Read(output=13)


def test_a_call_is_read_once_all_its_futures_are(marks: ReadMarks) -> None:
    futures: list[FutureProxy[int]] = [FutureProxy(), FutureProxy()]
    marks.watch_call(5, futures)
    futures[0].settle(lambda: 1)
    futures[0].get()
    futures[0].get()
    assert marks.take() is None
    futures[1].fail(ValueError("no"))
    assert isinstance(futures[1].exception(), ValueError)
    assert marks.take() == Read(calls=(5,))


def test_a_call_that_the_program_drops_is_released(marks: ReadMarks) -> None:
    future: FutureProxy[int] = FutureProxy()
    marks.watch_call(5, (future,))
    del future
    gc.collect()
    assert marks.take() == Read(released=(5,))


def test_many_marks_go_in_several_messages(marks: ReadMarks, due: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CALLS", 2)
    for number in range(3):
        marks.call_read(number)
    assert marks.take() == Read(calls=(0, 1))
    assert len(due) == 2
    assert marks.take() == Read(calls=(2,))
