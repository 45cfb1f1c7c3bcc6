"""Actors that say what their process is like, or end it.

They are apart from the tests, since each rank imports the module of its actors. One of tests, which imports pytest,
takes a rank 0.3 s of processor time more, as much as all the rest of its start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import meshgate as kt
from meshgate import Actor, current_rank, endpoint
from meshgate_sync.store.place import default_home

RELEASED = threading.Event()  # of this process, where the threads of a FakeJob cannot be killed


class Probe(Actor):
    def __init__(self, start: int = 0, failing_rank: int | None = None) -> None:
        if failing_rank in (-1, current_rank().rank):
            raise ValueError("start is negative")
        self.count = start

    @endpoint
    def add(self, amount: int) -> int:
        self.count += amount
        return self.count

    @endpoint
    def where(self) -> tuple[int, dict[str, int]]:
        return current_rank().rank, kt.current_size()

    @endpoint
    def rank_number(self) -> int:
        return int(current_rank().rank)

    @endpoint
    def fail_on(self, *ranks: int) -> str:
        if current_rank().rank in ranks:
            raise KeyError("no such key")
        return "done"

    @endpoint
    def end_on(self, rank: int, error: type[BaseException]) -> str:
        if current_rank().rank == rank:
            if error is SystemExit:
                sys.exit(3)
            raise error("ended")
        return "done"

    @endpoint
    def sleep(self, port: kt.Port[str]) -> None:
        """Until another actor of the process is asked to release it; for a minute at most."""
        RELEASED.clear()
        port.send("asleep")
        RELEASED.wait(60.0)

    @endpoint
    def sleep_or_fail(self, port: kt.Port[str], failing: int) -> None:
        """As ``sleep``, except for the rank ``failing``."""
        if current_rank().rank == failing:
            raise KeyError("no such key")
        RELEASED.clear()
        port.send("asleep")
        RELEASED.wait(60.0)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def release(self) -> None:
        RELEASED.set()

    @endpoint
    def send(self, port: kt.Port[int], count: int) -> None:
        for number in range(count):
            port.send(number)

    @endpoint
    def refuse(self, port: kt.Port[int]) -> None:
        port.exception(LookupError("no"))


class Announcing(Actor):
    def __init__(self, port: kt.Port[str]) -> None:
        port.send("started")
        self._port = port

    @endpoint
    def announce(self, text: str) -> None:
        self._port.send(text)


class AsyncProbe(Actor):
    @endpoint
    async def end(self) -> None:
        sys.exit(3)


def refuse_to_start() -> None:
    raise ValueError("no device")


class Process(Actor):
    @endpoint
    def setting(self, name: str) -> Any:
        from monarch.config import get_global_config

        return get_global_config()[name]

    @endpoint
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def cpus(self) -> list[int]:
        return sorted(os.sched_getaffinity(0))

    @endpoint
    def nested_environment(self, name: str) -> str | None:
        from monarch.actor import this_host

        nested = this_host().spawn_procs().spawn("nested", Process)
        value: str | None = nested.environment.call_one(name).get()
        return value

    @endpoint
    def environment_on(self, hosts: Any, name: str) -> str | None:
        value: str | None = hosts.spawn_procs().spawn("on", Process).environment.call_one(name).get()
        return value


class Inspector(Actor):
    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def read(self, path: str) -> str:
        return Path(path).read_text()

    @endpoint
    def write(self, path: str, text: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)

    @endpoint
    def modes(self, *names: str) -> list[str]:
        """The modes of files in the host's home."""
        return [oct(Path(os.environ["MESHGATE_HOME"], name).stat().st_mode & 0o777) for name in names]

    @endpoint
    def names(self, directory: str) -> int:
        """The number of entries of a directory in the host's home."""
        return len(os.listdir(os.path.join(os.environ["MESHGATE_HOME"], directory)))

    @endpoint
    def wait_released(self, directory: str, module: str) -> None:
        """Waits until no process uses the copies in a directory of the host's home, except that of ``module``."""
        own = str(__import__(module).__file__)
        for copy in Path(os.environ["MESHGATE_HOME"], directory).iterdir():
            if copy.name not in own:
                handle = os.open(copy, os.O_RDONLY)
                fcntl.flock(handle, fcntl.LOCK_EX)
                os.close(handle)

    @endpoint
    def executable(self, path: str) -> bool:
        return os.access(path, os.X_OK)

    @endpoint
    def value_of(self, module: str) -> Any:
        return __import__(module).VALUE


class Reader(Actor):
    """Reads synced files on the host."""

    @endpoint
    def read(self, name: str) -> str:
        return next(Path(path, name).read_text() for path in sys.path if Path(path, name).is_file())

    @endpoint
    def remove_snapshots(self) -> None:
        """Removes every version of this host, as a person may who needs the space."""
        shutil.rmtree(Path(default_home(), "snapshots"))
        Path(default_home(), "snapshots").mkdir()

    @endpoint
    def end_siblings(self) -> int:
        """Kills the other processes of this host: its relay."""
        siblings = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                pid, _, rest = stat.read_text(errors="replace").partition(" ")
            except OSError:  # a process of another test has ended
                continue
            if rest.rpartition(")")[2].split()[1] == str(os.getppid()) and int(pid) != os.getpid():
                siblings.append(int(pid))
        for pid in siblings:
            os.kill(pid, signal.SIGKILL)
        return len(siblings)
