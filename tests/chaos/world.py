"""A job, its session's driver behind a network proxy, and the processes that faults act on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from meshgate import ProcessJob
from meshgate.jobs.local_gateway import JOB_VARIABLE
from meshgate.testing import NetworkProxy
from meshgate_processes.identity import ProcessIdentity, identify_process
from meshgate_processes.marks import find_processes

ROOT = Path(__file__).resolve().parents[2]
PARTS = {  # how each part of a job is recognized by its command line
    "engine": re.compile(r"meshgate_gateway\.engine( |$)"),
    "gateway": re.compile(r"-m meshgate_gateway( |$)"),  # the supervisor, and its child, the server
    "host": re.compile(r"-m meshgate_worker( |$)"),
}
END_TIMEOUT = 180.0
LINE = re.compile(r"line (\d+)$")


def processes(mark: str, part: str) -> list[ProcessIdentity]:
    """The processes of the job ``mark`` that are its ``part``."""
    if part in ("server", "supervisor"):
        gateway = processes(mark, "gateway")
        pids = {each.pid for each in gateway}
        return [each for each in gateway if (_parent(each.pid) in pids) == (part == "server")]
    return [each for each in find_processes(f"{JOB_VARIABLE}={mark}") if PARTS[part].search(_command(each.pid))]


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:  # it has ended
        return ""


@dataclass
class Driver:
    """The process that calls the actors, its progress, and the lines that it printed."""

    process: subprocess.Popen[str]
    progress: int
    output: Path
    answered: dict[str, int] = field(default_factory=dict)
    result: dict[str, Any] | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def read(self) -> None:
        """Follows the progress until the driver ends. Runs on a thread of its own."""
        with os.fdopen(self.progress) as lines:
            for line in lines:
                message = json.loads(line)
                with self.changed:
                    self.answered = message.get("answered", self.answered)
                    self.result = message.get("result", self.result)
                    self.changed.notify_all()

    def wait_progress(self, timeout: float) -> float | None:
        """Waits until every way of calling was answered once more; the seconds it took, None for a timeout."""
        start = time.monotonic()
        with self.changed:
            before = dict(self.answered)
            moved = self.changed.wait_for(
                lambda: self.answered and all(count > before.get(way, 0) for way, count in self.answered.items()),
                timeout,
            )
        return time.monotonic() - start if moved else None

    def end(self) -> dict[str, Any]:
        """Ends the workload; its result, with the lines that were lost or doubled. Raises TimeoutExpired."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(END_TIMEOUT)
        printed = [int(found[1]) for line in self.output.read_text().splitlines() if (found := LINE.search(line))]
        result = dict(self.result or {"problems": [f"the driver ended with {self.process.returncode}"]})
        lines = set(range(result.get("lines", 0)))
        result["lost"] = result.get("lost", 0) + len(lines - set(printed))
        result["doubled"] = result.get("doubled", 0) + len(printed) - len(set(printed))
        return result


@dataclass(frozen=True)
class World:
    """What faults act on. ``mark``: the job's value of ``JOB_VARIABLE``."""

    mark: str
    proxy: NetworkProxy
    driver: Driver

    def part(self, name: str) -> list[ProcessIdentity]:
        if name == "driver":
            found = identify_process(self.driver.process.pid)
            return [found] if found is not None else []
        return processes(self.mark, name)


@contextlib.contextmanager
def world() -> Iterator[World]:
    """A job of two hosts, and a driver that calls four actors on them through a network proxy."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        job: Any = stack.enter_context(ProcessJob({"workers": 2}))
        job.apply()
        proxy = stack.enter_context(NetworkProxy("127.0.0.1", urlsplit(job.gateway_url).port or 0))
        token = job._gateway.record.token
        driver = stack.enter_context(start_driver(f"ws://127.0.0.1:{proxy.port}", token, directory / "output"))
        yield World(job.apply_id, proxy, driver)


@contextlib.contextmanager
def start_driver(url: str, token: str, output: Path) -> Iterator[Driver]:
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "tests.chaos.driver", url, token, str(writing)]
    with output.open("w") as printed:
        process = subprocess.Popen(
            command, cwd=ROOT, pass_fds=[writing], stdin=subprocess.PIPE, stdout=printed, text=True
        )
    os.close(writing)
    driver = Driver(process, reading, output)
    reader = threading.Thread(target=driver.read)
    reader.start()
    try:
        yield driver
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()
        reader.join()
