"""The main job, on this machine: a driver, one websocket, a gateway, and Monarch actors on two worker hosts.

    python examples/quickstart.py

On a cluster only the job changes: KubernetesJob(...) where this says ProcessJob({"workers": 2}).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from meshgate import Actor, ActorError, ProcessJob, current_rank, endpoint


class Trainer(Actor):
    """One of these lives in each worker process."""

    def __init__(self, speed: int) -> None:
        self.speed = speed
        self.rank = current_rank().rank
        self.samples = 0

    @endpoint
    def train_step(self, batch_size: int) -> str:
        self.samples += batch_size
        print(f"{self.samples} samples seen, in process {os.getpid()}")
        time.sleep(batch_size / self.speed)  # a real one would compute
        return f"loss {1 / (self.samples + self.rank):.4f}"

    @endpoint
    def divide(self, by: int) -> float:
        return self.rank / by


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    print(f"\n== {title}")
    begun = time.perf_counter()
    yield
    print(f"   ({time.perf_counter() - begun:.2f} s)")


def main() -> None:
    with contextlib.ExitStack() as stack:
        with step("A job: one gateway and two worker hosts, all processes of this machine"):
            job = stack.enter_context(ProcessJob({"workers": 2}))
            hosts = job.state().workers
            print(f"   the gateway is at {job.gateway_url}; this program holds one websocket to it")
            print(f"   the mesh 'workers': {dict(hosts.sizes)}")

        with step("Two processes on each host, an actor in each, a call to all of them, and what they print"):
            procs = hosts.spawn_procs(per_host={"gpus": 2})
            trainers = procs.spawn("trainers", Trainer, speed=100)
            losses = trainers.train_step.call(batch_size=32).get()
            print(f"   the mesh of processes: {dict(procs.sizes)}")
            print(f"   the answer is a {type(losses).__name__}, a value for each rank:")
            for point, loss in losses.items():
                print(f"     {dict(point)} -> {loss}")

        with step("A call to the actors of one host: a slice of the mesh"):
            print(f"   {list(trainers.slice(hosts=1).train_step.call(batch_size=64).get().values())}")

        with step("A call that goes wrong over there, on purpose"):
            try:
                trainers.divide.call(0).get()
            except ActorError as error:
                print(f"   ActorError: it carries the original, {error.__cause__!r}, and this report:")
                print("\n".join(f"   | {line}" for line in str(error).rstrip().splitlines()))
            print(f"   the actors live on: {list(trainers.divide.call(2).get().values())}")

        with step("The end of the job: sessions, processes and gateway are gone when this returns"):
            stack.close()


if __name__ == "__main__":
    main()
