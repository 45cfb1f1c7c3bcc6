"""References to kept values in a process whose engine is played by the test."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from meshgate_gateway.engine.on_worker.kept_references import (
    MODULE,
    KeptRef,
    ValueLostError,
    answers_an_actor,
    refer_to_values,
)
from meshgate_gateway.engine.on_worker.kept_values import KeptStore
from tests.waiting import wait_for

CALL = "makers.make.keep()"
PLACES = ((0, 4), (1, 6))


class Process:
    """A process that has references, and a store if it has kept values or got some."""

    def __init__(self) -> None:
        self.answer = b""
        self.asked: dict[str, Any] = {}
        self.said: list[bytes] = []  # of its references
        self.engine: socket.socket | None = None  # the end of the connection on which it says so
        self.ending = False  # the engine closes that connection instead of answering
        self.references = refer_to_values(self._connect, {"secret": "s", "mesh": 2, "rank": 1, "pid": os.getpid()})
        self.module: Any = sys.modules[MODULE]

    def _connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()

        def serve() -> None:
            with theirs, theirs.makefile("rb") as lines:
                hello = json.loads(lines.readline())
                if hello["stream"] == "references":
                    self.engine = theirs
                    self._hear(lines)
                else:
                    self.asked = hello
                    theirs.sendall(self.answer)

        threading.Thread(target=serve, daemon=True).start()
        return ours

    def _hear(self, lines: Any) -> None:
        for line in lines:
            self.said.append(line)
            if self.ending:
                return
            if line.startswith(b"+"):
                self.tell(b"+\n")

    def tell(self, line: bytes) -> None:
        assert self.engine is not None
        self.engine.sendall(line)

    def make_store(self) -> KeptStore:
        self.module.store = store = KeptStore(None)
        return store


def refuse() -> socket.socket:
    raise ConnectionRefusedError("refused")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    modules = KeptRef.__module__, ValueLostError.__module__
    made = Process()
    yield made
    if made.references._connection is not None:
        made.references._connection.shutdown(socket.SHUT_RDWR)
        made.references._connection.close()
    sys.modules.pop(MODULE, None)
    KeptRef.__module__, ValueLostError.__module__ = modules


def test_a_value_of_another_process_is_delivered_and_taken(process: Process) -> None:
    store = process.make_store()
    for get in (KeptRef(5, 1, 6, CALL).get, lambda: asyncio.run(awaited(KeptRef(5, 1, 6, CALL)))):
        store.expect(3, 0)
        store.deliver(3, {0: "value"})
        process.answer = b"+3"
        assert get() == "value"
        assert store.statistics()["deliveries"] == 0
        asked = {"secret": "s", "mesh": 2, "rank": 1, "pid": os.getpid(), "stream": "kept", "object": 5, "at": 6}
        assert process.asked == asked


async def awaited(reference: KeptRef) -> Any:
    return await reference


def test_the_process_that_keeps_the_value_has_the_object_itself(process: Process) -> None:
    value = object()
    process.make_store().add(5, 1, CALL, value)
    assert KeptRef(5, 1, 6, CALL).get() is value
    assert not process.asked


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (b"-it was released", RuntimeError, f"cannot get the value of {CALL} on rank 1: it was released"),
        (b"?killed", ValueLostError, f"cannot get the value of {CALL} on rank 1: killed"),
        (
            b"",
            RuntimeError,
            f"cannot get the value of {CALL} on rank 1: the session or this mesh has ended",
        ),
        (b"!" + pickle.dumps(KeyError("cannot pickle")), KeyError, "'cannot pickle'"),
    ],
)
def test_the_reason_is_raised_why_there_is_no_value(
    process: Process, answer: bytes, kind: type[Exception], text: str
) -> None:
    process.answer = answer
    with pytest.raises(kind) as raised:
        KeptRef(5, 1, 6, CALL).get()
    assert type(raised.value) is kind
    assert str(raised.value) == text


def test_a_forked_process_cannot_fetch_values(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(process.module.hello, "pid", 7)
    with pytest.raises(RuntimeError, match="in a forked process: get it before the fork"):
        KeptRef(5, 1, 6, CALL).get()
    assert not process.asked


def test_an_engine_that_cannot_be_asked_is_an_error_with_the_call(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.module, "connect", refuse)
    with pytest.raises(RuntimeError, match=r"makers\.make\.keep\(\) on rank 1: the engine cannot be asked: refused"):
        KeptRef(5, 1, 6, CALL).get()


def test_a_lost_value_names_its_call_and_rank(process: Process) -> None:
    process.answer = b"?killed"
    with pytest.raises(ValueLostError) as raised:
        KeptRef(5, 1, 6, CALL).get()
    assert vars(raised.value) == {"call": CALL, "ranks": (1,)}


def test_references_are_pickled_by_name_and_keep_what_they_refer_to(process: Process) -> None:
    pickled = pickle.dumps(KeptRef(5, 1, 6, CALL))
    assert b"meshgate_gateway" not in pickled
    found = pickle.loads(pickled)
    assert repr(found) == f"<reference to the value of {CALL} on rank 1>"
    process.answer = b"-gone"
    with pytest.raises(RuntimeError):
        found.get()
    assert (process.asked["object"], process.asked["at"]) == (5, 6)


def test_arguments_refer_to_the_value_of_the_rank_or_to_all(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monarch: Any = pytest.importorskip("monarch.actor")
    monkeypatch.setattr(monarch, "context", lambda: SimpleNamespace(message_rank=SimpleNamespace(rank=1)))
    module = process.module
    assert "on rank 1" in repr(module.refer(5, CALL, PLACES, None, None))
    assert "on rank 0" in repr(module.refer(5, CALL, PLACES, 0, None))
    found = module.refer_to_all(5, CALL, PLACES, ("hosts",), (2,), (0, 0, 7))
    assert [each._rank for each in found.values()] == [4, 6]
    wait_for(lambda: process.said[-1] == b"=0 0 7\n", "the reports")


def test_the_engine_knows_of_the_first_reference_to_an_object_and_of_the_end_of_the_last(process: Process) -> None:
    first, second = KeptRef(5, 1, 6, CALL), KeptRef(5, 0, 4, CALL)
    other = copy.deepcopy(KeptRef(9, 0, 4, CALL))
    assert process.said == [b"+5\n", b"+9\n"]
    del first
    assert process.references.statistics() == {"objects": 2, "on_the_way": 0}
    del second, other
    wait_for(lambda: process.said[2:] == [b"-5\n", b"-9\n"], "the reports")
    again = KeptRef(5, 1, 6, CALL)
    assert process.said[4:] == [b"+5\n"]
    del again


def test_a_reference_that_another_process_has_passed_on_says_that_it_has_arrived(process: Process) -> None:
    first = KeptRef(5, 1, 6, CALL, (4, 0, 7))
    second = KeptRef(5, 1, 6, CALL, (4, 0, 8))
    wait_for(lambda: process.said == [b"+5\n", b"=4 0 7\n", b"=4 0 8\n"], "the reports")
    del first, second


def test_what_is_passed_on_stays_until_it_has_arrived(process: Process) -> None:
    references, reference = process.references, KeptRef(5, 1, 6, CALL)
    pickled = references.sending(lambda: True, pickle.dumps, [reference])
    del reference
    assert references.statistics() == {"objects": 1, "on_the_way": 1}
    (found,) = pickle.loads(pickled)
    wait_for(lambda: process.said == [b"+5\n", b"=2 1 1\n"], "the reports")
    del found
    process.tell(b"1\n")
    wait_for(lambda: process.said[2:] == [b"-5\n"], "the reports")
    process.tell(b"1\n")  # of another receiver of the same message
    assert pickle.loads(pickled)  # a message that was kept for long
    assert references.statistics()["on_the_way"] == 0


def test_nothing_stays_of_what_does_not_go_to_an_actor(process: Process) -> None:
    references, reference = process.references, KeptRef(5, 1, 6, CALL)
    assert references.sending(lambda: False, pickle.dumps, reference) == pickle.dumps(reference)

    def dump_both(value: Any) -> bytes:
        """As a message whose pickling sends another one."""
        references.sending(lambda: False, pickle.dumps, value)
        return pickle.dumps([value, threading.Lock()])

    with pytest.raises(TypeError, match="cannot pickle"):
        references.sending(lambda: True, dump_both, reference)
    pickle.dumps(reference)
    assert references.statistics() == {"objects": 1, "on_the_way": 0}


def test_a_thousand_references_that_are_passed_on_leave_nothing(process: Process) -> None:
    for number in range(1, 1001):
        reference = KeptRef(number, 0, 4, CALL)
        pickled = process.references.sending(lambda: True, pickle.dumps, reference)
        del reference
        received = pickle.loads(pickled)
        process.tell(b"%d\n" % number)
        del received
    wait_for(lambda: process.references.statistics() == {"objects": 0, "on_the_way": 0}, "the objects to be dropped")
    wait_for(lambda: len(process.said) == 3000, "the reports")


def test_a_forked_process_has_copies_that_keep_nothing(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(process.references._hello, "pid", 7)  # type: ignore[arg-type]
    KeptRef(5, 1, 6, CALL)
    assert process.references.statistics() == {"objects": 0, "on_the_way": 0}
    assert not process.said


def test_a_session_that_has_ended_has_no_references(process: Process) -> None:
    held = KeptRef(4, 1, 6, CALL)
    process.ending = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cannot refer to .*: the engine cannot be asked"):
            KeptRef(5, 1, 6, CALL)
    del held  # which the engine need not learn


def test_an_engine_that_does_not_listen_is_an_error_with_the_call(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.references, "_connect", refuse)
    with pytest.raises(RuntimeError, match=r"cannot refer to the value of makers.* on rank 1: .* refused"):
        KeptRef(5, 1, 6, CALL)


def answered(correlation_id: int | None) -> bool:
    """What code finds that replies to a call, as Monarch's handler of it has variables."""
    return answers_an_actor(sys._getframe())


def test_only_calls_of_actors_have_a_correlation_id() -> None:
    assert answered(5)
    assert not answered(None)
    assert not answers_an_actor(None)
