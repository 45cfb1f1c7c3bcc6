"""``python -m tests.chaos.ray_client [--ray PYTHON]``: the first faults of ``make chaos`` for Ray Client.

A driver keeps calls of an actor in flight, numbers them, and prints the number of each that was answered. PYTHON is one
that has Ray, as ``make bench`` sets it up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.peers.ray_client import cluster
from meshgate.testing import NetworkProxy
from tests.chaos.driver import compare

IN_FLIGHT = 64
CUTS = 10
DRIVER = """
import collections, sys, ray

class Ledger:
    def __init__(self):
        self.calls = []

    def record(self, number):
        self.calls.append(number)
        return number

    def recorded(self):
        return self.calls

ray.init(f"ray://{sys.argv[1]}", namespace="chaos", log_to_driver=False)
options = {"name": "ledger", "lifetime": "detached", "get_if_exists": True, "num_cpus": 0}
ledger = ray.remote(Ledger).options(**options).remote()
flying, number = collections.deque(), 0
if sys.argv[2] == "count":
    print(ray.get(ledger.recorded.remote()), flush=True)
    sys.exit()
while True:
    while len(flying) < int(sys.argv[3]):
        flying.append(ledger.record.remote(number))
        number += 1
    print(ray.get(flying.popleft()), number, flush=True)
"""


class Driver:
    """``answered`` is how many calls were, and ``made`` how many were made."""

    def __init__(self, python: str, address: str) -> None:
        command = [python, "-c", DRIVER, address, "call", str(IN_FLIGHT)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.answered = self.made = 0
        self.more = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.more:
                number, self.made = map(int, line.split())
                self.answered = number + 1
                self.more.notify_all()

    def progresses(self, timeout: float = 60.0) -> bool:
        """Whether further calls are answered within ``timeout`` seconds."""
        with self.more:
            wanted = self.answered + 2 * IN_FLIGHT
            return self.more.wait_for(lambda: self.answered >= wanted or self.process.poll() is not None, timeout) and (
                self.answered >= wanted
            )

    def end(self) -> str:
        """Kills it. Returns the last line of its error output."""
        self.process.kill()
        _, errors = self.process.communicate() if not self._reader.is_alive() else (None, self._errors())
        self._reader.join()
        return (errors.strip().splitlines() or [""])[-1]

    def _errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def ray_behind_a_proxy(python: str) -> Iterator[tuple[str, NetworkProxy]]:
    with TemporaryDirectory() as directory, cluster(python, Path(directory) / "log") as address:
        host, _, port = address.rpartition(":")
        with NetworkProxy(host, int(port)) as proxy:
            yield address, proxy


def recorded(python: str, address: str) -> list[int]:
    command = [python, "-c", DRIVER, address, "count"]
    calls: list[int] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return calls


def cut(python: str, absence: float) -> dict[str, object]:
    """Cuts the connection ``CUTS`` times, or once for ``absence`` seconds."""
    with ray_behind_a_proxy(python) as (address, proxy):
        driver = Driver(python, f"127.0.0.1:{proxy.port}")
        tried = survived = 0
        if not driver.progresses():
            raise RuntimeError(f"the driver does not call: {driver.end()}")
        while tried < (1 if absence else CUTS) and survived == tried:
            tried += 1
            if absence:
                proxy.refuse()
                threading.Event().wait(absence)
                proxy.accept()
            else:
                proxy.cut()
            survived += driver.progresses()
        answered, made, error = driver.answered, driver.made, driver.end()
        counts = compare({"lost": 0, "doubled": 0, "disordered": 0}, recorded(python, address), answered)
        unanswered = 0 if survived == tried else made - answered
        return {"tried": tried, "survived": survived, **counts, "unanswered": unanswered, "error": error}


def kill(python: str) -> dict[str, object]:
    """Kills the driver; its calls have run, and another driver cannot get their results."""
    with ray_behind_a_proxy(python) as (address, _):
        driver = Driver(python, address)
        if not driver.progresses():
            raise RuntimeError(f"the driver does not call: {driver.end()}")
        driver.end()
        return {"made": driver.made, "answered": driver.answered, "ran": len(recorded(python, address))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ray", default=sys.executable, metavar="PYTHON", help="a Python that has Ray")
    python = parser.parse_args().ray
    print("connection cut:", cut(python, 0))
    print("no connection for 10 s:", cut(python, 10))
    print("no connection for 60 s:", cut(python, 60))
    print("driver killed:", kill(python))


if __name__ == "__main__":
    main()
