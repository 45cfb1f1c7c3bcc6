from __future__ import annotations

import gc

import pytest

import meshgate as kt
from meshgate.session import detached as module
from meshgate.session.detached import ReadMarks, Returns, Takeover, current_tag
from meshgate.session.futures import FutureProxy
from meshgate.session.objects import ObjectTable
from meshgate.session.pending_calls import PendingCalls, PendingStream, PendingValue
from meshgate_wire.messages import (
    Argument,
    Attached,
    AttachHosts,
    Call,
    Item,
    KeptCall,
    KeptCalls,
    MeshRef,
    OpenChannel,
    Read,
    Returned,
    SpawnActors,
    SpawnProcs,
    Stop,
    Values,
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


def test_after_an_interrupted_mark_the_next_one_is_due() -> None:
    due: list[int] = []

    def interrupted() -> None:
        due.append(1)
        if len(due) == 1:
            raise KeyboardInterrupt

    marks = ReadMarks(interrupted)
    with pytest.raises(KeyboardInterrupt):
        marks.call_read(1)
    marks.call_read(2)
    assert len(due) == 2
    assert marks.take() == Read(calls=(1, 2))


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


def test_what_the_program_reads_while_the_session_is_being_detached_is_not_sent_back() -> None:
    calls = PendingCalls()
    posted: list[Returned] = []
    completed: list[bool] = []
    returns = Returns(calls, lambda header, _: posted.append(header), completed.append)
    pending = [PendingStream(3, "actors.step", 2) for _ in range(4)]
    for call in pending:
        number = calls.add(call)
        call.header = Call(call=number, target=MeshRef(object=3), endpoint="step", adverb="stream")
    read, partly, *_ = pending
    for call, ranks in ((read, (0, 1)), (partly, (1,))):
        for at, rank in enumerate(ranks):
            returns.arrived(call, Item(call=call.number, rank=rank), ())
            call.futures()[at].settle(lambda: None)
    for future in read.futures():
        future.get(timeout=0)
    calls.pop(read.number)
    returns.keeps([3])
    returns.noted(5)
    assert [(header.reply, header.given) for header in posted] == [(Item(call=2, rank=1), 0)]
    assert not completed
    returns.arrived(partly, Item(call=2, rank=0), ())
    partly.futures()[1].settle(lambda: None)
    assert not completed
    returns.keeps([4])  # it had not arrived there
    assert [(header.reply, header.given) for header in posted[1:]] == [(Item(call=2, rank=0), 1)]
    assert completed == [True]


def test_only_results_that_reach_the_program_are_sent_back() -> None:
    calls = PendingCalls()
    posted: list[Returned] = []
    completed: list[bool] = []
    returns = Returns(calls, lambda header, _: posted.append(header), completed.append)
    request, keeping = PendingValue(0, "monarch.config"), PendingValue(3, "actors.step")
    for call in (request, keeping):
        calls.add(call)
    keeping.header = Call(call=2, target=MeshRef(object=3), endpoint="step", adverb="call", keep=7)
    returns.arrived(request, Values(call=1), ())
    returns.arrived(keeping, Values(call=2), ())
    returns.noted(3)
    assert (posted, completed) == ([], [False])


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
