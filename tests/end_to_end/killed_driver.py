"""Kills a driver at random points, many times, and resumes it in a fresh process by ``job.attach()``.

The driver runs a loop as GRPO does: it generates for a step while it trains on the step before, and writes each step
that is done to a journal. At the end every call must have run once, and every line that was printed must have arrived.

    python -m tests.end_to_end.killed_driver --kills 1000

prints what was done as JSON, and exits with 1 if a call or a line was lost, or a call ran twice. The job runs on this
machine, or is the one at MESHGATE_URL.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cloudpickle

import meshgate as kt
from meshgate import Actor, KubernetesJob, ProcessJob, endpoint, job_load

JOB = "job.pkl"
JOURNAL = "journal"  # a line for each step that is done
OUTPUT = "output"  # what the drivers have printed
ERRORS = "errors"
LONGEST_LIFE = 0.8  # seconds until a driver is killed, at most
TIMEOUT = 120.0


class Generator(Actor):
    """Generates for a step."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    @endpoint
    def generate(self, step: int, size: int) -> tuple[int, bytes]:
        self.calls.append(step)
        return step, bytes(size)

    @endpoint
    def called(self) -> list[int]:
        return self.calls


class Trainer(Actor):
    """Trains on what was generated, and prints a line."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    @endpoint
    def train(self, step: int, samples: bytes) -> float:
        self.calls.append(step)
        print(f"<step {step}>", flush=True)
        return step / 2

    @endpoint
    def called(self) -> list[int]:
        return self.calls


def job() -> Any:
    """The job that each driver names. At a URL it has been applied before, and ends with the test."""
    if "MESHGATE_URL" not in os.environ:
        return ProcessJob({"workers": 1}, detached="grpo")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # its workers do not have this module
    found = KubernetesJob(detached="grpo")
    found.apply()
    return found


# --- the driver -------------------------------------------------------------------------------------------------


class Driver:
    """Continues where the journal ends, with what an earlier driver has left."""

    def __init__(self) -> None:
        self.job = job()
        self.session: kt.AttachedSession | None = None
        actors: dict[str, Any] = {}
        procs = None
        if any(session.detached for session in self.job.sessions(JOB)):
            self.session = self.job.attach(cached_path=JOB)
            actors, procs = dict(self.session.actors), self.session.procs.get("procs")
        if procs is None:
            procs = self.job.state(JOB).workers.spawn_procs(name="procs")
        self.generators = actors.get("generators") or procs.spawn("generators", Generator)
        self.trainers = actors.get("trainers") or procs.spawn("trainers", Trainer)

    def call(self, tag: str, target: Any, *args: Any) -> Any:
        """The future of the call with this tag: made by an earlier driver, or now."""
        earlier = self.session.tagged(tag) if self.session is not None else []
        if earlier:
            return earlier[0].future
        with kt.tag(tag):
            return target.call_one(*args)

    def generate(self, step: int) -> Any:
        return self.call(f"generate-{step}", self.generators.generate, step, 100 * (step % 100))

    def run(self) -> None:
        done = Path(JOURNAL).read_text().splitlines() if Path(JOURNAL).exists() else []
        step = len(done)
        generated = self.generate(step)
        with open(JOURNAL, "a") as journal:
            while True:
                following = self.generate(step + 1)
                number, samples = generated.get()
                loss = self.call(f"train-{step}", self.trainers.train, step, samples).get()
                if (number, loss) != (step, step / 2):
                    raise AssertionError(f"step {step} has the result of another: {number}, {loss}")
                journal.write(f"{step}\n")
                journal.flush()
                step, generated = step + 1, following


def run_driver() -> int:
    """Forks a driver; its process knows nothing of an earlier one. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    for name, descriptor in ((OUTPUT, 1), (ERRORS, 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
    try:
        Driver().run()
    except BaseException:  # noqa: BLE001 - reported, and the process must end here
        traceback.print_exc()
    os._exit(1)


# --- the one that kills it --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What many kills have done. ``repeated_lines``: printed by two drivers, since the first was killed too soon to say
    that it had printed them."""

    kills: int
    steps: int
    calls: int
    lost_calls: int
    doubled_calls: int
    lost_lines: int
    repeated_lines: int
    drivers_that_failed: int
    seconds: float

    @property
    def good(self) -> bool:
        return not (self.lost_calls or self.doubled_calls or self.lost_lines or self.drivers_that_failed)


def kill_drivers(kills: int, seed: int, seconds: float = math.inf) -> Outcome:
    """Runs in the working directory, which must be empty. Ends early after ``seconds``."""
    chance = random.Random(seed)
    started = time.monotonic()
    failed = 0
    _wait_for_a_step(run_driver())
    killed = 1
    while killed < kills and time.monotonic() - started < seconds:
        killed += 1
        pid = run_driver()
        time.sleep(chance.uniform(0.0, LONGEST_LIFE))  # any point of the driver's life
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        failed += not os.WIFSIGNALED(status)
    return _check(killed, failed, started)


def _wait_for_a_step(pid: int) -> None:
    """Waits until the job runs and its first step is done, then kills the driver."""
    deadline = time.monotonic() + TIMEOUT
    while not Path(JOURNAL).exists() or not Path(JOURNAL).read_text():
        if time.monotonic() > deadline or os.waitpid(pid, os.WNOHANG) != (0, 0):
            raise AssertionError(f"the first driver did not work: {Path(ERRORS).read_text()}")
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _check(kills: int, failed: int, started: float) -> Outcome:
    """Takes over for the last time, prints what was not printed, and counts."""
    last = job() if "MESHGATE_URL" in os.environ else job_load(JOB)
    try:
        output = os.open(OUTPUT, os.O_WRONLY | os.O_APPEND)
        kept = os.dup(1)
        os.dup2(output, 1)
        try:
            session = last.attach()
            for call in session.calls:
                call.future.get(TIMEOUT)
            generated = session.actors["generators"].called.call_one().get(TIMEOUT)
            trained = session.actors["trainers"].called.call_one().get(TIMEOUT)
            _wait_for_line(trained[-1])
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
            os.close(output)
    finally:
        last.kill()
    lines = Counter(int(number) for number in re.findall(r"<step (\d+)>", Path(OUTPUT).read_text()))
    counts = [Counter(generated), Counter(trained)]
    return Outcome(
        kills=kills,
        steps=len(trained),
        calls=len(generated) + len(trained),
        lost_calls=sum(len(set(range(max(count) + 1)) - set(count)) for count in counts),
        doubled_calls=sum(number - 1 for count in counts for number in count.values()),
        lost_lines=len(set(trained) - set(lines)),
        repeated_lines=sum(lines.values()) - len(lines),
        drivers_that_failed=failed,
        seconds=round(time.monotonic() - started, 1),
    )


def _wait_for_line(step: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while f"<step {step}>" not in Path(OUTPUT).read_text() and time.monotonic() < deadline:
        sys.stdout.flush()
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills a driver at random points and resumes it.")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end early after this time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="meshgate-kills-") as directory:
        os.chdir(directory)
        outcome = kill_drivers(options.kills, options.seed, options.seconds)
        print(json.dumps(asdict(outcome)))
        if outcome.drivers_that_failed:
            print(Path(ERRORS).read_text()[-4000:], file=sys.stderr)
    return 0 if outcome.good else 1


if __name__ == "__main__":
    from tests.end_to_end import killed_driver  # workers import its actors by this name

    sys.exit(killed_driver.main())
