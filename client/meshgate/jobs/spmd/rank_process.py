"""The process that runs the script of one rank, with its output and its end.

Sent to workers as source text, so it imports nothing but the standard library and what is sent along.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from meshgate.ranks.guard import start_guard  # sent along

TAIL_BYTES = 16384
DRAIN_TIMEOUT = 5.0  # seconds for a process that left the group and still holds the pipe


class Output:
    """Reads one stream of the process to its end, and copies it to ``descriptor`` (-1: not shown) and to ``file``."""

    def __init__(self, descriptor: int, file: str | None, tail: bytearray, lock: threading.Lock) -> None:
        self._descriptor, self._tail, self._lock = descriptor, tail, lock
        self._file = open(file, "wb", buffering=0) if file is not None else None  # noqa: SIM115 - until _copy ends
        self.read_end, self.write_end = os.pipe()
        self._thread = threading.Thread(target=self._copy, name="meshgate-rank-output", daemon=True)

    def start(self) -> None:
        os.close(self.write_end)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(DRAIN_TIMEOUT)

    def _copy(self) -> None:
        while data := os.read(self.read_end, 65536):
            if self._file is not None:
                self._file.write(data)
            with self._lock:
                self._tail += data
                del self._tail[:-TAIL_BYTES]
            with contextlib.suppress(OSError):  # the session has ended, which ends this process too
                while data and self._descriptor >= 0:
                    data = data[os.write(self._descriptor, data) :]
        os.close(self.read_end)
        if self._file is not None:
            self._file.close()


class RankProcess:
    """A script in a process group of its own, which ends with the script and with this process.

    ``files`` are paths for (stdout, stderr), or None; ``shown`` says whether each is also printed here.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        files: Sequence[str | None],
        shown: Sequence[bool],
    ) -> None:
        self._tail, self._tail_lock = bytearray(), threading.Lock()
        outputs = [
            Output(descriptor if show else -1, file, self._tail, self._tail_lock)
            for descriptor, file, show in zip((1, 2), files, shown, strict=True)
        ]
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=outputs[0].write_end,
            stderr=outputs[1].write_end,
            start_new_session=True,
        )
        self._guard = start_guard(self._process.pid)
        self._outputs = outputs
        self._ended = threading.Event()
        self._ending = threading.Lock()
        for output in outputs:
            output.start()

    def wait(self) -> int:
        """The exit code; negative for a signal. Ends what the script has started and left behind."""
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # not reaped yet: its group id is not reused
        with self._ending:
            self._ended.set()
            self._guard.kill()
            self._kill_group(signal.SIGKILL)
            code = self._process.wait()
        self._guard.communicate()
        for output in self._outputs:
            output.join()
        return code

    def stop(self, timeout: float) -> None:
        """Sends SIGTERM, and SIGKILL after ``timeout`` seconds. Returns when the script has ended."""
        with self._ending:
            if self._ended.is_set():
                return
            self._process.send_signal(signal.SIGTERM)
        if self._ended.wait(timeout):
            return
        with self._ending:
            if not self._ended.is_set():
                self._kill_group(signal.SIGKILL)
        self._ended.wait()

    def tail(self) -> str:
        with self._tail_lock:
            return self._tail.decode(errors="replace")

    def _kill_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
