"""The actor that reads the Python stacks of the processes on a host; it needs nothing but torchmonarch.

``meshgate_gateway/engine/on_worker/stacks.py`` describes the two ways to ask a process. The interpreter of a training
script is asked the second way only (``serve_script_stacks``).
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import re
import secrets
import signal
import time
from typing import Any

from meshgate.ranks.processes import SCRIPT_MARK, STACKS_MARK, find_marks, siblings  # sent along
from meshgate.serialization.sent_as_source import Actor, SentAsSource, endpoint

SILENT = "it has ended, or is stopped, and does not answer"
TAKEN = "its own handler of the signal SIGRTMAX-3 takes the place of the one that shows its stack"
POLL_INTERVAL = 0.005  # seconds; a file has no event to wait for
MAX_ANSWERS = 8 << 20  # bytes of earlier answers that are kept
_HEADING = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


class StackReader(Actor, metaclass=SentAsSource):
    @endpoint
    def start_debugpy(self, mesh: str, rank: int, timeout: float) -> dict[str, Any]:
        """Starts debugpy in process ``rank`` of the proc mesh ``mesh``: its ``port`` and ``roots``, or a ``problem``.
        Empty if the process is not on this host."""
        for process in filter(None, map(_Process.find, siblings())):
            try:
                if (process.about["mesh"], process.about["rank"]) == (mesh, rank):
                    return process.start_debugpy(time.monotonic() + timeout)
            finally:
                process.close()
        return {}

    @endpoint
    def read(self, timeout: float) -> list[dict[str, Any]]:
        """What each process of this host runs: ``session``, ``mesh``, ``rank``, ``host``, ``pid``, ``threads`` and
        ``tasks``, or a ``problem``, and whether it is a training ``script``. ``timeout`` is how long, in seconds, a
        process has to answer the first way, and then the second."""
        linecache.checkcache()
        asked = [
            process
            for pid in siblings()
            for name in (STACKS_MARK, SCRIPT_MARK)
            if (process := _Process.find(pid, name)) is not None
        ]
        try:
            for process in asked:
                process.ask()
            deadline = time.monotonic() + timeout
            return [process.answer(deadline, timeout) for process in asked]
        finally:
            for process in asked:
                process.close()


class _Process:
    """A process whose stacks can be read."""

    def __init__(self, pid: int, answers: int, about: dict[str, Any], start: int, mark: str) -> None:
        self.pid, self.answers, self.about, self.mark = pid, answers, about, mark
        self.start = start  # the size of the first line
        self.request = secrets.token_hex(4).encode()

    @classmethod
    def find(cls, pid: int, mark: str = STACKS_MARK) -> _Process | None:
        """None if the process has no such mark, or inherited it, or has ended."""
        for answers, about in find_marks(pid, mark):
            start = len(os.pread(answers, 65_536, 0).partition(b"\n")[0]) + 1
            return cls(pid, answers, about, start, mark)
        return None

    def close(self) -> None:
        os.close(self.answers)

    def ask(self) -> None:
        if self.mark == SCRIPT_MARK:
            return
        with contextlib.suppress(OSError):  # it has ended, which the answer says
            ask = os.open(f"/proc/{self.pid}/fd/{self.about['ask']}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(ask, self.request)
            finally:
                os.close(ask)

    def start_debugpy(self, deadline: float) -> dict[str, Any]:
        self.request = b"D" + self.request[1:]
        self.ask()
        while time.monotonic() < deadline:
            line = self._line()
            if line is not None:
                found: dict[str, Any] = json.loads(line)
                return found
            time.sleep(POLL_INTERVAL)
        return {"problem": "the process does not answer; it has ended, is stopped, or runs C code"}

    def answer(self, deadline: float, timeout: float) -> dict[str, Any]:
        found = {name: self.about[name] for name in ("session", "mesh", "rank", "host", "pid")}
        found["script"] = self.mark == SCRIPT_MARK
        while not found["script"]:
            line = self._line()
            if line is not None:
                return {**found, **json.loads(line)}
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_INTERVAL)
        text, problem = self._dump(time.monotonic() + timeout)
        if problem:
            return {**found, "problem": problem}
        if found["script"]:
            return {**found, "threads": [_with_lines(thread) for thread in parse_dump(text)]}
        note = "C code holds the interpreter's lock, so tasks and names of threads are unknown"
        return {**found, "threads": parse_dump(text), "tasks": [], "note": note}

    def _line(self) -> bytes | None:
        data = self._read(self.start)
        _, found, rest = data.partition(self.request)
        line, end, _ = rest.partition(b"\n")
        return line if found and end else None

    def _read(self, position: int) -> bytes:
        data = b""
        while more := os.pread(self.answers, 1 << 20, position + len(data)):
            data += more
        return data

    def _dump(self, deadline: float) -> tuple[str, str]:
        """What ``faulthandler`` writes, or a problem. A second signal follows the first: as soon as its output begins,
        with a thread that the first has named, that of the first is complete."""
        position = os.fstat(self.answers).st_size
        if position > MAX_ANSWERS:
            os.truncate(f"/proc/self/fd/{self.answers}", self.start)
            position = self.start
        signals = 0
        while time.monotonic() < deadline:
            lines = self._read(position).decode(errors="replace").splitlines()
            headings = [(index, match[1]) for index, line in enumerate(lines) if (match := _HEADING.match(line))]
            repeated = next((index for index, ident in headings[1:] if ident == headings[0][1]), None)
            if repeated is not None:
                return "\n".join(lines[:repeated]), ""
            if signals == 0 or (signals == 1 and headings):
                if problem := self._signal():
                    return "", problem
                signals += 1
            time.sleep(POLL_INTERVAL)
        return "", SILENT

    def _signal(self) -> str:
        """Why the signal is not sent, or "". Another process may have the pid since this one has ended, or this one a
        handler of its own; the signal would end them, or run that."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return SILENT
        try:
            # Checked once the descriptor is open: from then on it refers to the same process.
            same = _Process.find(self.pid, self.mark)
            if same is not None:
                same.close()
            if same is None or (same.about != self.about and not same.about.get("taken")):
                return SILENT
            if same.about.get("taken") or not catches(self.pid, self.about["signal"]):
                return TAKEN
            signal.pidfd_send_signal(descriptor, self.about["signal"])
        except ProcessLookupError:
            return SILENT
        finally:
            os.close(descriptor)
        return ""


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal. True if it has ended."""
    try:
        with open(f"/proc/{pid}/status", errors="replace") as file:
            mask = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
    except OSError:
        return True
    return bool(int(mask, 16) >> number - 1 & 1)


def _with_lines(thread: dict[str, Any]) -> dict[str, Any]:
    """The thread with the text of each line, which the signal does not tell."""
    frames = [(file, line, name, linecache.getline(file, line).strip()) for file, line, name, _ in thread["frames"]]
    return {**thread, "frames": frames}


def parse_dump(text: str) -> list[dict[str, Any]]:
    """The threads in what ``faulthandler`` writes, outermost frame first."""
    threads: list[dict[str, Any]] = []
    for line in text.splitlines():
        if match := _HEADING.match(line):
            threads.append({"name": f"thread {match[1]}", "frames": []})
        elif threads and (match := _FRAME.match(line)):
            threads[-1]["frames"].insert(0, (match[1], int(match[2]), match[3], ""))
    return threads
