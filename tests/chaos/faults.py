"""The faults. A *survivable* one must cost nothing but time; a *fatal* one must be reported promptly by every call.

Each survivable fault lasts a random time and is over when its function returns.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshgate import MeshgateError, ProcessJob
from meshgate.jobs.local_gateway import JOB_VARIABLE
from meshgate_processes.marks import find_processes
from tests.chaos.actors import Ledger
from tests.chaos.world import World, processes

ANSWER_LIMIT = 60.0


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


# --- survivable -----------------------------------------------------------------------------------------------


def cut(world: World, chance: random.Random) -> None:
    world.proxy.cut()


def cut_in_a_message(world: World, chance: random.Random) -> None:
    world.proxy.cut_after(chance.randrange(1, 3 << 20), chance.choice(["up", "down"]))


def many_cuts(world: World, chance: random.Random) -> None:
    for _ in range(chance.randrange(5, 30)):
        world.proxy.cut()
        _pause(chance.uniform(0, 0.2))


def frozen_connection(longest: float, world: World, chance: random.Random) -> None:
    world.proxy.freeze()
    _pause(chance.uniform(0.1, longest))
    world.proxy.thaw()


def no_connection(world: World, chance: random.Random) -> None:
    world.proxy.refuse()
    _pause(chance.uniform(0.1, 10))
    world.proxy.accept()


def slow_connection(world: World, chance: random.Random) -> None:
    world.proxy.delay = chance.uniform(0.05, 0.5)
    _pause(chance.uniform(1, 5))
    world.proxy.delay = 0.0


def frozen_process(part: str, world: World, chance: random.Random) -> None:
    frozen = world.part(part)
    for process in frozen:
        process.signal(signal.SIGSTOP)
    _pause(chance.uniform(0.1, 5))
    for process in frozen:
        process.signal(signal.SIGCONT)


def killed_process(part: str, world: World, chance: random.Random) -> None:
    for process in world.part(part):
        process.signal(signal.SIGKILL)


Survivable = Callable[[World, random.Random], None]
SURVIVABLE: dict[str, Survivable] = {
    "connection cut": cut,
    "connection cut inside a message": cut_in_a_message,
    "5 to 30 cuts in a row": many_cuts,
    "connection frozen for up to 5 s": partial(frozen_connection, 5.0),
    "connection frozen for up to 25 s": partial(frozen_connection, 25.0),
    "no connection for up to 10 s": no_connection,
    "0.1 to 1 s of round trip for some seconds": slow_connection,
    "server frozen for up to 5 s": partial(frozen_process, "server"),
    "supervisor frozen for up to 5 s": partial(frozen_process, "supervisor"),
    "server killed": partial(killed_process, "server"),
    "engine frozen for up to 5 s": partial(frozen_process, "engine"),
    "hosts frozen for up to 5 s": partial(frozen_process, "host"),
    "driver frozen for up to 5 s": partial(frozen_process, "driver"),
}

# --- fatal ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FatalOutcome:
    """``unanswered``: calls that neither returned nor raised. ``longest``: seconds until the last of them raised.
    ``wrong``: calls to what still runs that failed. ``left_behind``: processes after the job had ended."""

    unanswered: int
    longest: float
    wrong: int
    left_behind: int


@dataclass(frozen=True)
class Fatal:
    """``kill``: ends something of the job. ``survivors``: whether the other host's actors must still answer."""

    kill: Callable[[Any, list[int]], None]
    survivors: bool

    def inject(self) -> FatalOutcome:
        """Kills with calls in flight to every rank of a new job."""
        with ProcessJob({"workers": 2}) as job:
            procs = job.state(cached_path=None).workers.spawn_procs(per_host={"gpus": 2})
            ledgers: Any = procs.spawn("ledgers", Ledger)
            pids = list(ledgers.pid.call().get(timeout=ANSWER_LIMIT).values())
            mark = str(job.apply_id)
            victims = ledgers.slice(hosts=1) if self.survivors else ledgers
            hanging = [victims.hang.call() for _ in range(8)]
            start = time.monotonic()
            self.kill(mark, pids)
            unanswered = sum(not _raises(future) for future in hanging)
            longest = time.monotonic() - start
            wrong = 0
            if self.survivors:
                answers = ledgers.slice(hosts=0).record.call("after", 1).get(timeout=ANSWER_LIMIT)
                wrong = sum(answer != 1 for answer in answers.values())
        return FatalOutcome(unanswered, longest, wrong, len(find_processes(f"{JOB_VARIABLE}={mark}")))


def _raises(future: Any) -> bool:
    try:
        future.get(timeout=ANSWER_LIMIT)
    except MeshgateError:
        return True
    except TimeoutError:
        return False
    return False


def _kill(part: str, mark: str, pids: list[int]) -> None:
    for process in processes(mark, part):
        process.signal(signal.SIGKILL)


def _kill_actor(mark: str, pids: list[int]) -> None:
    os.kill(pids[2], signal.SIGKILL)  # the first process of the second host


def _kill_host(mark: str, pids: list[int]) -> None:
    second = max(processes(mark, "host"), key=lambda process: process.pid)
    second.signal(signal.SIGKILL)


FATAL = {
    "actor process killed": Fatal(_kill_actor, survivors=True),
    "host killed": Fatal(_kill_host, survivors=True),
    "engine killed": Fatal(partial(_kill, "engine"), survivors=False),
}
