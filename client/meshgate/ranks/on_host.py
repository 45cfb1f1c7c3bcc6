"""The actors that run commands and terminals and forward ports on a host; they need nothing but torchmonarch.

Both share the hub of their process: ``StreamReader`` waits for what happens, and ``StreamWriter``, whose endpoints
return at once, causes it. They return plain values, and errors as texts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import shutil
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from meshgate.ranks.processes import find_marks, siblings, start_guard  # sent along
from meshgate.ranks.streams import WINDOW, Event, Hub  # sent along
from meshgate.serialization.sent_as_source import Actor, SentAsSource, endpoint

STDIN, STDOUT, STDERR = 0, 1, 2
BREAKPOINT_MARK = "meshgate-debug"  # of gateway/meshgate_gateway/engine/on_worker/breakpoints.py
PIPE_SIZE = getattr(fcntl, "F_SETPIPE_SZ", -1)  # Linux only
PROCESS = -1  # the stream of a process's exit
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # exit codes, as a shell's
# Makes standard input the terminal that controls the session, then becomes the command: Ctrl-C works.
TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit(f"cannot run {sys.argv[1]}: {error.strerror}")
"""

_hub = Hub()


class StreamReader(Actor, metaclass=SentAsSource):
    def __init__(self) -> None:
        self._reads = 0

    @endpoint
    def read(self) -> tuple[int, list[tuple[int, str, bytes, int]]]:
        """Waits until something happens. The number of the read is first: replies may overtake each other."""
        events = [(event.stream, event.kind, event.data, event.number) for event in _hub.poll()]
        self._reads += 1
        return self._reads - 1, events


class StreamWriter(Actor, metaclass=SentAsSource):
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._terminal = -1

    @endpoint
    def host(self) -> str:
        return os.environ.get("MESHGATE_HOST_NAME") or socket.gethostname()

    @endpoint
    def run(self, command: Sequence[str], env: Mapping[str, str], workdir: str | None, stdin: bool) -> None:
        """Starts a command. Its exit, or that it cannot be started, is an event."""
        source = subprocess.PIPE if stdin else subprocess.DEVNULL
        process = _start(command, env, workdir, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if process is None:
            return
        self._process = process
        for stream, pipe in ((STDOUT, process.stdout), (STDERR, process.stderr)):
            assert pipe is not None
            reading = _taken(pipe)
            with contextlib.suppress(OSError):  # the user's pipes take too much memory already
                fcntl.fcntl(reading, PIPE_SIZE, WINDOW)  # the command fills it while earlier output travels
            _hub.add(stream, reading=reading)
        if process.stdin is not None:
            _hub.add(STDIN, writing=_taken(process.stdin))
        _watch(process, (STDOUT, STDERR))

    @endpoint
    def open_terminal(
        self, command: Sequence[str], env: Mapping[str, str], workdir: str | None, rows: int, columns: int
    ) -> None:
        """Starts a command, or the user's shell, on a new terminal; ``STDIN`` is its stream in both directions."""
        ours, theirs = pty.openpty()
        _set_size(ours, rows, columns)
        shell = os.environ.get("SHELL", "")
        command = list(command) or [shell if os.access(shell, os.X_OK) else shutil.which("bash") or "/bin/sh", "-i"]
        command = [sys.executable, "-I", "-S", "-c", TAKE_TERMINAL, *command]
        process = _start(command, env, workdir, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        if process is None:
            os.close(ours)
            return
        self._process = process
        _hub.add(STDIN, reading=ours, writing=ours)
        self._terminal = os.dup(ours)
        _watch(process, (STDIN,))

    @endpoint
    def resize(self, rows: int, columns: int) -> None:
        """Tells the programs on the terminal its new size."""
        if self._process is not None and self._process.returncode is None:
            _set_size(self._terminal, rows, columns)

    @endpoint
    def signal(self, number: int) -> None:
        """Sends a signal to the command and what it started in its process group."""
        if self._process is not None and self._process.returncode is None:  # poll() would reap it, before _watch()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    @endpoint
    def listen(self, stream: int, port: int) -> int | str:
        """Listens on loopback; returns the port, or why that failed."""
        try:
            return _hub.listen(stream, port)
        except OSError as error:
            return error.strerror or str(error)

    @endpoint
    def connect(self, stream: int, port: int) -> None:
        _hub.connect(stream, port)

    @endpoint
    def write(self, stream: int, data: bytes) -> None:
        _hub.write(stream, data)

    @endpoint
    def ack(self, stream: int, count: int) -> None:
        _hub.ack(stream, count)

    @endpoint
    def breakpoints(self) -> list[dict[str, Any]]:
        """The threads of this host's processes that have stopped at a breakpoint."""
        found = []
        for pid in siblings():
            for mark, about in find_marks(pid, BREAKPOINT_MARK):
                os.close(mark)
                if about["waiting"]:
                    found.append(about)
        return found

    @endpoint
    def open_dialogue(self, stream: int, pid: int, commands: int, output: int) -> bool:
        """Makes the dialogue with the debugger of a thread a stream; returns whether the process is there."""
        try:
            reading = os.open(f"/proc/{pid}/fd/{output}", os.O_RDONLY | os.O_CLOEXEC)
            writing = os.open(f"/proc/{pid}/fd/{commands}", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return False
        _hub.add(stream, reading=reading, writing=writing)
        return True

    @endpoint
    def close_stream(self, stream: int) -> None:
        _hub.close_stream(stream)


def _start(
    command: Sequence[str],
    env: Mapping[str, str],
    workdir: str | None,
    *,
    stdin: Any,
    stdout: Any,
    stderr: Any,
) -> subprocess.Popen[bytes] | None:
    """The process, in a session of its own; None if it cannot be started, which is then an event."""

    try:
        return subprocess.Popen(
            list(command),
            env={**os.environ, **env},
            cwd=workdir,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    except OSError as error:
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        what = f"the working directory {workdir}" if workdir and not os.path.isdir(workdir) else command[0]
        problem = f"cannot run {what}: {error.strerror}"
    except (TypeError, ValueError) as error:  # such as a null byte in an argument, or a name with "=" in env
        code, problem = NOT_EXECUTABLE, f"cannot run {command[0]!r}: {error}. Correct the command, env or workdir"
    _hub.post(Event(PROCESS, "failed", problem.encode(errors="backslashreplace"), code))
    return None


def _watch(process: subprocess.Popen[bytes], outputs: tuple[int, ...]) -> None:
    """Makes the exit of ``process`` an event. If this process ends first, so does ``process``."""
    guard = start_guard(process.pid)

    def wait() -> None:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not reaped yet: its group id is not reused
        guard.kill()
        code = process.wait()
        guard.communicate()
        _hub.exited(PROCESS, code if code >= 0 else 128 - code, outputs)

    threading.Thread(target=wait, daemon=True).start()


def _taken(pipe: Any) -> int:
    """The descriptor of a pipe, without the object that would close it."""
    descriptor = os.dup(pipe.fileno())
    os.set_inheritable(descriptor, False)
    pipe.close()
    return descriptor


def _set_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class AdminStarter(Actor, metaclass=SentAsSource):
    @endpoint
    def start(self, meshes: Any, address: str) -> tuple[str, str]:
        """Starts the server, which ends with this process. Returns its URL on this host, or what went wrong."""
        from monarch._src.actor.host_mesh import _spawn_admin  # noqa: PLC0415 - only on hosts

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # it prints URLs that do not work on the laptop
        try:
            url, _ = _spawn_admin(meshes, admin_addr=address).get()
        except Exception as error:  # noqa: BLE001 - reported to the laptop
            return "", str(error)
        return str(url), ""
