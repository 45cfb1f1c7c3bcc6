"""What a process does with the numbers of its calls, without Monarch around."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from meshgate_gateway.engine.on_worker.running_calls import MAX_EARLY, RunningCalls

needs_cancelling = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 cannot tell whether an actor is being stopped"
)


class Process:
    """The calls of one process. ``handle`` does what Monarch's handler does with a message."""

    def __init__(self) -> None:
        self.calls = RunningCalls()
        self.begun: list[str] = []

    async def work(self, name: str, until: asyncio.Event) -> str:
        self.begun.append(name)
        await until.wait()
        return name

    async def stubborn(self, name: str, until: asyncio.Event) -> str:
        """Ends as a call does that was not cancelled."""
        try:
            return await self.work(name, until)
        except asyncio.CancelledError:
            return f"{name} all the same"

    async def stubbornly_wait(self, until: asyncio.Event) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await until.wait()
        await until.wait()

    def handle(self, number: int, method: Callable[..., Any], *, is_coro: bool = True, explicit: bool = False) -> Any:
        """What is run in place of ``method`` for a message of call ``number``; 0: of a peer's."""
        self.calls.prepared(explicit)
        if number:
            self.calls.mark(number)
        return self.calls.tracked(method, is_coro)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_call_that_waits_is_cancelled_and_the_task_runs_the_next_one() -> None:
    process, never, at_once = Process(), asyncio.Event(), asyncio.Event()
    at_once.set()
    results: list[Any] = []

    async def dispatch() -> None:
        """As Monarch's loop: one call after the other, in one task."""
        for number, name, until in ((1, "first", never), (2, "second", at_once)):
            try:
                results.append(await process.handle(number, process.work)(name, until))
            except RuntimeError as error:
                results.append(str(error))
            task: Any = asyncio.current_task()
            assert not getattr(task, "cancelling", int)()

    task = asyncio.create_task(dispatch())
    await turns()
    await asyncio.to_thread(process.calls.cancel, 1)
    await task
    assert results == ["the call was cancelled", "second"]
    assert not process.calls._running
    assert not process.calls._early


async def test_a_call_that_was_cancelled_before_it_began_does_not_begin() -> None:
    process, at_once = Process(), asyncio.Event()
    at_once.set()
    process.calls.cancel(1)
    waits, blocks = process.handle(1, process.work), process.handle(2, process.begun.append, is_coro=False)
    with pytest.raises(RuntimeError, match="cancelled"):
        await waits("first", at_once)
    blocks("second")
    process.calls.cancel(3)
    with pytest.raises(RuntimeError, match="cancelled"):
        process.handle(3, process.begun.append, is_coro=False)("third")
    assert process.begun == ["second"]


async def test_a_call_may_end_as_it_likes_when_it_is_cancelled() -> None:
    process, never = Process(), asyncio.Event()
    task = asyncio.create_task(process.handle(1, process.stubborn)("first", never))
    await turns()
    process.calls.cancel(1)
    assert await task == "first all the same"


async def test_a_stop_of_the_actor_is_not_taken_for_a_cancelled_call() -> None:
    process, never = Process(), asyncio.Event()
    task = asyncio.create_task(process.handle(1, process.work)("first", never))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_stop_is_not_swallowed_by_a_call_that_goes_on_although_it_was_cancelled() -> None:
    process, never = Process(), asyncio.Event()
    task: Any = asyncio.create_task(process.handle(1, process.stubbornly_wait)(never))
    await turns()
    process.calls.cancel(1)
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError if hasattr(task, "cancelling") else RuntimeError):
        await task


async def test_arguments_may_have_any_name() -> None:
    async def echo(*, number: int, method: str) -> tuple[int, str]:
        return number, method

    process = Process()
    assert await process.handle(1, echo)(number=3, method="mean") == (3, "mean")
    wrapper: Any = functools.partial(echo)
    echo._monarch_concurrent_endpoint_wrapper = True  # type: ignore[attr-defined]
    assert await process.handle(2, wrapper, explicit=True)(number=3, method="mean") == (3, "mean")


def test_cancelling_a_call_of_an_actor_that_has_ended_does_nothing() -> None:
    process, never = Process(), asyncio.Event()
    loop = asyncio.new_event_loop()
    coroutine = process.handle(1, process.work)("first", never)
    task = loop.create_task(coroutine)
    loop.run_until_complete(turns())
    loop.close()
    process.calls.cancel(1)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine.close()


def test_calls_of_peers_and_endpoints_that_reply_themselves_are_not_cancelled() -> None:
    process = Process()
    process.calls.cancel(4)
    assert process.handle(0, print, is_coro=False) is print
    assert process.handle(4, print, is_coro=False, explicit=True) is print
    process.calls.mark(4)  # its arguments cannot be unpickled, so it is never looked up
    assert process.handle(0, print, is_coro=False) is print


@needs_cancelling
@pytest.mark.parametrize("number", [0, 1], ids=["of a peer", "of the program"])
async def test_a_cancelled_error_that_nothing_has_asked_for_is_an_error_of_the_call(number: int) -> None:
    async def awaits_a_cancelled_task() -> None:
        task = asyncio.create_task(asyncio.sleep(0))
        task.cancel()
        await task

    process = Process()
    with pytest.raises(RuntimeError, match="although its call was not cancelled") as raised:
        await process.handle(number, awaits_a_cancelled_task)()
    assert isinstance(raised.value.__cause__, asyncio.CancelledError)
    assert traceback.extract_tb(raised.value.__cause__.__traceback__)[0].name == "awaits_a_cancelled_task"

    async def in_a_concurrent_task() -> None:  # whose CancelledError Monarch reports
        with pytest.raises(asyncio.CancelledError):
            await process.calls.tracked_in_task(awaits_a_cancelled_task)()

    in_a_concurrent_task._monarch_concurrent_endpoint_wrapper = True  # type: ignore[attr-defined]
    await process.handle(number, functools.partial(in_a_concurrent_task), explicit=True)()


def test_a_number_belongs_to_the_message_of_its_thread() -> None:
    process = Process()
    process.calls.prepared(explicit=False)
    process.calls.mark(5)
    other = threading.Thread(target=process.calls.prepared, args=(False,))
    other.start()
    other.join()
    assert process.calls.tracked(print, is_coro=True) is not print


def test_what_was_cancelled_and_never_begins_is_forgotten_in_the_end() -> None:
    process = Process()
    for number in range(1, MAX_EARLY + 10):
        process.calls.cancel(number)
    assert len(process.calls._early) == MAX_EARLY
    assert process.handle(1, print, is_coro=False) is print
    assert process.handle(MAX_EARLY, print, is_coro=False) is not print
