"""Arrivals that another thread settles on an event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from meshgate.session.loop_wakers import LoopWaker


def call_in_thread(*wakers: LoopWaker) -> None:
    thread = threading.Thread(target=lambda: [wake() for wake in wakers])
    thread.start()
    thread.join()


def test_arrivals_that_another_thread_settles_together_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        wake_loop, woken = loop.call_soon_threadsafe, []
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: (woken.append(call), wake_loop(*call)))
        for _ in range(2):  # the next ones wake it again
            woken.clear()
            arrivals = [loop.create_future() for _ in range(3)]
            call_in_thread(*(LoopWaker(loop, arrival) for arrival in arrivals))
            await asyncio.gather(*arrivals)
            assert len(woken) == 1

    asyncio.run(test())


def test_a_cancelled_arrival_does_not_hold_up_the_others() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        cancelled, arrival = loop.create_future(), loop.create_future()
        cancelled.cancel()
        call_in_thread(LoopWaker(loop, cancelled), LoopWaker(loop, arrival))
        await arrival
        assert cancelled.cancelled()

    asyncio.run(test())


def test_a_closed_loop_is_left_alone() -> None:
    loop = asyncio.new_event_loop()
    arrival = loop.create_future()
    loop.close()
    LoopWaker(loop, arrival)()
    assert not arrival.done()
