"""A driver that uses Ray Client. Needs Ray and numpy, but not meshgate.

The run starts the cluster, which is one local node: see ``cluster``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peer import leave, serve
from benchmarks.processes import end_tree, network_proxy

_START_TIMEOUT = 120.0  # of one start
_STARTS = 8  # Ray's own limits, 30 s for a node and 60 s for its dashboard, cannot be set; busy machines exceed them


@contextlib.contextmanager
def cluster(python: str, log: Path, dashboard_port: int | None = None) -> Iterator[str]:
    """Runs a Ray head node with a Ray Client server during the block; yields its ``host:port``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--head", "--block", "--port=0", f"--ray-client-server-port={port}", "--num-cpus=8"]
    quiet = ["--include-dashboard=false", "--disable-usage-stats"]
    if dashboard_port is not None:  # it accepts jobs
        quiet[0] = f"--dashboard-port={dashboard_port}"
        options.append("--dashboard-agent-listen-port=0")  # any: the default is one number, and jobs need this agent
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as directory, log.open("wb") as output:
        command = [str(Path(python).parent / "ray"), "start", *options, *quiet, f"--temp-dir={directory}"]
        for _ in range(_STARTS):
            head = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            try:
                if _accepts(python, port, head):
                    if dashboard_port is not None:
                        _wait_listening(dashboard_port)
                    yield f"127.0.0.1:{port}"
                    return
            finally:
                end_tree(head, grace=3.0)
    raise RuntimeError(f"Ray did not start in {_STARTS} attempts:\n{log.read_text()}")


def _accepts(python: str, port: int, head: subprocess.Popen[bytes]) -> bool:
    """Waits until a client is accepted: on a busy machine, Ray refuses the first clients of a server that listens.

    Returns False if the node ended instead.
    """
    connect = [python, "-c", f"import ray; ray.init('ray://127.0.0.1:{port}')"]
    deadline = time.monotonic() + _START_TIMEOUT
    listening = False
    while time.monotonic() < deadline and head.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            listening = True
        if listening and subprocess.run(connect, capture_output=True, check=False).returncode == 0:
            return True
        time.sleep(0.1)
    return False


def _wait_listening(port: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.1)
    raise RuntimeError("Ray's dashboard, which accepts jobs, did not start: it needs ray[default]")


class RayClient:
    """The rounds of ``benchmarks.driver.Driver``, for Ray."""

    def open(self, address: str, round_trip: float = 0.0, rate: float = 0.0) -> dict[str, Any]:
        import ray

        self._stack = contextlib.ExitStack()
        if round_trip:
            port = self._stack.enter_context(network_proxy(address, round_trip=round_trip, rate=rate))
            address = f"127.0.0.1:{port}"
        self._ray: Any = ray
        ray.init(f"ray://{address}", log_to_driver=False)
        actor_class = ray.remote(num_cpus=0)(_Target)
        self._four = [actor_class.remote() for _ in range(4)]
        self._one = self._four[0]
        ray.get([actor.echo.remote(b"") for actor in self._four])
        return {"version": ray.__version__}

    def sequential(self, actors: int, calls: int) -> list[float]:
        payload, get = b"x" * 100, self._ray.get
        if actors == 1:
            return _timed(lambda: get(self._one.echo.remote(payload)), calls)
        return _timed(lambda: get([actor.echo.remote(payload) for actor in self._four]), calls)

    def in_flight(self, calls: int) -> float:
        start = time.perf_counter()
        self._ray.get([self._one.echo.remote(b"x" * 100) for _ in range(calls)])
        return time.perf_counter() - start

    def in_flight_async(self, calls: int) -> float:
        async def gather() -> float:
            start = time.perf_counter()
            await asyncio.gather(*[self._one.echo.remote(b"x" * 100) for _ in range(calls)])
            return time.perf_counter() - start

        return asyncio.run(gather())

    def array_up(self, nbytes: int, times: int) -> list[float]:
        import numpy as np

        array = np.ones(nbytes, np.uint8)
        return _timed(lambda: self._ray.get(self._one.take.remote(array)), times)

    def array_down(self, nbytes: int, times: int) -> list[float]:
        return _timed(lambda: self._ray.get(self._one.give.remote(nbytes)).nbytes, times)

    def hand_over(self, nbytes: int, times: int) -> list[float]:
        return _timed(lambda: self._ray.get(self._four[1].take.remote(self._one.give.remote(nbytes))), times)

    def loop(self, nbytes: int, times: int) -> list[float]:
        generators, trainers = self._four, [*self._four[1:], self._four[0]]

        def iterate() -> None:
            samples = [generator.give.remote(nbytes) for generator in generators]
            self._ray.get([each.take.remote(sample) for each, sample in zip(trainers, samples, strict=True)])

        return _timed(iterate, times)

    def close(self) -> None:
        self._ray.shutdown()
        self._stack.close()


class _Target:
    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}

    def echo(self, value: Any) -> Any:
        return value

    def take(self, array: Any) -> int:
        return int(array.nbytes)

    def give(self, nbytes: int) -> Any:
        import numpy as np

        if nbytes not in self._arrays:
            self._arrays = {nbytes: np.ones(nbytes, np.uint8)}
        return self._arrays[nbytes]


def _timed(call: Any, times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    # Pickles actors by value, so that Ray's workers need not import this module.
    sys.modules["__main__"].__dict__.setdefault("__spec__", None)
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    serve(RayClient())
    leave()
