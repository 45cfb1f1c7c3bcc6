"""The rounds of a driver of Monarch's API: the same code for direct Monarch, attach mode and meshgate.

Only ``hosts`` differs. Each method runs one round and returns its measurements in seconds.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np

from benchmarks.workload import Target


class Driver:
    """``hosts``: a mesh of two hosts. ``open_meshes`` spawns the meshes that most rounds use."""

    def __init__(self) -> None:
        self.hosts: Any = None
        self._made = 0
        self._trainers: Any = None
        self._wide: tuple[int, Any, Any] = (0, None, None)  # ranks, processes, actors
        self._arrays: dict[int, Any] = {}

    def open_meshes(self) -> None:
        """Spawns four actors, of which one is also called alone, and a separate one for large transfers."""
        procs = self.hosts.spawn_procs(per_host={"gpus": 2}, name="measured")
        self.four = procs.spawn("four", Target)
        self.one = self.four.slice(hosts=0, gpus=0)
        self.separate = (
            self.hosts.slice(hosts=1).spawn_procs(per_host={"gpus": 1}, name="separate").spawn("separate", Target)
        )
        self.four.echo.call(b"").get()
        self.separate.echo.call(b"").get()

    def sequential(self, actors: int, calls: int) -> list[float]:
        call = self.one.echo.call_one if actors == 1 else self.four.echo.call
        return timed(lambda: call(b"x" * 100).get(), calls)

    def to_ranks(self, ranks: int, calls: int) -> list[float]:
        """Calls to all of ``ranks`` processes, half of them on each host."""
        if self._wide[0] != ranks:
            if self._wide[1] is not None:
                self._wide[1].stop().get()
            procs = self.hosts.spawn_procs(per_host={"gpus": ranks // 2}, name=f"wide{ranks}")
            self._wide = ranks, procs, procs.spawn("wide", Target)
        return timed(lambda: self._wide[2].echo.call(b"x" * 100).get(), calls)

    def sequential_async(self, calls: int) -> list[float]:
        return asyncio.run(_timed_async(lambda: self.one.echo.call_one(b"x" * 100), calls))

    def in_flight(self, calls: int) -> float:
        call = self.one.echo.call_one
        start = time.perf_counter()
        futures = [call(b"x" * 100) for _ in range(calls)]
        for future in futures:
            future.get()
        return time.perf_counter() - start

    def in_flight_async(self, calls: int) -> float:
        call = self.one.echo.call_one

        async def gather() -> float:
            start = time.perf_counter()
            await asyncio.gather(*[_awaited(call(b"x" * 100)) for _ in range(calls)])
            return time.perf_counter() - start

        return asyncio.run(gather())

    def array_up(self, nbytes: int, times: int) -> list[float]:
        array = self._array(nbytes)
        return timed(lambda: self.one.take.call_one(array).get(), times)

    def array_down(self, nbytes: int, times: int) -> list[float]:
        return timed(lambda: self.one.give.call_one(nbytes).get().nbytes, times)

    def hand_over(self, nbytes: int, times: int) -> list[float]:
        """An actor on the other host gets an array of the first one."""
        return timed(lambda: self.separate.take_from.call_one(self.one, nbytes).get(), times)

    def loop(self, nbytes: int, times: int) -> list[float]:
        """Each trainer gets the array of the generator of its own rank."""
        if self._trainers is None:
            self._trainers = self.hosts.spawn_procs(per_host={"gpus": 2}, name="trainers").spawn("trainers", Target)
        return timed(lambda: self.iterate(self._trainers, nbytes), times)

    def iterate(self, trainers: Any, nbytes: int) -> None:
        trainers.take_from_own.call(self.four, nbytes).get()

    def small_idle(self, calls: int) -> list[float]:
        return self.sequential(1, calls)

    def small_while(self, direction: str, nbytes: int) -> dict[str, Any]:
        """Sequential small calls during one large call to another mesh."""
        if direction == "up":
            array = self._array(nbytes)
            transfer = threading.Thread(target=lambda: self.separate.take.call_one(array).get())
        else:
            self.separate.give.call_one(nbytes).get()  # creates the actor's array
            transfer = threading.Thread(target=lambda: self.separate.give.call_one(nbytes).get().nbytes)
        call, payload = self.one.echo.call_one, b"x" * 100
        seconds = []
        start = time.perf_counter()
        transfer.start()
        while transfer.is_alive():
            before = time.perf_counter()
            call(payload).get()
            seconds.append(time.perf_counter() - before)
        transfer.join()
        duration = time.perf_counter() - start
        self._arrays.clear()
        return {"calls": seconds[:-1], "transfer": duration}

    def chain(self) -> float:
        self._made += 1
        start = time.perf_counter()
        procs = self.hosts.spawn_procs(per_host={"gpus": 1}, name=f"chain{self._made}")
        procs.spawn("chained", Target).echo.call(1).get()
        duration = time.perf_counter() - start
        procs.stop().get()
        return duration

    def _array(self, nbytes: int) -> Any:
        if nbytes not in self._arrays:
            self._arrays = {nbytes: np.ones(nbytes, np.uint8)}
        return self._arrays[nbytes]


def timed(call: Any, times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


async def _timed_async(call: Any, times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - start)
    return seconds


async def _awaited(future: Any) -> Any:
    return await future
