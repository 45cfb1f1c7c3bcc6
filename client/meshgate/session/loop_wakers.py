"""Settles futures of asyncio from other threads, such as the connection thread."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque


class LoopWaker:
    """Settles ``arrival`` on its own loop, from any thread. Does nothing if either is over already."""

    __slots__ = ("_arrival", "_loop", "_queue")

    def __init__(self, loop: asyncio.AbstractEventLoop, arrival: asyncio.Future[None]) -> None:
        self._loop = loop
        self._arrival = arrival
        self._queue = arrival_queues.get(loop) or arrival_queues.setdefault(loop, _ArrivalQueue())

    def __call__(self) -> None:
        self._queue.put(self._arrival, self._loop)


class _ArrivalQueue:
    """Arrivals to settle on one loop. Waking a loop is a system call, so one wake-up serves all that are queued."""

    __slots__ = ("_arrivals", "_woken")

    def __init__(self) -> None:
        self._arrivals: deque[asyncio.Future[None]] = deque()
        self._woken = False

    def put(self, arrival: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
        self._arrivals.append(arrival)
        if self._woken:  # _settle_all has not started yet, so it will find this arrival
            return
        self._woken = True
        try:
            loop.call_soon_threadsafe(self._settle_all)
        except BaseException as error:
            self._woken = False
            if not (isinstance(error, RuntimeError) and loop.is_closed()):
                raise
            self._arrivals.clear()

    def _settle_all(self) -> None:
        self._woken = False
        while self._arrivals:
            arrival = self._arrivals.popleft()
            if not arrival.done():
                arrival.set_result(None)


arrival_queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _ArrivalQueue] = weakref.WeakKeyDictionary()
