"""Values that stay in the cluster, beside the same transfers written by hand in plain Monarch.

    python -m benchmarks.kept

One actor hands an array to another, in turn: in plain Monarch, where the second actor calls an endpoint of the first;
through a gateway, the same program; and through a gateway with ``keep()``. Then a generator and a trainer take turns,
each rank with 10 MB, over a link with a round trip of 50 ms and over one without. At the end, values are kept and
dropped 10,000 times.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import meshgate as kt
from benchmarks.processes import usage_of
from meshgate import Actor, ProcessJob, endpoint
from meshgate.testing import NetworkProxy

ROUNDS = 12
SIZE = 100 * 10**6
LOOP_SIZE = 10 * 10**6
LOOP_ROUNDS = 20
ROUND_TRIP = 0.05
DROPS = 10_000
MEASURED_AT = (2_000, DROPS)


class Giver(Actor):
    def __init__(self, size: int) -> None:
        self.array = np.ones(size, dtype="uint8")

    @endpoint
    def give(self) -> Any:
        return self.array

    @endpoint
    def process(self) -> int:
        import os

        return os.getpid()


class Taker(Actor):
    @endpoint
    def take(self, array: Any) -> int:
        return int(array.nbytes)

    @endpoint
    def take_from(self, givers: Any) -> int:
        """By hand: asks the giver of the same rank."""
        return int(givers.give.call_one().get().nbytes)


def giver_and_taker(hosts: Any) -> tuple[Any, Any]:
    """An actor that has an array, and one in another process of the same host."""
    givers = hosts.spawn_procs(name="givers").spawn("givers", Giver, SIZE)
    return givers.slice(hosts=0), hosts.spawn_procs(name="takers").spawn("takers", Taker).slice(hosts=0)


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def monarchs_hosts() -> Iterator[Any]:
    """Two hosts of Monarch's own ``ProcessJob``, as those of the gateway's."""
    from monarch.job import ProcessJob

    job = ProcessJob({"workers": 2})
    try:
        yield job.state(cached_path=None).workers
    finally:
        job.kill()


def transfers(hosts: Any, monarchs: Any) -> None:
    givers, takers = giver_and_taker(hosts)
    native_givers, native_takers = giver_and_taker(monarchs)
    kept = givers.give.keep()
    kept.info()
    ways = {
        "plain Monarch, by hand": lambda: native_takers.take_from.call_one(native_givers).get(),
        "meshgate, by hand": lambda: takers.take_from.call_one(givers).get(),
        "meshgate, keep()": lambda: takers.take.call_one(kept).get(),
        "meshgate, keep() and call": lambda: takers.take.call_one(givers.give.keep()).get(),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, work in ways.items():
            spent = seconds(work)
            if number:  # the first round warms up
                taken[name].append(spent)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    for name, median in medians.items():
        ratio = medians["plain Monarch, by hand"] / median
        print(f"{name}: {SIZE / 1e6 / median:.0f} MB/s ({median * 1e3:.0f} ms), {ratio:.2f} of plain Monarch")


@contextmanager
def session(job: Any, delay: float) -> Iterator[tuple[Any, NetworkProxy]]:
    """The job's hosts over a link of their own with this delay in each direction."""
    with NetworkProxy("127.0.0.1", urlsplit(job.gateway_url).port or 0, delay=delay) as proxy:
        token = job._gateway.record.token
        with kt.Client(kt.UrlDialer(f"ws://127.0.0.1:{proxy.port}", token)) as client:
            yield client.attach_hosts("workers", 2), proxy


def iteration(hosts: Any) -> Callable[[], Any]:
    givers = hosts.spawn_procs(name="givers").spawn("givers", Giver, LOOP_SIZE)
    takers = hosts.spawn_procs(name="takers").spawn("takers", Taker)
    return lambda: takers.take.call(givers.give.keep()).get()


def loops(job: Any) -> None:
    medians = {}
    for delay in (0.0, ROUND_TRIP / 2):
        with session(job, delay) as (hosts, _):
            work = iteration(hosts)
            work()
            medians[delay] = statistics.median(seconds(work) for _ in range(LOOP_ROUNDS))
        print(f"generator and trainer, 10 MB a rank, {delay * 2e3:.0f} ms round trip: {medians[delay] * 1e3:.0f} ms")
    print(f"in addition: {(medians[ROUND_TRIP / 2] - medians[0.0]) / ROUND_TRIP:.2f} round trips")


def link(job: Any) -> None:
    """The bytes on the laptop's link for one iteration that moves 100 MB."""
    with session(job, 0.0) as (hosts, proxy):
        givers, takers = giver_and_taker(hosts)
        takers.take.call_one(givers.give.keep()).get()
        before = proxy.forwarded
        takers.take.call_one(givers.give.keep()).get()
        print(f"on the laptop's link for 100 MB: {proxy.forwarded - before} bytes")


def drops(hosts: Any) -> None:
    givers = hosts.spawn_procs(name="givers").spawn("givers", Giver, 1000)
    takers = hosts.spawn_procs(name="takers").spawn("takers", Taker)
    processes = givers.process.call().get().values()
    memory = {}
    for number in range(1, DROPS + 1):
        takers.take.call(givers.give.keep()).get()
        if number in MEASURED_AT:
            gc.collect()
            used = [usage_of(process) for process in processes]
            memory[number] = [each.rss / 1e6 for each in used if each is not None]
            print(f"after {number} rounds, the processes use {', '.join(f'{each:.1f}' for each in memory[number])} MB")


def main() -> None:
    from monarch.actor import context

    context()  # before the job, which would otherwise keep Monarch from starting here
    with ProcessJob({"workers": 2}) as job:
        hosts = job.state(cached_path=None).workers
        with monarchs_hosts() as monarchs:
            transfers(hosts, monarchs)
        link(job)
        loops(job)
        drops(hosts)


if __name__ == "__main__":
    main()
