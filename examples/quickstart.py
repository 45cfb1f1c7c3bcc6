"""The quickstart, on this machine: a driver, one websocket, a gateway, and Monarch actors on two hosts.

    python examples/quickstart.py

On a cluster only the job changes: KubernetesJob(...) instead of ProcessJob({"workers": 2}). On GPUs, Compute(gpus=2)
requests two for each host, and each actor puts its model onto the one with the number current_rank()["gpus"].
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from meshgate import Actor, ActorError, ProcessJob, current_rank, endpoint


class Trainer(Actor):
    """Each worker process runs one of these."""

    def __init__(self, speed: int) -> None:
        self.speed = speed
        self.rank = current_rank().rank
        self.samples = 0

    @endpoint
    def train_step(self, batch_size: int) -> str:
        self.samples += batch_size
        print(f"{self.samples} samples seen, in process {os.getpid()}")
        time.sleep(batch_size / self.speed)  # a real trainer would compute
        return f"loss {1 / (self.samples + self.rank):.4f}"

    @endpoint
    def divide(self, by: int) -> float:
        return self.rank / by


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    print(f"\n== {title}")
    started = time.perf_counter()
    yield
    print(f"   ({time.perf_counter() - started:.2f} s)")


def main() -> None:
    with contextlib.ExitStack() as stack:
        with step("Start a job: a gateway and two hosts, as processes of this machine"):
            job = stack.enter_context(ProcessJob({"workers": 2}))
            hosts = job.state().workers
            print(f"   the gateway is at {job.gateway_url}; this program has one websocket to it")
            print(f"   the mesh 'workers': {dict(hosts.sizes)}")

        with step("Spawn two processes on each host and an actor in each; call them and see their output"):
            procs = hosts.spawn_procs(per_host={"gpus": 2})
            trainers = procs.spawn("trainers", Trainer, speed=100)
            losses = trainers.train_step.call(batch_size=32).get()
            print(f"   the mesh of processes: {dict(procs.sizes)}")
            print(f"   the result is a {type(losses).__name__} with a value for each rank:")
            for point, loss in losses.items():
                print(f"     {dict(point)} -> {loss}")

        with step("Call the actors of one host: a slice of the mesh"):
            print(f"   {list(trainers.slice(hosts=1).train_step.call(batch_size=64).get().values())}")

        with step("Call an endpoint that raises"):
            try:
                trainers.divide.call(0).get()
            except ActorError as error:
                print(f"   ActorError with the original exception, {error.__cause__!r}, and this report:")
                print("\n".join(f"   | {line}" for line in str(error).rstrip().splitlines()))
            print(f"   the actors still work: {list(trainers.divide.call(2).get().values())}")

        with step("End the job: its sessions, processes and gateway are gone when this returns"):
            stack.close()


if __name__ == "__main__":
    main()
