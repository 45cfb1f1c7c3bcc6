"""What a process does with calls that arrive as one message: Monarch's own classes, without a mesh around."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from monarch._rust_bindings.monarch_hyperactor.buffers import Buffer
from monarch._src.actor import actor_mesh

from meshgate_gateway.engine.on_worker import batches
from meshgate_gateway.engine.on_worker.batches import (
    JOIN_LIMIT,
    METHOD,
    PATIENCE,
    SHORT,
    Batch,
    LateReplies,
    decode_replies,
    encode_replies,
    run_batches,
)

REPLIES = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.booleans(), st.floats(0, 4000), st.binary(max_size=40)), max_size=20
)


@given(replies=REPLIES, large=st.booleans())
def test_replies_are_decoded_as_they_were_encoded(replies: list[tuple[int, bool, float, bytes]], large: bool) -> None:
    if large:
        replies = [*replies, (7, False, 0.5, bytes(JOIN_LIMIT + 1))]
    decoded = list(decode_replies(b"".join(encode_replies(replies))))
    assert [(number, exception, bytes(data)) for number, exception, _, data in decoded] == [
        (number, exception, data) for number, exception, _, data in replies
    ]
    assert all(abs(one - other) < 2e-6 for (_, _, one, _), (_, _, other, _) in zip(decoded, replies, strict=True))


def test_a_call_may_take_longer_than_its_field_can_say() -> None:
    ((_, _, seconds, _),) = decode_replies(b"".join(encode_replies([(0, False, 1e9, b"")])))
    assert seconds > 4000


class Clock:
    """Stands for ``time`` in the module."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Port:
    """The port of a batch, as Monarch passes it."""

    _rank = 3

    def __init__(self) -> None:
        self.messages: list[tuple[Any, bytes, list[Any]]] = []

    def _send_message(self, message: tuple[Any, bytes, list[Any]]) -> None:
        self.messages.append(message)

    def replies(self) -> list[list[tuple[int, bool, Any]]]:
        """The replies in each message: the number of the call, whether it is an exception, and the value."""
        return [
            [(number, exception, pickle.loads(part)) for number, exception, _, part in decode_replies(data)]
            for _, data, _ in self.messages
        ]


class Refused(MemoryError):
    """The engine has no room."""


class Ran:
    """A batch whose calls a test runs itself."""

    def __init__(self) -> None:
        self.port, self.late = Port(), LateReplies()
        self.asked: list[int] = []
        self.late._thread = threading.current_thread()  # starts none
        self.batch = Batch(lambda port: port._rank, self._ask, self._standin, self.late, self.port)
        self.batch.monarch = SimpleNamespace(
            **{name: getattr(actor_mesh, name) for name in ("MethodSpecifier", "PythonMessageKind", "PendingMessage")},
            PythonMessage=lambda kind, data, references: (kind, bytes(data), references),
        )

    def _ask(self, nbytes: int, *, reply: bool) -> None:
        self.asked.append(nbytes)
        if nbytes > 2**24:
            raise Refused(nbytes)

    def _standin(self, error: Exception, reason: Exception) -> Exception:
        return RuntimeError(f"stands for {error}")

    def calls(self, *endpoints: str) -> Any:
        message = Buffer()
        message.write(pickle.dumps([(endpoint, pickle.dumps(((), {})), 0) for endpoint in endpoints]))
        return self.batch.calls(message.freeze())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(batches, "time", clock)
    return clock


def test_results_of_short_calls_leave_together(clock: Clock) -> None:
    ran = Ran()
    for specifier, arguments, port in ran.calls("step", "step", "step"):
        assert specifier.name == "step"
        assert pickle.loads(arguments) == ((), {})
        port._resolve_and_send_blocking(port.number * 10)
        assert ran.port.messages == []
    ran.batch.close()
    assert ran.port.replies() == [[(0, False, 0), (1, False, 10), (2, False, 20)]]
    assert ran.port.messages[0][0].rank == 3


@pytest.mark.parametrize("seconds", [None, SHORT * 2])
def test_results_leave_before_a_call_that_is_not_known_to_be_short(clock: Clock, seconds: float | None) -> None:
    ran = Ran()
    if seconds is not None:
        ran.late.seconds["other"] = seconds
    for _, _, port in ran.calls("step", "step", "other"):
        if port.number == 2:
            assert ran.port.replies() == [[(0, False, None), (1, False, None)]]
        port._resolve_and_send_blocking(None)


def test_results_leave_before_a_call_once_they_have_waited(clock: Clock) -> None:
    ran = Ran()
    for _, _, port in ran.calls("step", "step", "step"):
        assert len(ran.port.messages) == (port.number == 2)
        clock.now += SHORT / 2
        port._resolve_and_send_blocking(None)
        clock.now += PATIENCE if port.number == 1 else 0


def test_results_leave_while_a_call_takes_longer_than_expected(clock: Clock) -> None:
    ran = Ran()
    for _, _, port in ran.calls("step", "step"):
        if port.number == 1:
            ran.late.send_overdue()
            assert ran.port.messages == []
            clock.now += PATIENCE * 2
            ran.late.send_overdue()
            assert ran.port.replies() == [[(0, False, None)]]
        port._resolve_and_send_blocking(None)
    ran.batch.close()
    ran.late.send_overdue()
    assert len(ran.port.messages) == 2


def test_late_replies_that_cannot_be_sent_end_their_actor_and_no_other(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, other = Ran(), Ran()
    other.batch._late = late = broken.late

    def refuse(*_: object) -> None:
        raise RuntimeError("the port is gone")

    monkeypatch.setattr(broken.port, "_send_message", refuse)
    for ran in (broken, other):
        _, _, port = next(ran.calls("step"))
        port._resolve_and_send_blocking(None)
    clock.now += PATIENCE
    late.send_overdue()
    assert other.port.replies() == [[(0, False, None)]]
    with pytest.raises(RuntimeError, match="the port is gone"):
        broken.batch.close()
    other.batch.close()


def test_a_result_that_refers_to_meshes_is_sent_alone(clock: Clock) -> None:
    ran = Ran()
    for _, _, port in ran.calls("step", "step", "step"):
        if port.number == 1:
            ran.batch.add(port, pickle.dumps("mesh"), references=["reference"])
        else:
            port._resolve_and_send_blocking("plain")
    ran.batch.close()
    assert ran.port.replies() == [[(0, False, "plain")], [(1, False, "mesh")], [(2, False, "plain")]]
    assert [references for _, _, references in ran.port.messages] == [[], ["reference"], []]


def test_large_results_are_asked_about_and_leave_at_once(clock: Clock) -> None:
    ran = Ran()
    for _, _, port in ran.calls("step", "step", "step"):
        if port.number == 1:
            port._resolve_and_send_blocking(bytes(10 * 2**20))
            assert len(ran.port.messages) == 1
        elif port.number == 2:
            with pytest.raises(Refused):
                port._resolve_and_send_blocking(bytes(2**24))
        else:
            port._resolve_and_send_blocking(None)
    assert len(ran.asked) == 2
    assert [[number for number, *_ in message] for message in ran.port.replies()] == [[0, 1]]


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("never")


def test_exceptions_are_sent_or_what_stands_for_them(clock: Clock) -> None:
    ran = Ran()
    for _, _, port in ran.calls("step", "step"):
        port.exception(Unpicklable("one") if port.number else ValueError("zero"))
    ran.batch.close()
    ((first, second),) = ran.port.replies()
    assert first[:2] == (0, True)
    assert repr(first[2]) == "ValueError('zero')"
    assert second[:2] == (1, True)
    assert repr(second[2]) == "RuntimeError('stands for one')"


# --- Monarch's handlers


class Handled:
    """Monarch's handlers, replaced by some that note what they get, and then wrapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Callable[[str, Any], Any]) -> None:
        self.port, self.contexts, self.numbers = Port(), [], []
        self.arriving = SimpleNamespace(next=0)

        def handle_sync(actor: Any, ctx: Any, method: Any, message: Any, *rest: Any) -> None:
            *_, port, correlation_id = rest
            assert correlation_id is None
            self.contexts.append(ctx)
            self.numbers.append(self.arriving.next)
            if method.name != "alone":
                port._resolve_and_send_blocking(run(method.name, pickle.loads(message)))

        async def handle(*arguments: Any) -> None:
            handle_sync(*arguments)

        monkeypatch.setattr(actor_mesh._Actor, "handle_sync", handle_sync)
        monkeypatch.setattr(actor_mesh._Actor, "handle", handle)
        monkeypatch.setattr(LateReplies, "watch", lambda late, batch: None)
        monkeypatch.setattr(actor_mesh, "PythonMessage", lambda kind, data, references: (kind, bytes(data), references))
        run_batches(lambda port: port._rank, lambda nbytes, reply: None, lambda error, reason: error, self.arriving)
        self.actor = actor_mesh._Actor()

    def arguments(self, method: str, calls: list[tuple[str, Any]]) -> tuple[Any, ...]:
        message = Buffer()
        message.write(pickle.dumps([(name, pickle.dumps(value), 7 + at) for at, (name, value) in enumerate(calls)]))
        specifier = actor_mesh.MethodSpecifier.ReturnsResponse(method)
        return "context", specifier, message.freeze(), None, [], [], self.port, None


class Inbox:
    """Monarch's, which has one message for an actor with endpoints that are not async."""

    def __init__(self, arguments: tuple[Any, ...], stopping: Callable[[], bool]) -> None:
        context, method, data, _, local_state, references, port, correlation_id = arguments
        message = SimpleNamespace(
            context=context,
            method=method,
            bytes=data,
            local_state=local_state,
            refs=references,
            response_port=port,
            correlation_id=correlation_id,
            _report_complete=lambda: None,
            _report_failed=lambda: None,
        )
        self._items = [None, message]
        self.next, self.stopping = self._items.pop, stopping


def deliver(handled: Handled, arguments: tuple[Any, ...], stopping: Callable[[], bool] = lambda: False) -> list[str]:
    """Runs Monarch's own loop. Returns why the actor was killed."""
    killed: list[str] = []
    actor_mesh._sync_dispatch_loop(
        handled.actor,
        Inbox(arguments, stopping),  # type: ignore[arg-type]
        SimpleNamespace(kill=killed.append),  # type: ignore[arg-type]
    )
    return killed


def test_a_batch_is_run_by_monarchs_handler_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    handled = Handled(monkeypatch, lambda endpoint, value: (endpoint, value))
    calls = [("one", 1), ("other", 2), ("one", 3)]
    assert deliver(handled, handled.arguments(METHOD, calls)) == []
    assert [reply for message in handled.port.replies() for reply in message] == [
        (number, False, call) for number, call in enumerate(calls)
    ]
    assert handled.contexts == ["context"] * 3
    assert handled.numbers == [7, 8, 9]


def test_any_other_message_is_left_to_monarch(monkeypatch: pytest.MonkeyPatch) -> None:
    handled = Handled(monkeypatch, lambda endpoint, value: None)
    assert deliver(handled, handled.arguments("alone", [])) == []
    asyncio.run(handled.actor.handle(*handled.arguments("alone", [])))
    assert (handled.contexts, handled.port.messages) == (["context"] * 2, [])


def test_an_actor_that_is_stopped_discards_the_rest_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    handled = Handled(monkeypatch, lambda endpoint, value: ran.append(value))
    arguments = handled.arguments(METHOD, [("step", number) for number in range(5)])
    assert deliver(handled, arguments, lambda: len(ran) >= 2) == []
    assert ran == [0, 1]
    assert [number for message in handled.port.replies() for number, *_ in message] == [0, 1]


def test_results_before_what_ends_an_actor_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(endpoint: str, value: int) -> int:
        if value == 2:
            raise SystemExit
        return value

    handled = Handled(monkeypatch, run)
    arguments = handled.arguments(METHOD, [("step", number) for number in range(5)])
    ((reason),) = deliver(handled, arguments)
    assert "SystemExit" in reason
    with pytest.raises(SystemExit):
        asyncio.run(handled.actor.handle(*arguments))
    assert [number for message in handled.port.replies() for number, *_ in message] == [0, 1, 0, 1]


def test_other_tasks_of_an_async_actor_run_during_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    handled = Handled(monkeypatch, lambda endpoint, value: seen.append(value))

    async def run() -> int:
        started = asyncio.ensure_future(handled.actor.handle(*handled.arguments(METHOD, [("step", 0)] * 100)))
        await asyncio.sleep(0)
        between = len(seen)
        await started
        return between

    assert 0 < asyncio.run(run()) < 100
    assert len(seen) == 100
