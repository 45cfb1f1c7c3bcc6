"""A terminal on a host: what is typed here goes there, and what programs there print appears here."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import select
import signal
import struct
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshgate.ranks.host_streams import HostStreams, spawn_streams
from meshgate.ranks.on_host import PROCESS, STDIN

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy

MAX_INPUT = 4096


def run_shell(
    hosts: HostMeshProxy,
    rank: int,
    command: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
) -> int:
    """Runs ``command`` (default: the user's shell there) on a terminal and returns its exit code.

    Raises ValueError if standard input is not a terminal or the rank is unknown, and the session's errors.
    """
    if not isinstance(rank, int) or rank not in range(len(hosts)):
        raise ValueError(f"rank={rank!r}: the mesh has ranks 0 to {len(hosts) - 1}")
    terminal_in, terminal_out = sys.stdin.fileno(), sys.stdout.fileno()
    if not os.isatty(terminal_in):
        raise ValueError("shell() needs a terminal as standard input; use exec() to run a command without one")
    environment = {"TERM": os.environ.get("TERM", "xterm-256color"), **(env or {})}
    with contextlib.ExitStack() as stack:
        host = spawn_streams(hosts, [rank], "shell", stack)[rank]
        rows, columns = _size(terminal_out)
        host.writer.open_terminal.broadcast(list(command), environment, workdir, rows, columns)
        stack.enter_context(_raw(terminal_in))
        stack.enter_context(_forwarding_input(terminal_in, host.writer))
        stack.enter_context(_on_resize(lambda: host.writer.resize.broadcast(*_size(terminal_out))))
        host.start()
        return _show_output(host, terminal_out)


def _show_output(host: HostStreams, terminal: int) -> int:
    """Writes what arrives to ``terminal`` until the command ends; returns its exit code."""
    while True:
        try:
            each, future = host.arrivals.get(timeout=1.0)  # so that signal handlers run
        except queue.Empty:
            continue
        for event in each.take(future):
            if event.kind == "data":
                _write_all(terminal, event.data)
                host.writer.ack.broadcast(event.stream, len(event.data))
            elif event.stream == PROCESS:
                if event.kind == "failed":
                    _write_all(terminal, event.data + b"\r\n")
                return event.number


def _write_all(terminal: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(terminal, data) :]
        except BlockingIOError:  # the terminal is shared with a program that made it non-blocking
            select.select([], [terminal], [])


def _size(terminal: int) -> tuple[int, int]:
    """Rows and columns."""
    try:
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8)))
    except OSError:  # output goes to a file
        return 24, 80
    return rows or 24, columns or 80


@contextlib.contextmanager
def _raw(terminal: int) -> Iterator[None]:
    """Every key goes to the host, Ctrl-C too."""
    before = termios.tcgetattr(terminal)
    tty.setraw(terminal)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSAFLUSH, before)


@contextlib.contextmanager
def _forwarding_input(terminal: int, writer: Any) -> Iterator[None]:
    """Sends what is typed, from a thread, so that output is shown meanwhile."""
    stopping, stop = os.pipe()

    def read() -> None:
        while True:
            readable, _, _ = select.select([terminal, stopping], [], [])
            if stopping in readable:
                return
            data = os.read(terminal, MAX_INPUT)
            writer.write.broadcast(STDIN, data or b"\x04")  # Ctrl-D at the end of the input
            if not data:
                return

    thread = threading.Thread(target=read, name="meshgate-shell-input", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(stop)
        thread.join()
        os.close(stopping)


@contextlib.contextmanager
def _on_resize(resized: Callable[[], None]) -> Iterator[None]:
    """Calls ``resized`` when the terminal has a new size. Only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGWINCH, lambda *_: resized())
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
