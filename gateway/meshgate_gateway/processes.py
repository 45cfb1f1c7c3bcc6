"""Processes that the gateway starts: their output, their end and its reason, and whatever they leave behind.

Each is the leader of a session of its own. So a Ctrl-C at a terminal reaches the gateway alone, which then ends
them in order, and what such a process started can be found by its session after it died.
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
from pathlib import Path

__all__ = ["Child", "Exit", "kill_session"]

TAIL = 64 * 1024
MAX_LINE = 8 * 1024
CHUNK = 64 * 1024
OUTPUT_GRACE = 0.5  # seconds that output may still come after the exit, where a descendant holds the pipe


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended and the last it wrote, at most 64 KiB."""

    code: int
    output: str

    @property
    def reason(self) -> str:
        """``was killed by SIGKILL`` or ``ended with exit code 3``."""
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        try:
            return f"was killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"was killed by signal {-self.code}"


class Child:
    """One process started here. Its stdout and stderr go line by line to ``on_line``; the tail is kept."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
        on_line: Callable[[str], None],
    ) -> None:
        """Starts it, at once. Raises OSError where that is not possible."""
        self._loop = asyncio.get_running_loop()
        self._output, theirs = os.pipe()
        os.set_blocking(self._output, False)
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=tuple(descriptors),
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
            )
        except OSError:
            os.close(self._output)
            raise
        finally:
            os.close(theirs)
        self._lines = _Lines(on_line)
        self._exited = asyncio.Event()
        self._output_ended = asyncio.Event()
        self._loop.add_reader(self._output, self._read_output)
        _call_on_exit(self._process, self._exited.set)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return not self._exited.is_set()

    async def wait(self) -> Exit:
        """Waits for the exit and for the output before it. Any number may wait."""
        await self._exited.wait()
        try:
            await asyncio.wait_for(self._output_ended.wait(), OUTPUT_GRACE)
        except asyncio.TimeoutError:
            self._end_output()
        return Exit(self._process.returncode, self._lines.tail())

    async def end(self, grace: float) -> Exit:
        """Waits up to ``grace`` seconds for the exit, kills; then kills what is left of its session."""
        try:
            await asyncio.wait_for(self._exited.wait(), grace)
        except asyncio.TimeoutError:
            self.signal(signal.SIGKILL)
        await self._exited.wait()
        kill_session(self.pid)
        return await self.wait()

    def signal(self, signum: signal.Signals) -> None:
        """Harmless after the exit: a number that may have been reused is not signalled."""
        if self.running:
            self._process.send_signal(signum)

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
    """Output in pieces, as lines of a bounded length, and the last of it."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""
        self._kept: deque[str] = deque()
        self._kept_length = 0

    def feed(self, data: bytes) -> None:
        self._take(self._decoder.decode(data))

    def end(self) -> None:
        self._take(self._decoder.decode(b"", final=True))
        if self._partial:
            self._on_line(self._partial)
            self._partial = ""

    def tail(self) -> str:
        return "".join(self._kept)[-TAIL:]

    def _take(self, text: str) -> None:
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
    """Calls ``callback`` on the running loop once the process has ended and is reaped."""
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


def kill_session(leader: int, mark: str | None = None) -> int:
    """Kills every process of the session that ``leader`` led, and every one with ``mark`` in its environment.

    The mark (``NAME=value``) finds those that left the session. Returns how many it killed. Only Linux tells
    sessions apart well enough; elsewhere it does nothing.
    """
    if sys.platform != "linux":
        return 0
    killed = 0
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            pidfd = os.pidfd_open(int(entry))
        except OSError:
            continue
        try:
            # Asked only after the pidfd is open: what it refers to cannot change any more.
            if _belongs(int(entry), leader, mark):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                killed += 1
        except OSError:  # gone meanwhile, or another user's
            continue
        finally:
            os.close(pidfd)
    return killed


def _belongs(pid: int, leader: int, mark: str | None) -> bool:
    if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
        return False
    if os.getsid(pid) == leader:
        return True
    return mark is not None and mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
