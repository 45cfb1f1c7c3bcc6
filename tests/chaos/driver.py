"""``python -m tests.chaos.driver URL TOKEN PROGRESS_FD``: calls actors in five ways until its standard input is closed.

Each way has a thread and numbers its calls. Progress is written to PROGRESS_FD as JSON lines: the calls answered so far
by each way, and at the end what was lost, doubled or out of order.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from meshgate import Channel, Client, UrlDialer
from tests.chaos.actors import Ledger

IN_FLIGHT = 64
LARGE = 1 << 20
CALL_TIMEOUT = 120.0
PROGRESS_INTERVAL = 0.1


class Workload:
    def __init__(self, client: Client) -> None:
        procs = client.attach_hosts("workers", 2).spawn_procs(per_host={"gpus": 2})
        self.ledgers: Any = procs.spawn("ledgers", Ledger)
        self.stop = threading.Event()
        self.answered = {"one": 0, "many": 0, "large": 0, "lines": 0, "ports": 0}
        self.problems: list[str] = []
        self._rank = [self.ledgers.slice(hosts=host, gpus=gpu) for host in (0, 1) for gpu in (0, 1)]

    def run(self) -> None:
        """Calls in all ways until ``stop`` is set and every call is answered."""
        self.ledgers.initialized.get(timeout=CALL_TIMEOUT)
        ways = (self._one, self._many, self._large, self._lines, self._ports)
        threads = [threading.Thread(target=self._guarded, args=(way,)) for way in ways]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def check(self) -> dict[str, Any]:
        """What the actors recorded, beside what was answered."""
        kept = [self._rank[rank].calls.call_one().get(timeout=CALL_TIMEOUT) for rank in range(4)]
        counts = {"lost": 0, "doubled": 0, "disordered": 0}
        counts = compare(counts, kept[0].get("one", []), self.answered["one"])
        for rank in range(4):
            counts = compare(counts, kept[rank].get("many", []), self.answered["many"])
        counts = compare(counts, kept[2].get("large", []), self.answered["large"])
        return {**counts, "calls": sum(self.answered.values()), "lines": self.answered["lines"]}

    def _guarded(self, way: Callable[[], None]) -> None:
        try:
            way()
        except Exception as error:  # noqa: BLE001 (reported as this way's problem)
            self.problems.append(f"{way.__name__[1:]}: {type(error).__name__}: {error}")

    def _one(self) -> None:
        while not self.stop.is_set():
            number = self.answered["one"]
            self._expect("one", number, self._rank[0].record.call_one("one", number).get(timeout=CALL_TIMEOUT))

    def _many(self) -> None:
        flying: deque[tuple[int, Any]] = deque()
        number = 0
        while not self.stop.is_set() or flying:
            while len(flying) < IN_FLIGHT and not self.stop.is_set():
                flying.append((number, self.ledgers.record.call("many", number)))
                number += 1
            if flying:
                expected, future = flying.popleft()
                self._expect("many", [expected] * 4, list(future.get(timeout=CALL_TIMEOUT).values()))

    def _large(self) -> None:
        data = os.urandom(LARGE)
        while not self.stop.is_set():
            number = self.answered["large"]
            got, echoed = self._rank[2].echo.call_one(number, data).get(timeout=CALL_TIMEOUT)
            self._expect("large", (number, True), (got, echoed == data))
            self.stop.wait(0.05)

    def _lines(self) -> None:
        while not self.stop.is_set():
            number = self.answered["lines"]
            self._expect("lines", None, self._rank[1].say.call_one(number).get(timeout=CALL_TIMEOUT))
            self.stop.wait(0.01)

    def _ports(self) -> None:
        port, receiver = Channel[int].open()
        while not self.stop.is_set():
            number = self.answered["ports"]
            self._rank[3].answer.broadcast(port, number)
            self._expect("ports", number, receiver.recv().get(timeout=CALL_TIMEOUT))

    def _expect(self, way: str, expected: object, got: object) -> None:
        if got != expected:
            raise AssertionError(f"expected {expected}, got {got}")
        self.answered[way] += 1


def compare(counts: dict[str, int], kept: Iterable[int], answered: int) -> dict[str, int]:
    """``counts`` with what the calls that an actor ``kept`` add, of which the first ``answered`` were answered."""
    kept = list(kept)
    distinct = set(kept)
    return {
        "lost": counts["lost"] + len(set(range(answered)) - distinct),
        "doubled": counts["doubled"] + len(kept) - len(distinct),
        "disordered": counts["disordered"] + sum(after < before for before, after in pairwise(kept)),
    }


def main(url: str, token: str, progress_fd: int) -> None:
    with os.fdopen(progress_fd, "w", buffering=1) as progress, Client(UrlDialer(url, token)) as client:
        workload = Workload(client)
        done = threading.Event()

        def report() -> None:
            while not done.wait(PROGRESS_INTERVAL):
                progress.write(json.dumps({"answered": workload.answered}) + "\n")

        reporter = threading.Thread(target=report)
        reporter.start()
        threading.Thread(target=lambda: (sys.stdin.read(), workload.stop.set()), daemon=True).start()
        try:
            workload.run()
            result = {} if workload.problems else workload.check()
        finally:
            done.set()
            reporter.join()
        progress.write(json.dumps({"result": {**result, "problems": workload.problems}}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
