"""What values that stay in the cluster leave behind, and what of them passes the laptop.

    python -m benchmarks.kept

Prints the bytes on the laptop's link for an array of 100 MB that is kept and taken, and the memory of the processes
while values are kept and dropped 10,000 times. How fast they are is the group ``kept`` of ``python -m benchmarks``.
"""

from __future__ import annotations

import gc
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import meshgate as kt
from benchmarks.processes import usage_of
from meshgate import Actor, ProcessJob, endpoint
from meshgate.testing import NetworkProxy

SIZE = 100 * 10**6
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


def giver_and_taker(hosts: Any) -> tuple[Any, Any]:
    """An actor that has an array, and one in another process of the same host."""
    givers = hosts.spawn_procs(name="givers").spawn("givers", Giver, SIZE)
    return givers.slice(hosts=0), hosts.spawn_procs(name="takers").spawn("takers", Taker).slice(hosts=0)


def link(job: Any) -> None:
    """The bytes on the laptop's link for one iteration that moves 100 MB."""
    with NetworkProxy("127.0.0.1", urlsplit(job.gateway_url).port or 0) as proxy:
        dialer = kt.UrlDialer(f"ws://127.0.0.1:{proxy.port}", job._gateway.record.token)
        with kt.Client(dialer) as client:
            givers, takers = giver_and_taker(client.attach_hosts("workers", 2))
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
    with ProcessJob({"workers": 2}) as job:
        hosts = job.state(cached_path=None).workers
        link(job)
        drops(hosts)


if __name__ == "__main__":
    main()
