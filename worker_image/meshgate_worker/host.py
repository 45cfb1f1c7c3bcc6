"""One Monarch host process: says when it can be attached to, and ends for a reason it tells.

It ends when a client shuts the host down, on SIGTERM or SIGINT, when whoever started it is gone (its lifetime
descriptor reaches end of file, which happens on SIGKILL as well), or when Monarch fails. Whichever it is,
every process that was started here is ended first.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
import uuid
from dataclasses import dataclass

from meshgate_worker.address import AddressError, listening_at
from meshgate_worker.descendants import COOKIE_VARIABLE, end_descendants

__all__ = ["HostOptions", "serve"]

READY_TIMEOUT = 30.0
_USAGE = 2  # the exit code where nothing was started


@dataclass(frozen=True, slots=True)
class HostOptions:
    """``grace``: seconds that processes get to end after SIGTERM. Descriptors are None where not given.
    ``remove_directory``: that of the socket goes with the last host in it."""

    address: str
    name: str
    lifetime_fd: int | None
    ready_fd: int | None
    grace: float
    remove_directory: bool = False


@dataclass(frozen=True, slots=True)
class _End:
    code: int
    reason: str


class _Mailbox:
    """Where the signal handlers and Monarch's thread leave why the host ends; the main thread waits on it."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        self._end: _End | None = None

    def post(self, end: _End) -> None:
        """The first reason counts. Safe in a signal handler and on any thread."""
        self._end = self._end or end
        os.write(self._write_fd, b"\0")

    def posted(self) -> _End | None:
        return self._end


def serve(options: HostOptions) -> int:
    """Runs the host to its end and returns the exit code. To be called on the main thread."""
    cookie = os.environ[COOKIE_VARIABLE] = uuid.uuid4().hex
    os.environ["HYPERACTOR_PROCESS_NAME"] = options.name
    mailbox = _Mailbox()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _frame: mailbox.post(_End(0, signal.Signals(number).name)))
    end = _start(options, mailbox) or _wait_ready(options, cookie, mailbox) or _wait_end(options, mailbox)
    end = end or _End(1, "no reason was given")
    killed = end_descendants(cookie, options.grace)
    if end.code != _USAGE:
        listening_at(options.address).clear(directory=options.remove_directory)
    forced = f"; {killed} of its processes had to be killed" if killed else ""
    _say(f"{options.name}: ended: {end.reason}{forced}")
    return end.code


def _start(options: HostOptions, mailbox: _Mailbox) -> _End | None:
    """Starts Monarch on a thread of its own, or returns why the address cannot be served."""
    try:
        listening = listening_at(options.address)
    except AddressError as error:
        return _End(_USAGE, str(error))
    if listening.accepts(timeout=1.0):  # it would be taken for this host
        return _End(_USAGE, f"another process already serves {options.address}: end it or choose another address")
    listening.clear()
    threading.Thread(target=_run_monarch, args=(options.address, mailbox), daemon=True).start()
    return None


def _run_monarch(address: str, mailbox: _Mailbox) -> None:
    try:
        from monarch.actor import run_worker_loop_until_shutdown  # noqa: PLC0415  (reads the environment)

        run_worker_loop_until_shutdown(address=address, ca="trust_all_connections")
    except BaseException as error:  # noqa: BLE001  (a panic in Monarch is no Exception)
        mailbox.post(_End(1, f"Monarch failed: {type(error).__name__}: {error}"))
    else:
        mailbox.post(_End(0, "a client shut this host down"))


def _wait_ready(options: HostOptions, cookie: str, mailbox: _Mailbox) -> _End | None:
    """Waits until the host can be attached to and announces it, or returns why that will not happen."""
    listening = listening_at(options.address)
    deadline = time.monotonic() + READY_TIMEOUT
    while not listening.accepts(timeout=1.0):
        if time.monotonic() > deadline:
            return _End(1, f"nothing listened at {options.address} within {READY_TIMEOUT:.0f} s")
        if end := _wait_end(options, mailbox, timeout=0.002):
            return end
    if options.ready_fd is None:
        _say(f"{options.name}: ready at {options.address}")
    else:
        with os.fdopen(options.ready_fd, "w") as ready:
            ready.write(json.dumps({"address": options.address, "cookie": cookie}) + "\n")
    return None


def _wait_end(options: HostOptions, mailbox: _Mailbox, timeout: float | None = None) -> _End | None:
    """Why the host ends, or None when ``timeout`` seconds (for ever, when None) bring no reason."""
    watched = [mailbox.read_fd] if options.lifetime_fd is None else [mailbox.read_fd, options.lifetime_fd]
    while (end := mailbox.posted()) is None:
        readable, _, _ = select.select(watched, [], [], timeout)
        if not readable:
            return None
        if options.lifetime_fd in readable and not os.read(options.lifetime_fd, 4096):
            return _End(0, "the process that started this host is gone")
    return end


def _say(line: str) -> None:
    print(f"meshgate_worker {line}", file=sys.stderr, flush=True)  # noqa: T201  (a log line)
