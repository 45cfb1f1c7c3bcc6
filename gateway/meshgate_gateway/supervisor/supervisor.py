"""Runs a server as a child process, and holds what must outlive it.

Engines and hosts are children of the supervisor. If the server dies, they and their channels stay, and a new server
takes over where the old one was. If the supervisor itself ends, everything that it holds is closed, and every process
of the gateway ends by itself.

The server is forked, not executed: a new one starts in milliseconds, with the imports and the state that the supervisor
has.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from meshgate_processes.identity import exit_text

MIN_SERVICE_TIME = 1.0  # seconds; a server that serves for less counts as failed
MAX_FAILURES = 10  # servers in a row that failed
FIRST_DELAY = 0.1  # seconds from a second failure in a row to the next server; doubles with each further one
MAX_DELAY = 2.0
REQUEST_TIMEOUT = 10.0  # seconds for the rest of a request; a server that is frozen in between is killed
END_TIMEOUT = 8.0  # seconds that engines and hosts have to end once nothing holds them
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
Note: TypeAlias = "dict[str, Any]"
"""What a server wants its successor to know: JSON."""

MAX_DESCRIPTORS = 64
_HEAD = struct.Struct("!I")


# The messages between a server and its supervisor: JSON over a unix stream socket, with file descriptors attached.
#
# The server sends requests; the supervisor answers only ``start``. Both ends block: messages are small, and the
# supervisor does nothing that takes time.


def send_message(connection: socket.socket, message: Note, descriptors: Sequence[int] = ()) -> None:
    """Raises OSError if the peer is gone."""
    data = json.dumps(message).encode()
    socket.send_fds(connection, [_HEAD.pack(len(data))], descriptors)
    connection.sendall(data)


def receive_message(connection: socket.socket) -> tuple[Note, list[int]] | None:
    """The next message and its descriptors, which the caller must close. None once the peer is gone, even if it died
    in the middle of a message."""
    try:
        head, descriptors, _, _ = socket.recv_fds(connection, _HEAD.size, MAX_DESCRIPTORS)
        rest = _receive(connection, _HEAD.size - len(head)) if head else None
        data = None if rest is None else _receive(connection, _HEAD.unpack(head + rest)[0])
    except ConnectionError:
        return None
    if data is None:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return json.loads(data), list(descriptors)


def _receive(connection: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 16))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def command_with_descriptors(command: Sequence[str], descriptors: Sequence[int]) -> list[str]:
    """``command`` with the number of a descriptor for each argument ``fd:0``, ``fd:1`` and so on."""
    numbers = {f"fd:{index}": str(descriptor) for index, descriptor in enumerate(descriptors)}
    return [numbers.get(argument, argument) for argument in command]


@dataclass(slots=True)
class KeptDescriptors:
    """Descriptors that a server wants to outlive it, and what its successor must know about them."""

    note: Note
    descriptors: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Child:
    """A process that a server started. ``status`` is a pipe that its exit code is written to."""

    note: Note
    process: subprocess.Popen[bytes]
    output: int
    status: int
    status_writer: int
    kept: list[int]
    exit_code: int | None = None

    @property
    def pid(self) -> int:
        return self.process.pid


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What a server starts with. ``predecessor`` is how the last server ended, or None for the first one."""

    link: socket.socket
    supervisor_pid: int
    children: dict[str, Child]
    kept: dict[str, KeptDescriptors]
    predecessor: str | None


def supervise(serve: Callable[[Inheritance], None], remove_at_end: Path | None = None) -> NoReturn:
    """Runs ``serve`` in a child process until it returns, and again if it dies; then exits as it did.

    Before it exits, it waits until its other children have ended, and removes ``remove_at_end``.
    What this process has imported, it shares with all servers.
    """
    gc.freeze()  # a garbage collection would copy the shared memory
    gc.enable()
    supervisor = _Supervisor(serve)
    code = supervisor.run()
    if remove_at_end is not None:
        supervisor.end_children()
        _remove(remove_at_end)
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler to replace
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        os._exit(128 - code)  # as the first process of a container, which such a signal does not end
    os._exit(code)


class _Supervisor:
    def __init__(self, serve: Callable[[Inheritance], None]) -> None:
        self._serve = serve
        self._children: dict[str, Child] = {}
        self._forgotten: list[subprocess.Popen[bytes]] = []
        self._kept: dict[str, KeptDescriptors] = {}
        self._wake, self._wake_writer = os.pipe()
        for end in (self._wake, self._wake_writer):
            os.set_blocking(end, False)
        self._link: socket.socket | None = None
        self._server = 0  # its pid
        self._server_code: int | None = None
        self._serving_since: float | None = None
        self._stop_signal: int | None = None

    def run(self) -> int:
        """The exit code of the last server; negative for a signal."""
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        for signum in SIGNALS:
            signal.signal(signum, lambda *_: None)
        predecessor: str | None = None
        failures = 0
        has_served = False
        while True:
            self._start_server(predecessor)
            code = self._attend_server()
            served = 0.0 if self._serving_since is None else time.monotonic() - self._serving_since
            has_served = has_served or self._serving_since is not None
            if code == 0 or not has_served or self._stop_signal is not None:
                return code
            failures = failures + 1 if served < MIN_SERVICE_TIME else 0
            predecessor = exit_text(code)
            if failures >= MAX_FAILURES:
                reason = f"{failures} servers in a row failed, the last {predecessor}; see their output above"
                print(f"meshgate_gateway: giving up: {reason}", file=sys.stderr)  # noqa: T201
                return code
            if failures > 1 and not self._pause(min(FIRST_DELAY * 2 ** (failures - 2), MAX_DELAY)):
                return code
            self._kill_forgotten()

    def end_children(self) -> None:
        """Closes what is held, so that children end by themselves, and kills those that still run after a while."""
        for child in self._children.values():
            _close(child.kept)
            child.kept = []
        for key in list(self._kept):
            self._drop(key)
        deadline = time.monotonic() + END_TIMEOUT
        self._reap()
        while (running := self._running()) and (left := deadline - time.monotonic()) > 0:
            if _wait_readable([self._wake], left):
                self._on_signals()
        for process in running:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()

    def _running(self) -> list[subprocess.Popen[bytes]]:
        children = [child.process for child in self._children.values() if child.exit_code is None]
        return children + self._forgotten

    # --- the server -----------------------------------------------------------------------------------------

    def _start_server(self, predecessor: str | None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server_code = self._serving_since = None
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a signal must not meet our handlers in the child
        supervisor = os.getpid()
        self._server = os.fork()
        if self._server == 0:
            self._run_server(Inheritance(theirs, supervisor, self._children, self._kept, predecessor), ours)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
        ours.settimeout(REQUEST_TIMEOUT)
        self._link = ours

    def _run_server(self, inheritance: Inheritance, link: socket.socket) -> NoReturn:
        """In the child."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for signum in SIGNALS:
                signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            os.setpgid(0, 0)  # a Ctrl-C in a terminal reaches the supervisor alone, which passes it on once
            link.close()
            for descriptor in (self._wake, self._wake_writer):
                os.close(descriptor)
            for child in self._children.values():
                if child.exit_code is None:
                    os.close(child.status_writer)
            self._serve(inheritance)
            code = 0
        except SystemExit as request:
            code = _exit_code(request)
        except BaseException:  # noqa: BLE001 - the end of a process
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _attend_server(self) -> int:
        """Serves the server's requests until it has exited. Returns its exit code."""
        while self._server_code is None:
            link = -1 if self._link is None else self._link.fileno()
            readable = _wait_readable([self._wake, link], None)
            if self._wake in readable:
                self._on_signals()
            if self._link is not None and link in readable:
                self._on_request(self._link)
        while self._link is not None:  # what it sent before it died
            self._on_request(self._link)
        return self._server_code

    def _on_signals(self) -> None:
        received = b""
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self._wake, 4096):
                received += more
        for signum in received:
            if signum in (signal.SIGTERM, signal.SIGINT):
                self._stop_signal = signum
                if self._server_code is None and self._server:
                    os.kill(self._server, signum)
        self._reap()

    def _pause(self, seconds: float) -> bool:
        """Waits before the next server; False once the gateway is to stop."""
        deadline = time.monotonic() + seconds
        while self._stop_signal is None and (left := deadline - time.monotonic()) > 0:
            if _wait_readable([self._wake], left):
                self._on_signals()
        return self._stop_signal is None

    # --- its requests ---------------------------------------------------------------------------------------

    def _on_request(self, link: socket.socket) -> None:
        try:
            received = receive_message(link)
        except TimeoutError:  # frozen
            os.kill(self._server, signal.SIGKILL)
            received = None
        if received is None:
            link.close()
            self._link = None
            return
        message, descriptors = received
        kind, key = message["type"], message.get("key", "")
        if kind == "start":
            self._start(link, message, descriptors)
        elif kind == "keep":
            self._drop(key)
            self._kept[key] = KeptDescriptors(message["note"], descriptors)
        elif kind == "drop":
            self._drop(key)
        elif kind == "serving":
            self._serving_since = time.monotonic()
        elif key in self._children:
            self._on_child_request(kind, key, message)

    def _on_child_request(self, kind: str, key: str, message: Note) -> None:
        child = self._children[key]
        if kind == "annotate":
            child.note = message["note"]
        elif kind == "release":
            _close(child.kept)
            child.kept = []
        elif kind == "signal" and child.exit_code is None:
            os.kill(child.pid, message["signal"])
        elif kind == "forget":
            del self._children[key]
            _close([child.output, child.status, *child.kept])
            if child.exit_code is None:
                os.close(child.status_writer)
                self._forgotten.append(child.process)

    def _drop(self, key: str) -> None:
        if kept := self._kept.pop(key, None):
            _close(kept.descriptors)

    def _start(self, link: socket.socket, message: Note, descriptors: list[int]) -> None:
        passed = descriptors[: message["passed"]]
        output, output_writer = os.pipe()
        status, status_writer = os.pipe()
        try:
            process = subprocess.Popen(
                command_with_descriptors(message["command"], passed),
                env=message["environment"],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=output_writer,
                stderr=output_writer,
                start_new_session=True,
            )
        except OSError as error:
            _close([*descriptors, output, status, status_writer])
            self._answer(link, {"error": [error.errno, error.strerror, error.filename]}, [])
            return
        finally:
            os.close(output_writer)
        _close(passed)
        kept = descriptors[message["passed"] :]
        self._children[message["key"]] = Child(message["note"], process, output, status, status_writer, kept)
        self._answer(link, {"pid": process.pid}, [output, status])

    def _answer(self, link: socket.socket, message: Note, descriptors: Sequence[int]) -> None:
        with contextlib.suppress(ConnectionError):  # it has died; its successor finds the child
            send_message(link, message, descriptors)

    # --- exits ----------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Collects every process that has exited: the server, children, and, in a container, orphans of others."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid == self._server:
                self._server_code = code
            for child in self._children.values():
                if child.pid == pid and child.exit_code is None:
                    child.exit_code = child.process.returncode = code
                    os.write(child.status_writer, str(code).encode())
                    os.close(child.status_writer)
            for process in [process for process in self._forgotten if process.pid == pid]:
                process.returncode = code
                self._forgotten.remove(process)

    def _kill_forgotten(self) -> None:
        """Kills what the last server was about to end."""
        for process in self._forgotten:
            os.kill(process.pid, signal.SIGKILL)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _remove(path: Path) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:  # the driver has removed it
        return
    except OSError as error:
        print(f"meshgate_gateway: cannot remove {path}: {error}", file=sys.stderr)  # noqa: T201


def _wait_readable(descriptors: Sequence[int], timeout: float | None) -> list[int]:
    """Those of ``descriptors`` that can be read; negative ones never can."""
    poller = select.poll()  # unlike select, without a limit on the number of a descriptor
    for descriptor in descriptors:
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poller.poll(None if timeout is None else timeout * 1000)]


def _exit_code(request: SystemExit) -> int:
    if request.code is None or isinstance(request.code, int):
        return request.code or 0
    print(request.code, file=sys.stderr)  # noqa: T201 - as Python itself does
    return 1
