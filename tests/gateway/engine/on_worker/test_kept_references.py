"""References to kept values in a process whose engine is played by the test."""

from __future__ import annotations

import asyncio
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

from meshgate_gateway.engine.on_worker.kept_references import MODULE, KeptRef, ValueLostError, refer_to_values
from meshgate_gateway.engine.on_worker.kept_values import KeptStore

CALL = "makers.make.keep()"
PLACES = ((0, 4), (1, 6))


class Process:
    """A process that has references, and a store if it has kept values or got some."""

    def __init__(self) -> None:
        self.answer = b""
        self.asked: dict[str, Any] = {}
        refer_to_values(self._connect, {"secret": "s", "mesh": 2, "rank": 1, "pid": os.getpid()})
        self.module: Any = sys.modules[MODULE]

    def _connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()

        def serve() -> None:
            with theirs, theirs.makefile("rb") as lines:
                self.asked = json.loads(lines.readline())
                theirs.sendall(self.answer)

        threading.Thread(target=serve).start()
        return ours

    def make_store(self) -> KeptStore:
        self.module.store = store = KeptStore(None)
        return store


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    modules = KeptRef.__module__, ValueLostError.__module__
    yield Process()
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
    def refuse() -> socket.socket:
        raise ConnectionRefusedError("refused")

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
    assert "on rank 1" in repr(module.refer(5, CALL, PLACES, None))
    assert "on rank 0" in repr(module.refer(5, CALL, PLACES, 0))
    found = module.refer_to_all(5, CALL, PLACES, ("hosts",), (2,))
    assert [each._rank for each in found.values()] == [4, 6]
