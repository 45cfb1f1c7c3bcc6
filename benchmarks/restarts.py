"""``python -m benchmarks.restarts``: kills the gateway's server again and again while calls run, and checks the calls.

Each kill also cuts the driver's connection, because an established one does not pass through the server: the driver has
to reconnect by the next server. The actor records the calls it runs, so that a lost or repeated one shows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import meshgate as kt
from benchmarks.workload import Target
from meshgate.testing import NetworkProxy

TIMEOUT = 120.0


class Kills(Protocol):
    """Kills what calls pass through, which is then replaced; ``kills`` times so far."""

    kills: int

    def kill(self) -> None: ...


class Killer:
    """Kills the server of a gateway, and cuts the connections through ``proxy``."""

    def __init__(self, job: kt.ProcessJob, proxy: NetworkProxy) -> None:
        self.kills = 0
        self._gateway, self._proxy = job._gateway, proxy

    def kill(self) -> None:
        """Waits until a server answers, and kills it."""
        os.kill(self._serving(), signal.SIGKILL)
        self._proxy.cut()
        self.kills += 1

    def _serving(self) -> int:
        assert self._gateway is not None
        deadline = time.monotonic() + TIMEOUT
        while not self._gateway.healthy():
            if time.monotonic() > deadline:
                raise TimeoutError("no server has taken over")
        return server_of(self._gateway.record.pid)


def server_of(supervisor: int) -> int:
    """The child of the supervisor that is a copy of it."""
    command = Path(f"/proc/{supervisor}/cmdline").read_bytes()
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return next(int(pid) for pid in children if Path(f"/proc/{pid}/cmdline").read_bytes() == command)


def measure(calls: int, kills: int, window: int, seed: int) -> dict[str, Any]:
    with kt.ProcessJob({"workers": 1}) as job:
        job.apply()
        port = urlsplit(str(job.gateway_url)).port
        assert port is not None
        assert job._gateway is not None
        with NetworkProxy("127.0.0.1", port) as proxy:
            dialer = kt.UrlDialer(f"ws://127.0.0.1:{proxy.port}", job._gateway.record.token)
            with kt.Client(dialer) as client:
                return call_and_kill(client, Killer(job, proxy), calls, kills, window, seed)


def call_and_kill(
    client: kt.Client, killer: Kills, calls: int, kills: int, window: int, seed: int = 1
) -> dict[str, Any]:
    """Makes ``calls``, ``window`` at a time, while ``killer`` kills at random times. Returns what has become of the
    calls, and how long the driver waited for the next result: at most, and usually after a kill."""
    kill_at = set(random.Random(seed).sample(range(1, calls), kills))
    actor = client.attach_hosts("workers", 1).spawn_procs().spawn("target", Target).slice(hosts=0)
    actor.note.call_one(-1).get(TIMEOUT)
    in_flight: deque[Any] = deque()
    results: list[int] = []
    stalls: list[float] = []
    start = last = time.perf_counter()

    def take() -> None:
        nonlocal last
        results.append(in_flight.popleft().get(TIMEOUT))
        now = time.perf_counter()
        stalls.append(now - last)
        last = now

    for number in range(calls):
        in_flight.append(actor.note.call_one(number))
        if number in kill_at:
            killer.kill()
        if len(in_flight) == window:
            take()
    while in_flight:
        take()
    duration = time.perf_counter() - start
    ran = actor.noted.call_one().get(TIMEOUT)[1:]
    longest = sorted(stalls)[-kills:]
    return {
        "calls": calls,
        "kills": killer.kills,
        "lost": calls - len(set(ran)),
        "twice": len(ran) - len(set(ran)),
        "in_order": ran == list(range(calls)) and results == ran,
        "longest_stall_s": round(longest[-1], 3),
        "median_stall_s": round(statistics.median(longest), 3),
        "seconds": round(duration, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--window", type=int, default=100, help="calls in flight")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = measure(options.calls, options.kills, options.window, options.seed)
    print(json.dumps(found))
    return 0 if found["in_order"] and not found["lost"] and not found["twice"] else 1


if __name__ == "__main__":
    sys.exit(main())
