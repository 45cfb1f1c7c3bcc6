"""One Monarch host process: reports when it is ready, and why it exits.

It exits when a client shuts the host down, on SIGINT, on SIGTERM or, with a notice, once nothing runs on it after
SIGTERM, when the process that started it exits (its lifetime descriptor reaches end of file, even after SIGKILL), or
when Monarch fails. In every case it first ends all its descendants.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from meshgate_processes.marks import end_processes, find_processes, is_sync_agent

COOKIE_VARIABLE = "MESHGATE_HOST_COOKIE"
READY_TIMEOUT = 30.0
POLL_INTERVAL = 0.2  # seconds between two looks at what still runs, after a notice
_USAGE = 2  # the exit code if nothing was started


class AddressError(ValueError):
    """A host cannot serve this address."""


@dataclass(frozen=True, slots=True)
class ListeningAt:
    """A stream socket's family and its address on this machine."""

    family: int
    address: str | tuple[str, int]

    def accepts(self, timeout: float) -> bool:
        """Whether a process accepts connections there. Blocks for at most ``timeout`` seconds."""
        with socket.socket(self.family, socket.SOCK_STREAM) as probe:
            probe.settimeout(timeout)
            try:
                probe.connect(self.address)
            except OSError:
                return False
            return True

    def clear(self, *, directory: bool = False) -> None:
        """Removes a stale unix socket; with ``directory``, also its directory if empty."""
        if isinstance(self.address, str):
            with suppress(OSError):  # absent, or not removable: then Monarch reports why it cannot listen
                Path(self.address).unlink()
            with suppress(OSError):  # another host's socket is still there
                if directory:
                    Path(self.address).parent.rmdir()


def listening_at(address: str) -> ListeningAt:
    """Parses ``ipc://path``, ``tcp://host:port`` or ``tcp://name:port@tcp://0.0.0.0:port``, optionally preceded by
    ``<proc id>@``.

    Raises AddressError, also for abstract sockets (``ipc://@name``): every user of the machine can connect to those,
    and a client that connects to a host can run code on it.
    """
    bind = address.rpartition("@")[2]
    if bind.startswith("ipc://") and (path := bind.removeprefix("ipc://")):
        return ListeningAt(socket.AF_UNIX, path)
    try:
        parts = urlsplit(bind)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise AddressError(f"malformed address {address!r}: {error}") from None
    if parts.scheme != "tcp" or not host or not port:
        raise AddressError(
            f"unsupported address {address!r}: use ipc://<path>, tcp://<host>:<port> "
            f"or tcp://<name>:<port>@tcp://0.0.0.0:<port>"
        )
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return ListeningAt(family, (host, port))


def service_address(address: str, identity: str | None) -> str:
    """The address to serve: ``address`` with the identity derived from the UUID ``identity``.

    Returns ``address`` alone without an identity, and for Monarch 0.7, whose clients attach without one. Raises
    ValueError if ``identity`` is not a UUID.
    """
    service: Any = importlib.import_module("monarch._src.job.service_identity")
    if not identity or not hasattr(service, "service_proc_id_from_uuid"):
        return address
    return str(service.service_proc_addr(address, service.service_proc_id_from_uuid(identity)))


@dataclass(frozen=True, slots=True)
class HostOptions:
    """``cookie``: in the environment of every process of this host. ``grace``: seconds between SIGTERM and SIGKILL for
    descendants. ``notice``: seconds for which these may go on after SIGTERM to this process. ``on_sigterm()`` is called
    on SIGTERM; if it returns True, the host ignores the signal. ``remove_directory``: remove the directory of
    the socket on exit if it is empty."""

    address: str
    name: str
    identity: str | None
    cookie: str
    lifetime_fd: int | None
    ready_fd: int | None
    grace: float
    notice: float = 0.0
    on_sigterm: Callable[[], bool] = lambda: False
    remove_directory: bool = False


@dataclass(frozen=True, slots=True)
class _End:
    code: int
    reason: str


class _EndRequest:
    """The reason to exit, set by signal handlers and Monarch's thread; the main thread waits for it."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._end: _End | None = None
        self.deadline = math.inf  # on the monotonic clock: after SIGTERM with a notice

    def post(self, end: _End) -> None:
        """Sets the reason; the first one is kept. Safe in signal handlers and on any thread."""
        self._end = self._end or end
        os.write(self._write_fd, b"\0")

    def give_notice(self, seconds: float) -> None:
        """The host is to end within ``seconds``. For signal handlers."""
        self.deadline = time.monotonic() + seconds

    def posted(self) -> _End | None:
        return self._end

    def wake_on_signals(self) -> None:
        """Lets ``read_fd`` be readable after each signal. Without that, nothing would handle one that arrives just
        before the main thread begins to wait, or in another thread: handlers run in the main thread, once it runs."""
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)


def serve(options: HostOptions) -> int:
    """Runs the host and returns its exit code. Must be called on the main thread."""
    os.environ[COOKIE_VARIABLE] = options.cookie
    os.environ["HYPERACTOR_PROCESS_NAME"] = options.name
    request = _EndRequest()

    def on_signal(number: int, frame: object) -> None:
        if number == signal.SIGTERM and options.on_sigterm():
            return
        if number == signal.SIGTERM and options.notice > 0 and request.deadline == math.inf:
            request.give_notice(options.notice)
        else:
            request.post(_End(0, signal.Signals(number).name))

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, on_signal)
    request.wake_on_signals()
    end = _start(options, request) or _wait_ready(options, request) or _wait_end(options, request)
    end = end or _End(1, "unknown reason")
    leads_session = os.getsid(0) == os.getpid()  # otherwise the session may be that of a shell
    session = os.getpid() if leads_session else None
    killed = end_processes(_mark(options), session=session, grace=options.grace)
    if end.code != _USAGE:
        listening_at(options.address).clear(directory=options.remove_directory)
    forced = f"; killed {killed} processes that did not end in time" if killed else ""
    log(f"{options.name}: ended: {end.reason}{forced}")
    return end.code


def _mark(options: HostOptions) -> str:
    return f"{COOKIE_VARIABLE}={options.cookie}"


def _still_runs(options: HostOptions) -> bool:
    return any(not is_sync_agent(process) for process in find_processes(_mark(options)))


def _start(options: HostOptions, request: _EndRequest) -> _End | None:
    """Starts Monarch on a thread, or returns why the address cannot be served."""
    try:
        listening = listening_at(options.address)
    except AddressError as error:
        return _End(_USAGE, str(error))
    if listening.accepts(timeout=1.0):  # clients would mistake it for this host
        return _End(_USAGE, f"another process already serves {options.address}: end it or choose another address")
    listening.clear()
    threading.Thread(target=_run_monarch, args=(options, request), daemon=True).start()
    return None


def _run_monarch(options: HostOptions, request: _EndRequest) -> None:
    try:
        from monarch.actor import run_worker_loop_until_shutdown  # noqa: PLC0415  (reads the environment)

        address = service_address(options.address, options.identity)
        run_worker_loop_until_shutdown(address=address, ca="trust_all_connections")
    except BaseException as error:  # noqa: BLE001  (a panic in Monarch is not an Exception)
        request.post(_End(1, f"Monarch failed: {type(error).__name__}: {error}"))
    else:
        request.post(_End(0, "a client shut this host down"))


def _wait_ready(options: HostOptions, request: _EndRequest) -> _End | None:
    """Waits until the host is ready and reports it, or returns why it exits instead."""
    listening = listening_at(options.address)
    deadline = time.monotonic() + READY_TIMEOUT
    while not listening.accepts(timeout=1.0):
        if time.monotonic() > deadline:
            return _End(1, f"Monarch did not listen on {options.address} within {READY_TIMEOUT:.0f} s")
        if end := _wait_end(options, request, timeout=0.002):
            return end
    if options.ready_fd is None:
        log(f"{options.name}: ready at {options.address}")
    else:
        with os.fdopen(options.ready_fd, "w") as ready:
            ready.write(json.dumps({"address": options.address, "cookie": options.cookie}) + "\n")
    return None


def _wait_end(options: HostOptions, request: _EndRequest, timeout: float | None = None) -> _End | None:
    """Waits for the reason to exit; returns None after ``timeout`` seconds (None: no limit).

    After SIGTERM with a notice, that is the notice's end, or that no process is left which a client has started here,
    except sync agents: they serve the processes.
    """
    watched = [request.read_fd] if options.lifetime_fd is None else [request.read_fd, options.lifetime_fd]
    while (end := request.posted()) is None:
        given = request.deadline < math.inf
        if given and (time.monotonic() >= request.deadline or not _still_runs(options)):
            return _End(0, signal.SIGTERM.name)
        readable, _, _ = select.select(watched, [], [], POLL_INTERVAL if given else timeout)
        if not readable and not given:
            return None
        if request.read_fd in readable:
            os.read(request.read_fd, 4096)
            if request.posted() is None and request.deadline < math.inf:
                log(f"{options.name}: SIGTERM: continues for up to {options.notice:g} s while something runs here")
        if options.lifetime_fd in readable and not os.read(options.lifetime_fd, 4096):
            return _End(0, "the process that started this host has exited")
    return end


def log(line: str) -> None:
    print(f"meshgate_worker {line}", file=sys.stderr, flush=True)  # noqa: T201  (a log line)
