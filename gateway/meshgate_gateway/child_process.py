"""Child processes of the gateway: their output, their exit status and the processes they leave behind.

Each child leads a POSIX session of its own. A Ctrl-C in a terminal therefore reaches the gateway alone, which then
stops its children in order; and the descendants of a dead child can be found by their session.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import async_timeout

from meshgate_processes.identity import exit_text, last_output
from meshgate_processes.marks import end_processes

TAIL = 64 * 1024
MAX_LINE = 8 * 1024
CHUNK = 64 * 1024
OUTPUT_TIMEOUT = 0.5  # seconds to wait for output after the exit, in case a descendant holds the pipe open


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended, and the tail of its output (at most 64 KiB)."""

    code: int
    output: str

    @property
    def reason(self) -> str:
        """``was killed by SIGKILL`` or ``ended with exit code 3``."""
        return exit_text(self.code)


class Process(Protocol):
    """A started process. ``output`` is a descriptor with its stdout and stderr, owned by the
    ``ChildProcess``."""

    @property
    def pid(self) -> int: ...

    @property
    def output(self) -> int: ...

    def on_exit(self, callback: Callable[[int], None]) -> None:
        """Calls ``callback`` with the exit code, once, on the running loop."""

    def send_signal(self, signum: signal.Signals) -> None: ...


class _OwnProcess:
    """A child of this process."""

    def __init__(self, process: subprocess.Popen[bytes], output: int) -> None:
        self._process, self.output = process, output
        self.pid = process.pid

    def on_exit(self, callback: Callable[[int], None]) -> None:
        _call_on_exit(self._process, lambda: callback(self._process.returncode))

    def send_signal(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)


def start_process(command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int] = ()) -> Process:
    """Starts a child of this process. Raises OSError."""
    output, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=tuple(descriptors),
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
    except OSError:
        os.close(output)
        raise
    finally:
        os.close(theirs)
    return _OwnProcess(process, output)


class ChildProcess:
    """A started process. ``on_line`` receives its stdout and stderr line by line; the tail is kept."""

    def __init__(self, process: Process, *, on_line: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = process
        self._output = process.output
        os.set_blocking(self._output, False)
        self._lines = _Lines(on_line)
        self._code: int | None = None
        self._exited = asyncio.Event()
        self._output_ended = asyncio.Event()
        self._loop.add_reader(self._output, self._read_output)
        process.on_exit(self._on_exit)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return not self._exited.is_set()

    async def wait(self) -> ExitStatus:
        """Waits for the exit and the remaining output. Several tasks may wait."""
        await self._exited.wait()
        try:
            async with async_timeout.timeout(OUTPUT_TIMEOUT):
                await self._output_ended.wait()
        except asyncio.TimeoutError:
            self._end_output()
        assert self._code is not None
        return ExitStatus(self._code, self._lines.tail())

    async def stop(self, timeout: float) -> ExitStatus:
        """Waits up to ``timeout`` seconds for the exit, then kills the process and what remains of its session."""
        try:
            async with async_timeout.timeout(timeout):
                await self._exited.wait()
        except asyncio.TimeoutError:
            self.signal(signal.SIGKILL)
        await self._exited.wait()
        await asyncio.to_thread(end_processes, session=self.pid)
        return await self.wait()

    def signal(self, signum: signal.Signals) -> None:
        """Sends a signal. Does nothing after the exit, when the pid may have been reused."""
        if self.running:
            self._process.send_signal(signum)

    def _on_exit(self, code: int) -> None:
        self._code = code
        self._exited.set()

    def _read_output(self) -> None:
        try:
            data = os.read(self._output, CHUNK)
        except BlockingIOError:
            return
        if data:
            self._lines.feed(data)
        else:
            self._end_output()

    def _end_output(self) -> None:
        if not self._output_ended.is_set():
            self._output_ended.set()
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._lines.end()


class _Lines:
    """Splits output into lines of bounded length, and keeps its tail."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""
        self._kept: deque[str] = deque()
        self._kept_length = 0

    def feed(self, data: bytes) -> None:
        self._add(self._decoder.decode(data))

    def end(self) -> None:
        self._add(self._decoder.decode(b"", final=True))
        if self._partial:
            self._on_line(self._partial)
            self._partial = ""

    def tail(self) -> str:
        return last_output("".join(self._kept), TAIL)

    def _add(self, text: str) -> None:
        self._kept.append(text)
        self._kept_length += len(text)
        while self._kept_length - len(self._kept[0]) > TAIL:
            self._kept_length -= len(self._kept.popleft())
        *lines, self._partial = (self._partial + text).split("\n")
        while len(self._partial) > MAX_LINE:
            lines.append(self._partial[:MAX_LINE])
            self._partial = self._partial[MAX_LINE:]
        for line in lines:
            if line.strip():
                self._on_line(line.rstrip("\r"))


def _call_on_exit(process: subprocess.Popen[bytes], callback: Callable[[], None]) -> None:
    """Calls ``callback`` on the running loop once the process has exited and is reaped."""
    loop = asyncio.get_running_loop()
    if sys.platform == "linux":
        pidfd = os.pidfd_open(process.pid)

        def on_exit() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            process.wait()
            callback()

        loop.add_reader(pidfd, on_exit)
    else:

        def wait() -> None:
            process.wait()
            loop.call_soon_threadsafe(callback)

        threading.Thread(target=wait, daemon=True).start()
