"""What a process asks before it sends a large message, with the engine's end in the hands of the test."""

from __future__ import annotations

import io
import json
import pickle
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from meshgate_gateway.engine.on_worker import large_messages
from meshgate_gateway.engine.on_worker.large_messages import (
    FRAMES,
    LARGE,
    answers_the_engine,
    ask,
    ask_before_large_messages,
    call_in,
    gives_a_kept_value,
)


@contextmanager
def engine(answer: bytes) -> Iterator[tuple[socket.socket, list[bytes]]]:
    """A connection to an engine that gives this answer, and what it is asked."""
    there, here = socket.socketpair()
    asked: list[bytes] = []

    def serve() -> None:
        with there, there.makefile("rb") as file:
            asked.append(file.readline())
            there.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield here, asked
    finally:
        thread.join()


def test_a_process_says_how_large_its_message_is() -> None:
    with engine(b"+") as (connection, asked):
        ask(lambda: connection, {"rank": 3}, 500, reply=True)
    assert json.loads(asked[0]) == {"rank": 3, "stream": "large", "nbytes": 500, "reply": True, "kept": False}


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [(b"-too large", MemoryError, "^too large$"), (b"", RuntimeError, "the session has ended")],
)
def test_a_message_that_is_refused_is_an_error(answer: bytes, error: type[Exception], text: str) -> None:
    with engine(answer) as (connection, _), pytest.raises(error, match=text):
        ask(lambda: connection, {}, 500, reply=False)


def reply(levels: int) -> bool:
    return reply(levels - 1) if levels else answers_the_engine(sys._getframe(1))


def handle(correlation_id: int | None, levels: int) -> bool:
    result = reply(levels)
    return result and correlation_id is None


def test_only_calls_without_a_correlation_id_are_the_engines() -> None:
    assert handle(None, 0)
    assert handle(None, 2)
    assert not handle(7, 0)
    assert handle(None, FRAMES - 2)
    assert not handle(None, FRAMES)  # a method of a user's that has such a variable
    assert not answers_the_engine(None)


@pytest.mark.parametrize(
    ("correlation_id", "nbytes", "measured", "searches", "copies", "asked"),
    [
        *((7, LARGE, None, 1, 0, 0), (None, LARGE, None, 1, 1, 1), (None, LARGE - 1, None, 1, 1, 0)),
        *((7, LARGE, LARGE, 1, 0, 0), (None, LARGE, LARGE, 1, 0, 1), (None, LARGE - 1, LARGE - 1, 0, 0, 0)),
    ],
)
def test_only_what_goes_to_the_engine_and_may_be_large_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
    correlation_id: int | None,
    nbytes: int,
    measured: int | None,
    searches: int,
    copies: int,
    asked: int,
) -> None:
    actor_mesh: Any = pytest.importorskip("monarch._src.actor.actor_mesh")
    made: list[bytes] = []
    asks: list[int] = []
    searched: list[Any] = []

    class Port:
        def _pending_result(self, value: bytes) -> None: ...

    class State:
        def buffer(self) -> bytes:
            made.append(bytes(nbytes))
            return made[-1]

    monkeypatch.setattr(actor_mesh, "Port", Port)
    monkeypatch.setattr(actor_mesh, "PendingMessage", lambda kind, state: state)
    last = SimpleNamespace(nbytes=3)  # of a pickle before

    def pickled(value: bytes, **_: object) -> State:
        if measured is not None:
            last.nbytes = measured
        return State()

    def search(frame: Any) -> Any:
        searched.append(frame)
        return call_in(frame)

    monkeypatch.setattr(actor_mesh, "pickle", pickled)
    monkeypatch.setattr(large_messages, "call_in", search)
    monkeypatch.setattr(large_messages, "measure_pickles", lambda: last)
    monkeypatch.setattr(large_messages, "ask", lambda connect, hello, nbytes, reply, kept: asks.append(nbytes))
    monkeypatch.setattr(large_messages, "gives_a_kept_value", lambda frame: False)
    ask_before_large_messages(lambda: None, {}, "root", lambda port, frame: 0)

    def handler(correlation_id: int | None) -> None:
        Port()._pending_result(bytes(nbytes))

    handler(correlation_id)
    assert (len(searched), len(made), len(asks)) == (searches, copies, asked)


def test_monarchs_pickles_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("monarch._src.actor.actor_mesh")
    for module in (cloudpickle, cloudpickle.cloudpickle):
        monkeypatch.setattr(module, "Pickler", module.Pickler)  # put back afterwards
    last = large_messages.measure_pickles()
    assert last.nbytes is None
    for value in (bytes(LARGE), "small", [bytearray(100_000)] * 3):
        state = large_messages.pickled(value)
        assert last.nbytes == len(state.buffer())
    assert pickle.loads(cloudpickle.dumps({"of": "others"})) == {"of": "others"}
    assert pickle.loads(cloudpickle.dumps(lambda: cloudpickle.Pickler))() is cloudpickle.Pickler
    assert pickle.loads(cloudpickle.dumps(cloudpickle.Pickler)) is cloudpickle.Pickler
    assert last.nbytes == len(state.buffer())  # theirs do not count
    thread = threading.Thread(target=large_messages.pickled, args=("in another thread",))
    thread.start()
    thread.join()
    assert last.nbytes == len(state.buffer())


def test_users_picklers_need_not_initialize_that_of_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("monarch._src.actor.actor_mesh")
    for module in (cloudpickle, cloudpickle.cloudpickle):
        monkeypatch.setattr(module, "Pickler", module.Pickler)  # put back afterwards
    large_messages.measure_pickles()

    class Theirs(cloudpickle.Pickler):  # type: ignore[misc]
        def __init__(self, file: Any) -> None:
            pickle.Pickler.__init__(self, file)

    written = io.BytesIO()
    Theirs(written).dump(1)
    assert pickle.loads(written.getvalue()) == 1


class KeptValuesActor:
    """Named as ``code_actors.KeptValuesActor``, which cannot be made without Monarch."""


class Handling:
    """As Monarch's ``_Actor``."""

    def __init__(self, instance: object) -> None:
        self.instance = instance

    def handle(self, correlation_id: int | None) -> bool:
        return gives_a_kept_value(sys._getframe(0)) and correlation_id is None


def test_a_reply_with_a_kept_value_is_recognized_by_its_actor() -> None:
    assert Handling(KeptValuesActor()).handle(None)
    assert not Handling(KeptValuesActor).handle(None)
    assert not gives_a_kept_value(None)
