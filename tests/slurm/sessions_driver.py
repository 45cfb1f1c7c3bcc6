"""``python -m tests.slurm.sessions_driver NAME DIRECTORY FILE``: a driver of a detached session, to be killed."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import meshgate as kt
from tests.slurm.actors import Trainer
from tests.slurm.cluster import small_job

CALLS = 3
READY = "the driver is ready"


def main(name: str, directory: str, saved: str) -> None:
    job = small_job({"workers": 1}, name, Path(directory), detached="train")
    trainers = job.state(saved).workers.spawn_procs().spawn("trainers", Trainer)
    trainers.node.call_one().get()
    for number in range(CALLS):
        with kt.tag(str(number)):
            trainers.node.call_one()
    trainers.node.call_one().get()
    print(READY, file=sys.stderr, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
