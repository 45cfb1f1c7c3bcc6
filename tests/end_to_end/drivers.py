"""Drivers of detached sessions that tests start as processes of their own, and kill.

``python -m tests.end_to_end.drivers NAME [ARGUMENT…]`` runs one of the functions below. They save their job in the
working directory, and write a line to stderr when they have done what the test waits for.
"""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, NoReturn

import meshgate as kt
from meshgate import Channel, ProcessJob
from tests.end_to_end.actors import Worker
from tests.waiting import wait_for

JOB = "job.pkl"
READY = "the driver is ready"


def new_job() -> ProcessJob:
    return ProcessJob({"workers": 2}, detached="train")


def spawn(job: ProcessJob, path: str | None = JOB) -> Any:
    return job.state(path).workers.spawn_procs(name="procs").spawn("workers", Worker)


def ready() -> None:
    print(READY, file=sys.stderr, flush=True)


def wait_to_be_killed() -> NoReturn:
    while True:
        time.sleep(3600)


def gateway_knows_what_was_read(job: ProcessJob) -> bool:
    (session,) = job.sessions(JOB)
    return session.calls_finished == session.unread_lines == 0


def leave_everything(path: str) -> None:
    """Has calls that are read, unread and in flight, a channel with messages, and output, when it is killed."""
    job = new_job()
    workers = spawn(job)
    worker, other = workers.slice(hosts=0), workers.slice(hosts=1)
    port, receiver = Channel.open(name="numbers")
    worker.send_to.call_one(port, 4).get()
    assert receiver.recv().get() == 0
    with redirect_stdout(StringIO()) as printed:
        worker.say.call_one("printed early").get()
        with kt.tag("read"):
            assert worker.record.call_one(1).get() == 1
        wait_for(lambda: "printed early" in printed.getvalue(), "the output")
        wait_for(lambda: gateway_knows_what_was_read(job), "the gateway to learn what was read")
    print(printed.getvalue(), flush=True)
    with kt.tag("unread"):
        unread = worker.record.call_one(2)
    while not unread.done():
        time.sleep(0.01)
    with kt.tag("in flight"):
        other.wait_for_file.call_one(path)
    with kt.tag("both"):
        workers.add.call(5)
    with kt.tag("stream"):
        workers.rank.stream()
    with kt.tag("fails"):
        worker.fail.call_one("as it must")
    worker.rank.call_one().get()
    ready()
    wait_to_be_killed()


def exit_cleanly(path: str) -> None:
    """Leaves calls behind, and ends by itself at the end of a ``with`` block."""
    with new_job() as job:
        workers = spawn(job)
        with kt.tag("in flight"):
            workers.slice(hosts=1).wait_for_file.call_one(path)
        with kt.tag("unread"):
            workers.slice(hosts=0).record.call_one(2)
        ready()


def bound(path: str) -> None:
    """A job that is not detached, when it is killed."""
    with ProcessJob({"workers": 2}) as job:
        worker = spawn(job, None).slice(hosts=0)
        with open(path, "w") as file:
            file.write(str(worker.pid.call_one().get()))
        ready()
        wait_to_be_killed()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
