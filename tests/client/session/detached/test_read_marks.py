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
    for future in delivered(marks, 7, 8):
        future.get()
    marks.printed(12)
    marks.fault_reported(3)
    assert len(due) == 1
    assert marks.take() == Read(calls=(1, 2), ports={4: 8}, output=12, faults=3)
    assert marks.take() is None
    marks.printed(13)
    assert len(due) == 2
    assert marks.take() == Read(output=13)


def delivered(marks: ReadMarks, *numbers: int) -> list[FutureProxy[int]]:
    """The futures of messages that have arrived on channel 4."""
    futures: list[FutureProxy[int]] = []
    for number in numbers:
        futures.append(FutureProxy())
        marks.message_arrived(4, number)
        marks.watch_message(4, number, futures[-1])
        futures[-1].settle(lambda: 1)
    return futures


def test_a_message_is_read_once_the_program_has_it_and_not_when_it_arrives(marks: ReadMarks, due: list[int]) -> None:
    (future,) = delivered(marks, 7)
    assert future.done()
    assert not due
    future.get()
    assert marks.take() == Read(ports={4: 7})
    future.get()
    del future
    assert len(due) == 1


def test_a_message_is_not_marked_while_one_before_it_is_unread(marks: ReadMarks) -> None:
    first, second, third = delivered(marks, 7, 8, 9)
    second.get()
    assert marks.take() is None
    first.get()
    assert marks.take() == Read(ports={4: 8})
    third.get()
    assert marks.take() == Read(ports={4: 9})


def test_a_message_whose_future_the_program_drops_is_not_read(marks: ReadMarks) -> None:
    futures = delivered(marks, 7, 8)
    futures.pop(0).get()
    del futures
    gc.collect()
    assert marks.take() == Read(ports={4: 7})


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
