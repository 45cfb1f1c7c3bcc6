from __future__ import annotations

import asyncio
import contextlib
import selectors
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

import pytest

from meshgate import caller
from meshgate.caller import report_interrupt
from meshgate.errors import GatewayError, GatewayLostError
from meshgate.session import futures
from meshgate.session.futures import Future, FutureProxy, LoopWaker
from meshgate.shapes.shape import Shape
from meshgate.shapes.value_mesh import ValueMesh
from tests.waiting import DEADLINE, Printed, wait_for


class Boom(Exception):
    pass


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def settle_when_awaited(future: FutureProxy[int], value: int) -> threading.Thread:
    """Settles ``future`` in a thread, once another thread waits for it."""

    def settle() -> None:
        wait_for(lambda: future._wakers, "a thread to wait for the future")
        future.settle(lambda: value)

    return in_thread(settle)


def test_a_settled_future_returns_its_value_every_time() -> None:
    future = FutureProxy.resolved(5)
    assert future.done()
    assert future.get() == future.result(0) == future.get(timeout=1) == 5
    assert future.exception() is None


def test_the_value_is_read_once_in_the_thread_of_the_first_observer() -> None:
    future: FutureProxy[object] = FutureProxy()
    readers = []

    def read() -> object:
        readers.append(threading.current_thread())
        return object()

    in_thread(lambda: future.settle(read)).join()
    assert readers == []
    first = future.get()
    assert future.get() is first
    assert readers == [threading.current_thread()]


def test_an_error_is_raised_every_time() -> None:
    future: FutureProxy[int] = FutureProxy.failed(Boom("no"))
    for _ in range(2):
        with pytest.raises(Boom, match="no"):
            future.get()
    assert isinstance(future.exception(), Boom)


class InterruptedList(list[Callable[[], object]]):
    """Settles ``future`` in another thread, and waits for that, while an observer registers."""

    future: FutureProxy[int]
    is_settled = False

    def append(self, waker: Callable[[], object]) -> None:
        super().append(waker)
        settling = threading.Thread(target=lambda: self.future.settle(lambda: 5), daemon=True)
        settling.start()
        settling.join(DEADLINE)
        self.is_settled = not settling.is_alive()


def test_a_signal_handler_that_interrupts_an_observer_does_not_block_the_connection_thread() -> None:
    future: FutureProxy[int] = FutureProxy()
    wakers = InterruptedList()
    wakers.future = future
    future._wakers = wakers
    assert future.get(timeout=DEADLINE) == 5
    assert wakers.is_settled
    future.validate_state()


def test_the_traceback_of_an_error_does_not_grow() -> None:
    future: FutureProxy[int] = FutureProxy.failed(Boom("no"))
    lengths = []
    for _ in range(3):
        with pytest.raises(Boom) as caught:
            future.get()
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
        assert isinstance(future.exception(), Boom)
    assert len(set(lengths)) == 1


def test_an_error_of_a_call_is_shown_without_the_frames_that_read_it() -> None:
    def read() -> int:
        raise GatewayLostError("no")

    # As in a module of meshgate.
    reader = types.FunctionType(read.__code__, {"__name__": "meshgate.reading", "GatewayLostError": GatewayLostError})
    future: FutureProxy[int] = FutureProxy()
    future.settle(reader)
    for _ in range(2):
        with pytest.raises(GatewayLostError) as caught:
            future.get()
        names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert names[1:] == ["get", "_result"]


def test_an_error_of_reading_keeps_the_frames_that_say_where() -> None:
    def read() -> int:
        raise ValueError("no")

    future: FutureProxy[int] = FutureProxy()
    future.settle(read)
    with pytest.raises(ValueError, match="no") as caught:
        future.get()
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "read"


def test_the_traceback_of_an_error_does_not_grow_with_the_futures_that_share_it() -> None:
    error = Boom("no")
    futures: list[FutureProxy[int]] = [FutureProxy.failed(error) for _ in range(3)]
    lengths = []
    for future in futures:
        with pytest.raises(Boom) as caught:
            future.get()
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(set(lengths)) == 1


def test_an_error_of_reading_is_kept_and_reading_is_not_repeated() -> None:
    future: FutureProxy[int] = FutureProxy()
    reads = []

    def read() -> int:
        reads.append(1)
        raise Boom("unreadable")

    future.settle(read)
    assert isinstance(future.exception(), Boom)
    assert isinstance(future.exception(), Boom)
    assert reads == [1]


def test_only_the_first_settle_has_an_effect() -> None:
    future: FutureProxy[int] = FutureProxy()
    future.settle(lambda: 1)
    future.settle(lambda: 2)
    future.fail(Boom())
    assert future.get() == 1


def test_a_callback_that_fails_is_logged_and_the_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    future: FutureProxy[int] = FutureProxy()
    called: list[str] = []

    def end_span() -> None:
        raise IndexError("the exporter failed")

    future.when_settled(end_span)
    future.when_settled(lambda: called.append("next"))
    future.settle(lambda: 5)
    assert called == ["next"]
    (record,) = caplog.records
    assert "end_span" in record.getMessage()
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "the exporter failed"


class ReadWhileSettling(list[Any]):
    """Another observer reads the outcome as soon as it is there, before ``settle`` continues."""

    future: FutureProxy[int]

    def append(self, read: Any) -> None:
        super().append(read)
        assert self.future.get(timeout=0) == 5


def test_observers_are_woken_even_if_one_that_polls_was_faster_than_the_settling_thread() -> None:
    future: FutureProxy[int] = FutureProxy()
    reads = ReadWhileSettling()
    reads.future = future
    future._reads = reads
    woken: list[int] = []
    future.when_settled(lambda: woken.append(1))
    future.settle(lambda: 5)
    assert woken == [1]
    future.validate_state()


def test_a_timeout_and_the_repr_say_what_the_call_waits_for() -> None:
    class Call:
        endpoint = "trainers.step"

        def waits_for(self) -> str:
            return "3 of 4 ranks answered"

        def about_to_wait(self) -> None:
            waiting.append(True)

    waiting: list[bool] = []

    future: FutureProxy[int] = FutureProxy(call=Call())
    with pytest.raises(TimeoutError, match="no result within 0 s; 3 of 4 ranks answered; the operation continues"):
        future.get(timeout=0)
    assert waiting == [True]
    assert repr(future) == "<FutureProxy trainers.step: 3 of 4 ranks answered>"
    future.settle(lambda: 7)
    assert repr(future) == "<FutureProxy done>"
    assert repr(FutureProxy()) == "<FutureProxy pending>"


def interrupt_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(futures._ThreadWaker, "wait", interrupt)


def test_ctrl_c_says_what_the_call_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = types.SimpleNamespace(
        endpoint="trainers.step", waits_for=lambda: "1 of 4 ranks answered", about_to_wait=lambda: None
    )
    future: FutureProxy[int] = FutureProxy(call=call)
    interrupt_waits(monkeypatch)
    with pytest.raises(KeyboardInterrupt) as caught:
        future.get()
    assert report_interrupt(caught.value, "The program ends")
    text = "\nmeshgate: interrupted while waiting for trainers.step: 1 of 4 ranks answered. The program ends\n"
    assert capsys.readouterr().err == text
    monkeypatch.setattr(caller, "_notes_waits", True)  # restored afterwards
    caller.note_no_waits()  # a fault, which has been reported, interrupts
    with pytest.raises(KeyboardInterrupt) as caught:
        future.get()
    assert not report_interrupt(caught.value, "The program ends")


def test_ctrl_c_at_a_prompt_says_at_once_what_becomes_of_the_call(
    monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    interrupt_waits(monkeypatch)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)

    def says(cancel: Callable[..., bool]) -> str:
        call = types.SimpleNamespace(
            endpoint="trainers.step", waits_for=lambda: "1 of 4 ranks", about_to_wait=lambda: None, cancel=cancel
        )
        with pytest.raises(KeyboardInterrupt) as caught:
            FutureProxy[int](call=call).get()
        assert report_interrupt(caught.value, "The program ends")  # which writes no second line
        start, says = printed.take()[1].split("1 of 4 ranks. ")
        assert start == "\nmeshgate: interrupted while waiting for trainers.step: "
        return says

    def closed(*, interrupted: bool) -> bool:
        raise GatewayError("it is closed")

    assert says(lambda *, interrupted: interrupted) == "The call is cancelled\n"
    assert says(lambda *, interrupted: not interrupted) == "What it waited for continues\n"
    assert says(closed) == "The session has ended: it is closed\n"


def test_a_timeout_leaves_the_future_usable() -> None:
    future: FutureProxy[int] = FutureProxy()
    with pytest.raises(TimeoutError, match="no result within 0 s; the operation continues"):
        future.get(timeout=0)
    assert isinstance(future.exception(timeout=0.001), TimeoutError)
    assert not future.done()
    future.settle(lambda: 7)
    assert future.get(timeout=0) == 7


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), -0.5])
def test_an_invalid_timeout_raises_monarchs_value_error(timeout: float) -> None:
    future = FutureProxy.resolved(1)
    with pytest.raises(ValueError, match="expected a non-negative, finite number of seconds"):
        future.get(timeout=timeout)


def test_a_timeout_that_is_not_a_number_raises_type_error() -> None:
    with pytest.raises(TypeError, match="invalid timeout '3': expected a number of seconds"):
        FutureProxy.resolved(1).get(timeout="3")  # type: ignore[arg-type]


def test_many_threads_see_the_same_value() -> None:
    future: FutureProxy[object] = FutureProxy()
    seen: list[object] = []
    threads = [in_thread(lambda: seen.append(future.get(timeout=30))) for _ in range(8)]
    future.settle(object)
    for thread in threads:
        thread.join(30)
    assert len(seen) == 8
    assert len(set(map(id, seen))) == 1


def test_get_on_a_running_loop_warns_as_monarch_does() -> None:
    future: FutureProxy[int] = FutureProxy()

    async def main() -> int:
        settling = settle_when_awaited(future, 3)
        with pytest.warns(UserWarning, match=r"Future.get\(\) was called from within an active event loop"):
            value = future.get(timeout=60)
        settling.join()
        return value

    assert asyncio.run(main()) == 3


def test_get_of_a_settled_future_does_not_warn_on_a_loop() -> None:
    async def main() -> int:
        return FutureProxy.resolved(3).get()

    assert asyncio.run(main()) == 3


async def test_await_returns_the_value_every_time() -> None:
    future: FutureProxy[int] = FutureProxy()
    in_thread(lambda: future.settle(lambda: 3)).join()
    assert await future == 3
    assert await future == 3


def test_several_loops_can_await_one_future() -> None:
    future: FutureProxy[int] = FutureProxy()
    seen: list[int] = []

    async def main() -> None:
        seen.append(await future)

    threads = [in_thread(lambda: asyncio.run(main())) for _ in range(3)]
    future.settle(lambda: 4)
    for thread in threads:
        thread.join(30)
    assert seen == [4, 4, 4]


def test_gather_and_wait_for_accept_futures() -> None:
    futures: list[FutureProxy[int]] = [FutureProxy() for _ in range(5)]

    async def main() -> list[int]:
        thread = in_thread(lambda: [future.settle(lambda i=i: i) for i, future in enumerate(futures)])
        values = await asyncio.wait_for(asyncio.gather(*futures), 30)
        thread.join()
        return list(values)

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


def test_await_without_a_loop_raises_value_error() -> None:
    coroutine = FutureProxy.resolved(1).__await__()
    with pytest.raises(ValueError, match="asyncio event loop"):
        next(coroutine)


def test_as_asyncio_without_a_loop_raises_and_leaves_the_future_usable() -> None:
    future = FutureProxy.resolved(1)
    with pytest.raises(RuntimeError, match="requires a running asyncio event loop"):
        future.as_asyncio()
    assert future.get() == 1


async def test_as_asyncio_returns_a_new_future_each_time() -> None:
    future: FutureProxy[int] = FutureProxy()
    first, second = future.as_asyncio(), future.as_asyncio()
    assert first is not second
    in_thread(lambda: future.settle(lambda: 9)).join()
    assert await first == await second == 9
    assert await future.as_asyncio() == 9


async def test_as_asyncio_carries_the_error() -> None:
    with pytest.raises(Boom):
        await FutureProxy.failed(Boom()).as_asyncio()
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        await FutureProxy.failed(StopIteration()).as_asyncio()


def test_a_future_can_be_settled_after_its_observers_loop_is_closed() -> None:
    future: FutureProxy[int] = FutureProxy()

    async def main() -> None:
        future.as_asyncio()

    asyncio.run(main())
    future.settle(lambda: 2)
    assert future.get() == 2


def test_when_settled_calls_at_once_or_later() -> None:
    future: FutureProxy[int] = FutureProxy()
    calls: list[str] = []
    future.when_settled(lambda: calls.append("early"))
    assert calls == []
    future.settle(lambda: 1)
    future.when_settled(lambda: calls.append("late"))
    assert calls == ["early", "late"]


def test_start_is_called_once_at_the_first_use() -> None:
    started: list[object] = []

    def start(future: FutureProxy[int]) -> None:
        started.append(future)
        future.settle(lambda: 1)

    future = FutureProxy(start=start)
    assert started == []
    assert future.get() == future.get() == 1
    assert started == [future]


def test_a_start_that_was_interrupted_is_made_again_at_the_next_use() -> None:
    started: list[object] = []

    def start(future: FutureProxy[int]) -> None:
        started.append(future)
        if len(started) == 1:
            raise KeyboardInterrupt
        future.settle(lambda: 1)

    future = FutureProxy(start=start)
    with pytest.raises(KeyboardInterrupt):
        future.done()
    assert future.get(timeout=0) == 1
    assert started == [future, future]


def test_a_future_that_is_settled_before_its_first_use_is_not_started() -> None:
    started: list[object] = []
    future: FutureProxy[int] = FutureProxy(start=started.append)
    future.settle(lambda: 1)
    assert future.get(timeout=0) == 1
    assert started == []


async def _await(future: FutureProxy[int]) -> int:
    return await future


async def _cancel_await(future: FutureProxy[int]) -> None:
    task = asyncio.ensure_future(_await(future))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _cancel_as_asyncio(future: FutureProxy[int]) -> None:
    future.as_asyncio().cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    "give_up",
    [
        lambda future: future.exception(timeout=0),
        lambda future: asyncio.run(_cancel_await(future)),
        lambda future: asyncio.run(_cancel_as_asyncio(future)),
    ],
    ids=["timeout", "await", "as_asyncio"],
)
def test_an_observer_that_stops_waiting_is_forgotten(give_up: Callable[[FutureProxy[int]], object]) -> None:
    future: FutureProxy[int] = FutureProxy()
    for _ in range(3):
        give_up(future)
    assert future._wakers == []


def test_interrupt_kernel_ends_an_await(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setattr(futures, "INTERRUPT_LAG", 0.001)

    class Selector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> Any:
            assert timeout is not None, "nothing would end this sleep"
            if timeout:
                loop.call_soon(task.cancel)  # as in a signal handler: does not end this sleep
            return super().select(timeout)

    loop = asyncio.SelectorEventLoop(Selector())
    task = loop.create_task(_await(FutureProxy()))
    try:
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)
        with pytest.raises(AssertionError, match="nothing would end this sleep"):
            loop.run_until_complete(loop.create_future())  # so the loop is no longer woken
    finally:
        loop.close()


def test_a_future_can_fail_after_a_fork_at_which_another_thread_held_the_lock() -> None:
    future: FutureProxy[int] = FutureProxy()
    future._lock.acquire()
    future.fail_after_fork(Boom("forked"))
    with pytest.raises(Boom, match="forked"):
        future.get(timeout=0)


def test_validation_finds_a_waiter_that_will_not_be_woken() -> None:
    future: FutureProxy[int] = FutureProxy()
    future.settle(lambda: 1)
    future._wakers.append(lambda: None)
    with pytest.raises(AssertionError, match="still has waiters"):
        future.validate_state()
    future._wakers.clear()


def test_programs_cannot_construct_a_future() -> None:
    with pytest.raises(TypeError, match="cannot be constructed: Future objects are returned by Monarch operations"):
        Future()
    assert isinstance(FutureProxy.resolved(1), Future)


def test_functions_of_meshgate_that_block_on_a_loop_do_not_warn_of_their_own_get() -> None:
    future: FutureProxy[int] = FutureProxy()
    settling = settle_when_awaited(future, 1)

    async def call_state() -> int:
        namespace: dict[str, Any] = {"__name__": "meshgate.jobs.trait", "future": future}
        exec("def state(): return future.result(20)", namespace)
        value: int = namespace["state"]()
        return value

    assert asyncio.run(call_state()) == 1  # a warning would be an error here
    settling.join()


def test_a_notebook_shows_the_state_without_waiting_or_reading() -> None:
    pending: FutureProxy[int] = FutureProxy()
    assert "pending" in pending._repr_html_()
    reads: list[int] = []
    pending.settle(lambda: len(reads) or reads.append(1) or 7)  # type: ignore[func-returns-value]
    assert "get() returns the result" in pending._repr_html_()
    assert reads == []
    assert pending.get() == 7
    assert "value: 7" in pending._repr_html_()


def test_a_notebook_shows_the_error_that_was_read() -> None:
    future: FutureProxy[int] = FutureProxy.failed(Boom("<b>"))
    assert future.exception() is not None
    assert "Boom: &lt;b&gt;" in future._repr_html_()


def test_a_callback_of_a_loop_is_no_cell() -> None:
    warned: list[bool] = []

    def blocks() -> None:
        with pytest.warns(UserWarning, match="active event loop"), contextlib.suppress(TimeoutError):
            FutureProxy().get(timeout=0)
        warned.append(True)

    async def run() -> None:
        asyncio.get_running_loop().call_soon(blocks)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert warned == [True]


def test_a_signal_handler_may_read_the_future_that_its_thread_is_reading() -> None:
    interrupted: list[int] = []

    def read() -> list[int]:
        if not interrupted:
            interrupted.append(1)
            interrupted.extend(future.get(timeout=DEADLINE))
        return [len(interrupted)]

    future: FutureProxy[list[int]] = FutureProxy()
    future.settle(read)
    value = future.get(timeout=DEADLINE)
    assert (interrupted, value) == ([1, 1], [1])
    assert future.get() is value
    future.validate_state()


def test_a_signal_handler_may_read_the_value_of_a_rank_that_its_thread_is_reading() -> None:
    interrupted: list[int] = []

    def read() -> int:
        if not interrupted:
            interrupted.append(1)
            interrupted.append(values.item())
        return 7

    values = ValueMesh.lazy(Shape.unity(), [read])
    assert (values.item(), interrupted) == (7, [1, 7])


def call_in_thread(*wakers: LoopWaker) -> None:
    thread = threading.Thread(target=lambda: [wake() for wake in wakers])
    thread.start()
    thread.join()


async def test_arrivals_that_another_thread_settles_together_wake_the_loop_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    wake_loop, woken = loop.call_soon_threadsafe, []
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: (woken.append(call), wake_loop(*call)))
    for _ in range(2):  # the next ones wake it again
        woken.clear()
        arrivals = [loop.create_future() for _ in range(3)]
        call_in_thread(*(LoopWaker(loop, arrival) for arrival in arrivals))
        await asyncio.gather(*arrivals)
        assert len(woken) == 1


async def test_a_cancelled_arrival_does_not_hold_up_the_others() -> None:
    loop = asyncio.get_running_loop()
    cancelled, arrival = loop.create_future(), loop.create_future()
    cancelled.cancel()
    call_in_thread(LoopWaker(loop, cancelled), LoopWaker(loop, arrival))
    await arrival
    assert cancelled.cancelled()


def test_a_closed_loop_is_left_alone() -> None:
    loop = asyncio.new_event_loop()
    arrival = loop.create_future()
    loop.close()
    LoopWaker(loop, arrival)()
    assert not arrival.done()
