from __future__ import annotations

import gc

import pytest

import meshgate as kt
from meshgate.session import detached as module
from meshgate.session.detached import ReadMarks, Takeover, current_tag
from meshgate.session.futures import FutureProxy
from meshgate.session.objects import ObjectTable
from meshgate_wire.messages import (
    Argument,
    Attached,
    AttachHosts,
    KeptCall,
    KeptCalls,
    MeshRef,
    OpenChannel,
    Read,
    SpawnActors,
    SpawnProcs,
    Stop,
)


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


def test_objects_are_known_at_once_and_numbers_continue() -> None:
    objects = ObjectTable()
    takeover = Takeover(objects, {"workers": 2})
    takeover.add(AttachHosts(object=1, mesh="workers"))
    takeover.add(SpawnProcs(object=2, hosts=MeshRef(object=1), per_host={"gpus": 2}, name="procs"))
    port = Argument(kind="port", ref=MeshRef(object=3))
    takeover.add(OpenChannel(object=3, name="numbers"))
    takeover.add(
        SpawnActors(object=4, procs=MeshRef(object=2), name="actors", class_name="a.B", kind="sync", arguments=(port,))
    )
    hosts = objects.get(1)
    assert hosts is not None
    assert hosts.expected_hosts == 2
    assert objects.derives_from(4, 1)
    assert objects.derives_from(4, 3)
    takeover.add(Stop(call=9, target=MeshRef(object=2), reason="enough"))
    takeover.add(Stop(call=9, target=MeshRef(object=77)))
    assert objects.failure_of(4) is not None
    assert objects.failure_of(1) is None
    takeover.add(
        KeptCalls(calls=(KeptCall(call=1, target=MeshRef(object=4), endpoint="e", adverb="call", age=1, state="read"),))
    )
    assert not takeover.complete.done()
    takeover.add(Attached(name="train", takeovers=1, next_object=10, next_call=20))
    assert takeover.complete.get(0).next_call == 20
    assert objects.create("port", "", "step").number == 10
    assert [header.object for header in takeover.created] == [1, 2, 3, 4]
    assert [call.call for call in takeover.calls] == [1]


def test_the_innermost_block_counts() -> None:
    assert current_tag() == ""
    with kt.tag("outer"):
        with kt.tag("inner"):
            assert current_tag() == "inner"
        assert current_tag() == "outer"
    assert current_tag() == ""


@pytest.mark.parametrize(
    ("text", "error"), [(1, TypeError), ("", ValueError), ("x" * 257, ValueError), ("\udcff", ValueError)]
)
def test_an_invalid_tag_is_refused_before_the_block(text: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="a tag must be"), kt.tag(text):  # type: ignore[arg-type]
        raise AssertionError("the block ran")
