"""Runs a command on hosts, or a terminal on one of them.

The output of a command arrives as it is printed, and each host's exit code at the end. What is typed in a terminal goes
to the host, and what programs there print appears here.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import io
import os
import queue
import select
import signal
import struct
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from meshgate.errors import MeshgateError
from meshgate.ranks.host_streams import HostStreams, check_ranks, spawn_streams
from meshgate.ranks.on_host import PROCESS, STDERR, STDIN, STDOUT
from meshgate.ranks.streams import CHUNK, WINDOW
from meshgate.session.futures import FutureProxy

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy

MAX_LINE = 1 << 20  # bytes; a longer line of one of several hosts is printed as several
LOST = 255  # the exit code of a command whose host was lost, as ssh's
MAX_INPUT = 4096


@dataclass(frozen=True, slots=True)
class CommandResult:
    """One host's result. ``returncode`` is 128 plus the signal for a command that a signal ended, 127 or 126 for one
    that could not be started, and 255 if the host was lost; ``error`` says why in the last two cases. ``stdout`` and
    ``stderr`` are empty unless the output was captured."""

    rank: int
    host: str
    returncode: int
    stdout: str = ""
    stderr: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Executed:
    """The results of a command by rank; ``returncode`` is the highest, as in Monarch."""

    results: dict[int, CommandResult]

    @property
    def returncode(self) -> int:
        return max(result.returncode for result in self.results.values())

    def __getitem__(self, rank: int) -> CommandResult:
        return self.results[rank]

    def __iter__(self) -> Iterator[CommandResult]:
        return iter(self.results.values())

    def __len__(self) -> int:
        return len(self.results)


def execute(
    hosts: HostMeshProxy,
    command: Sequence[str],
    ranks: Sequence[int] | int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    capture: bool = False,
    stdin: IO[bytes] | None = None,
    timeout: float | None = None,
) -> Executed:
    """Runs ``command`` on the hosts ``ranks``, until it has ended on all of them. Interrupting it ends the commands."""
    if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
        raise TypeError(f"exec() needs a list of strings such as ['nvidia-smi', '-L'], not {command!r}")
    chosen = check_ranks(ranks, len(hosts))
    deadline = None if timeout is None else time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        streams = spawn_streams(hosts, chosen, "meshgate_exec", stack)
        arrivals: queue.SimpleQueue[Any] = streams[chosen[0]].arrivals
        running = {rank: _Running(streams[rank], capture=capture, labelled=len(chosen) > 1) for rank in chosen}
        for each in running.values():
            each.start(command, env or {}, workdir, stdin=stdin is not None)
        entered = None if stdin is None else _Input(stdin, list(running.values()), arrivals)
        if entered is not None:
            stack.callback(entered.close)
        while any(not each.finished for each in running.values()):
            if entered is not None:
                entered.ask()
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                source, arrived = arrivals.get(timeout=left)
            except queue.Empty:
                late = ", ".join(f"rank {rank}" for rank, each in running.items() if not each.finished)
                raise TimeoutError(f"{command[0]} did not end within {timeout} s on {late}; it was ended") from None
            if source is entered:
                entered.arrived(arrived)
            else:
                running[source.rank].arrived(arrived)
        for each in running.values():
            each.flush()
    return Executed({rank: each.result() for rank, each in running.items()})


class _Input:
    """Sends what ``stdin`` has to all commands. A thread reads it, so that output is shown meanwhile.

    The thread reads a piece each time it is asked to, with a byte in a pipe: no more is under way to a command than it
    has room for. For a file, pipe or terminal it waits in poll(), which the end of that pipe ends: a thread inside of
    ``sys.stdin`` when the interpreter shuts down would abort the process.
    """

    def __init__(self, stdin: IO[bytes], commands: Sequence[_Running], arrivals: queue.SimpleQueue[Any]) -> None:
        self._stdin, self._commands, self._arrivals = stdin, commands, arrivals
        self._reading = False
        asked, self._asking = os.pipe()
        threading.Thread(target=self._read, args=[asked], name="meshgate-exec-input", daemon=True).start()

    def ask(self) -> None:
        """Has the next piece read if there is room for it at every command that still takes input."""
        taking = [each for each in self._commands if each.takes_input and not each.finished]
        if taking and not self._reading and all(each.unwritten < WINDOW for each in taking):
            self._reading = True
            os.write(self._asking, b"x")

    def arrived(self, piece: bytes | Exception) -> None:
        self._reading = False
        if isinstance(piece, Exception):
            raise piece
        for each in self._commands:
            each.send(piece)

    def close(self) -> None:
        os.close(self._asking)

    def _read(self, asked: int) -> None:
        try:
            read = getattr(self._stdin, "read1", self._stdin.read)  # read() of a buffered file waits for all of it
            # Others, such as the response of an HTTP connection, may have more to read than their descriptors tell.
            is_file = isinstance(getattr(self._stdin, "raw", self._stdin), io.FileIO)
            waiting = select.poll()
            for descriptor in (asked, self._stdin.fileno()) if is_file else ():
                waiting.register(descriptor, select.POLLIN)
            while os.read(asked, 1):
                if is_file and any(ready == asked for ready, _ in waiting.poll()):
                    return
                self._arrivals.put((self, read(CHUNK)))
        except Exception as error:  # noqa: BLE001 - raised where it arrives
            self._arrivals.put((self, error))
        finally:
            os.close(asked)


@dataclass(slots=True, eq=False)
class _Running:
    """A command on one host. ``unwritten`` bytes of input were sent that the command has no room for yet."""

    streams: HostStreams
    capture: bool
    labelled: bool
    finished: bool = False
    takes_input: bool = False
    unwritten: int = 0
    host: str = ""
    returncode: int = 0
    error: str = ""
    captured: dict[int, bytearray] = field(default_factory=lambda: {STDOUT: bytearray(), STDERR: bytearray()})
    unfinished: dict[int, bytearray] = field(default_factory=lambda: {STDOUT: bytearray(), STDERR: bytearray()})
    decoders: dict[int, codecs.IncrementalDecoder] = field(
        default_factory=lambda: {
            stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in (STDOUT, STDERR)
        }
    )
    name: FutureProxy[Any] | None = None

    def start(self, command: Sequence[str], env: Mapping[str, str], workdir: str | None, *, stdin: bool) -> None:
        writer = self.streams.writer
        self.name = writer.host.call_one()
        self.takes_input = stdin
        _tell(writer.run, list(command), dict(env), workdir, stdin)
        self.streams.start()

    def send(self, data: bytes) -> None:
        """Sends a piece of input; an empty one is its end."""
        if self.takes_input and not self.finished:
            self.unwritten += len(data)
            self.takes_input = bool(data)
            _tell(self.streams.writer.write, STDIN, data)

    def arrived(self, future: FutureProxy[Any]) -> None:
        if self.finished:
            return
        try:
            events = self.streams.take(future)
            if not self.host and self.name is not None:
                self.host = self.name.get()
        except MeshgateError as error:
            self.finished, self.returncode, self.error = True, LOST, str(error)
            return
        for stream in (STDOUT, STDERR):
            if data := b"".join([event.data for event in events if (event.kind, event.stream) == ("data", stream)]):
                self._output(stream, data)
        for event in events:
            if event.kind in ("exit", "failed"):
                self.finished, self.returncode, self.error = True, event.number, event.data.decode()
            elif event.kind == "wrote":
                self.unwritten -= event.number
            elif event.kind == "closed":
                self.takes_input = False

    def _output(self, stream: int, data: bytes) -> None:
        _tell(self.streams.writer.ack, stream, len(data))
        if self.capture:
            self.captured[stream] += data
        elif self.labelled:
            rest, end = self.unfinished[stream], data.rfind(b"\n") + 1  # only in what is new: all is read once
            if end:
                self._print(stream, bytes(rest) + data[:end])
                rest.clear()
            rest += data[end:]
            while len(rest) > MAX_LINE:
                cut = MAX_LINE
                while rest[cut] & 0xC0 == 0x80 and cut > MAX_LINE - 4:  # in the middle of a character of UTF-8
                    cut -= 1
                self._print(stream, bytes(rest[:cut]) + b"\n")
                del rest[:cut]
        else:
            self._write(stream, data)

    def _print(self, stream: int, data: bytes) -> None:
        label = f"[{self.host} rank {self.streams.rank}] ".encode()
        self._write(stream, b"".join(label + line for line in data.splitlines(keepends=True)))

    def _write(self, stream: int, data: bytes, *, final: bool = False) -> None:
        """Writes to the current ``sys.stdout`` or ``sys.stderr``, which a notebook or a test may have replaced."""
        target = sys.stdout if stream == STDOUT else sys.stderr
        binary = getattr(target, "buffer", None)
        if binary is not None and data:
            target.flush()
            binary.write(data)
            binary.flush()
        elif binary is None and target is not None:  # text, of which a character may arrive in two parts
            target.write(self.decoders[stream].decode(data, final))
            target.flush()

    def flush(self) -> None:
        """Prints the last line if it has no end, and why the command could not run."""
        for stream, data in self.unfinished.items():
            if data:
                self._print(stream, bytes(data) + b"\n")
            self._write(stream, b"", final=True)
        if self.error and not self.capture:
            self._write(STDERR, f"meshgate: rank {self.streams.rank}: {self.error}\n".encode())

    def result(self) -> CommandResult:
        out, err = (self.captured[stream].decode(errors="replace") for stream in (STDOUT, STDERR))
        return CommandResult(self.streams.rank, self.host, self.returncode, out, err, self.error)


def _tell(endpoint: Any, *arguments: Any) -> None:
    """Sends a message to a host. The next read says why if the host is lost."""
    with contextlib.suppress(MeshgateError):
        endpoint.broadcast(*arguments)


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
        host = spawn_streams(hosts, [rank], "meshgate_shell", stack)[rank]
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
