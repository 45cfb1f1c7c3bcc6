"""A driver that ends with its first result, for the start benchmark: ``python -m benchmarks.start``.

Prints one line of JSON: the times ``imported`` and ``result`` of the machine's monotonic clock, which the run compares
with the time at which it started this process.
"""

from __future__ import annotations

import json
import os
import sys
import time


def through_meshgate() -> None:
    from benchmarks.workload import Target
    from meshgate import ProcessJob

    imported()
    job = ProcessJob({"workers": 2})
    hosts = job.state(cached_path=None).workers
    hosts.spawn_procs(per_host={"gpus": 1}).spawn("first", Target).echo.call(1).get()
    result()
    job.kill()


def direct() -> None:
    from monarch.job import ProcessJob

    from benchmarks.workload import Target

    imported()
    job = ProcessJob({"workers": 2})
    hosts = job.state(cached_path=None).workers
    hosts.spawn_procs(per_host={"gpus": 1}).spawn("first", Target).echo.call(1).get()
    result()
    job.kill()


def ray_client(address: str) -> None:
    import ray

    class Target:
        def echo(self, value: int) -> int:
            return value

    imported()
    ray.init(f"ray://{address}", log_to_driver=False)
    actors = [ray.remote(num_cpus=0)(Target).remote() for _ in range(2)]
    ray.get([actor.echo.remote(1) for actor in actors])
    result()
    ray.shutdown()


_times: dict[str, float] = {}


def imported() -> None:
    _times["imported"] = time.monotonic()


def result() -> None:
    _times["result"] = time.monotonic()


if __name__ == "__main__":
    driver, *arguments = sys.argv[1:]
    {"meshgate": through_meshgate, "direct": direct, "ray": ray_client}[driver](*arguments)
    print(json.dumps(_times), flush=True)
    sys.stdout.flush()
    os._exit(0)
