"""The body of a future runs once, at the first observation, as Monarch's ``returns_future`` documents."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import warnings

import pytest

from meshgate import Future, returns_future
from meshgate.actors import api

WHO = contextvars.ContextVar("WHO", default="unset")


class Body:
    def __init__(self) -> None:
        self.runs = 0
        self.cancelled = False

    @returns_future
    async def double(self, number: int) -> int:
        self.runs += 1
        await asyncio.sleep(0)
        return number * 2

    @returns_future
    async def never(self) -> None:
        self.runs += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled = True

    @returns_future
    async def fail(self) -> None:
        raise LookupError("none")


def test_get_runs_the_body_once() -> None:
    body = Body()
    future = body.double(4)
    assert isinstance(future, Future)
    assert (body.runs, future.done()) == (0, False)
    assert future.get(timeout=60) == future.get() == future.result() == 8
    assert (body.runs, future.done()) == (1, True)


async def test_await_runs_the_body_on_the_awaiting_loop() -> None:
    @returns_future
    async def loop_of_body() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert await loop_of_body() is asyncio.get_running_loop()
    body = Body()
    future = body.double(2)
    assert await asyncio.gather(future, future.as_asyncio()) == [4, 4]
    assert body.runs == 1


def test_the_body_sees_the_context_of_its_caller() -> None:
    @returns_future
    async def read() -> str:
        seen = WHO.get()
        WHO.set("body")
        return seen

    token = WHO.set("caller")
    future = read()
    WHO.reset(token)
    assert future.get() == "caller"
    assert WHO.get() == "unset"


def test_errors_reach_every_observer() -> None:
    future = Body().fail()
    for _ in range(2):
        with pytest.raises(LookupError, match="none"):
            future.get()
    assert isinstance(future.exception(), LookupError)


def test_a_get_that_runs_the_body_cancels_it_at_its_timeout() -> None:
    body = Body()
    future = body.never()
    with pytest.raises(TimeoutError, match="the body is cancelled"):
        future.get(timeout=0.01)
    assert body.cancelled
    with pytest.raises(TimeoutError, match="the body is cancelled"):
        future.get()


async def test_a_cancelled_await_leaves_the_body_running() -> None:
    release = asyncio.Event()

    @returns_future
    async def wait() -> str:
        await release.wait()
        return "released"

    future = wait()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(future.as_asyncio(), 0.01)
    release.set()
    assert await future == "released"


def test_get_on_a_running_loop_runs_the_body_on_another_thread() -> None:
    @returns_future
    async def thread() -> int:
        return threading.get_ident()

    async def main() -> int:
        return thread().get()

    assert asyncio.run(main()) != threading.get_ident()


def test_a_future_that_is_dropped_never_runs_its_body() -> None:
    body = Body()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        body.double(1)
        gc.collect()
    assert body.runs == 0


def test_only_async_functions_are_accepted_and_their_arguments_are_checked_at_the_call() -> None:
    with pytest.raises(TypeError, match="returns_future requires an async function"):
        returns_future(print)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword"):
        Body().double(1, other=2)  # type: ignore[call-arg]


def test_the_program_is_not_inside_an_actor() -> None:
    assert not api.inside_actor()


async def test_as_asyncio_is_cancelled_if_the_body_is() -> None:
    @returns_future
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(cancelled().as_asyncio(), 10)
    future = cancelled()
    with pytest.raises(asyncio.CancelledError):
        await future
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(future.as_asyncio(), 10)


def test_a_body_that_waits_for_itself_raises() -> None:
    @returns_future
    async def itself() -> str:
        with pytest.raises(RuntimeError, match=r"get\(\) would never return: this thread runs the body"):
            futures[0].get()
        return "raised"

    futures = [itself()]
    assert futures[0].get(timeout=10) == "raised"


def test_a_body_whose_start_was_interrupted_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    @returns_future
    async def body() -> int:
        started.append(1)
        return 5

    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    future = body()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            future.when_settled(lambda: None)
    assert [future.get(timeout=20), len(started)] == [5, 1]
