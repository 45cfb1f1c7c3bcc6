from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from meshgate.future import FutureProxy


class Boom(Exception):
    pass


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_a_settled_future_gives_its_value_as_often_as_asked() -> None:
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


def test_an_error_is_raised_at_every_look() -> None:
    future: FutureProxy[int] = FutureProxy.failed(Boom("no"))
    for _ in range(2):
        with pytest.raises(Boom, match="no"):
            future.get()
    assert isinstance(future.exception(), Boom)


def test_what_reading_raises_is_the_error_and_is_not_tried_again() -> None:
    future: FutureProxy[int] = FutureProxy()
    reads = []

    def read() -> int:
        reads.append(1)
        raise Boom("unreadable")

    future.settle(read)
    assert isinstance(future.exception(), Boom)
    assert isinstance(future.exception(), Boom)
    assert reads == [1]


def test_only_the_first_settling_counts() -> None:
    future: FutureProxy[int] = FutureProxy()
    future.settle(lambda: 1)
    future.settle(lambda: 2)
    future.fail(Boom())
    assert future.get() == 1


def test_a_timeout_consumes_nothing() -> None:
    future: FutureProxy[int] = FutureProxy()
    with pytest.raises(TimeoutError, match="no result within 0 s; the operation goes on"):
        future.get(timeout=0)
    assert isinstance(future.exception(timeout=0.001), TimeoutError)
    assert not future.done()
    future.settle(lambda: 7)
    assert future.get(timeout=0) == 7


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), -0.5])
def test_an_invalid_timeout_is_a_value_error_with_monarchs_words(timeout: float) -> None:
    future = FutureProxy.resolved(1)
    with pytest.raises(ValueError, match="expected a non-negative, finite number of seconds"):
        future.get(timeout=timeout)


def test_a_timeout_that_is_no_number_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="must be real number"):
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
        threading.Timer(0.01, lambda: future.settle(lambda: 3)).start()
        with pytest.warns(UserWarning, match=r"Future.get\(\) was called from within an active event loop"):
            return future.get()

    assert asyncio.run(main()) == 3


def test_get_of_a_value_that_is_there_does_not_warn_on_a_loop() -> None:
    async def main() -> int:
        return FutureProxy.resolved(3).get()

    assert asyncio.run(main()) == 3


def test_await_gives_the_value_as_often_as_asked() -> None:
    future: FutureProxy[int] = FutureProxy()

    async def main() -> None:
        in_thread(lambda: future.settle(lambda: 3)).join()
        assert await future == 3
        assert await future == 3

    asyncio.run(main())


def test_several_loops_may_await_the_same_future() -> None:
    future: FutureProxy[int] = FutureProxy()
    seen: list[int] = []

    async def main() -> None:
        seen.append(await future)

    threads = [in_thread(lambda: asyncio.run(main())) for _ in range(3)]
    future.settle(lambda: 4)
    for thread in threads:
        thread.join(30)
    assert seen == [4, 4, 4]


def test_gather_and_wait_for_take_futures() -> None:
    futures: list[FutureProxy[int]] = [FutureProxy() for _ in range(5)]

    async def main() -> list[int]:
        thread = in_thread(lambda: [future.settle(lambda i=i: i) for i, future in enumerate(futures)])
        values = await asyncio.wait_for(asyncio.gather(*futures), 30)
        thread.join()
        return list(values)

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


def test_await_off_a_loop_is_a_value_error() -> None:
    coroutine = FutureProxy.resolved(1).__await__()
    with pytest.raises(ValueError, match="asyncio event loop"):
        next(coroutine)


def test_as_asyncio_off_a_loop_is_a_runtime_error_and_consumes_nothing() -> None:
    future = FutureProxy.resolved(1)
    with pytest.raises(RuntimeError, match="requires a running asyncio event loop"):
        future.as_asyncio()
    assert future.get() == 1


def test_as_asyncio_gives_a_future_of_the_loop_each_time() -> None:
    future: FutureProxy[int] = FutureProxy()

    async def main() -> None:
        first, second = future.as_asyncio(), future.as_asyncio()
        assert first is not second
        in_thread(lambda: future.settle(lambda: 9)).join()
        assert await first == await second == 9
        assert await future.as_asyncio() == 9

    asyncio.run(main())


def test_as_asyncio_carries_the_error() -> None:
    async def main() -> None:
        with pytest.raises(Boom):
            await FutureProxy.failed(Boom()).as_asyncio()
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            await FutureProxy.failed(StopIteration()).as_asyncio()

    asyncio.run(main())


def test_settling_after_the_loop_has_gone_is_harmless() -> None:
    future: FutureProxy[int] = FutureProxy()

    async def main() -> None:
        future.as_asyncio()

    asyncio.run(main())
    future.settle(lambda: 2)
    assert future.get() == 2


def test_when_settled_calls_at_once_or_on_settling() -> None:
    future: FutureProxy[int] = FutureProxy()
    told: list[str] = []
    future.when_settled(lambda: told.append("early"))
    assert told == []
    future.settle(lambda: 1)
    future.when_settled(lambda: told.append("late"))
    assert told == ["early", "late"]


def test_begin_runs_at_the_first_look_and_only_then() -> None:
    begun: list[object] = []

    def begin(future: FutureProxy[int]) -> None:
        begun.append(future)
        future.settle(lambda: 1)

    future = FutureProxy(begin)
    assert begun == []
    assert future.get() == future.get() == 1
    assert begun == [future]
