"""Makes ``Port.send`` wait while the engine holds too many messages that no receiver has read.

Monarch's ports accept whatever is sent to them. So a process reports to the engine what it has sent to a port, one
chunk at a time, and waits in ``send`` while too many reports are not answered. The engine answers when the messages
have been read, and at once while few wait. A process that sends less than a chunk never reports.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from meshgate_gateway.engine.on_worker.large_messages import LARGE  # by value too

CHUNK = 2**20  # bytes that a process sends to a port between two reports
CHUNK_MESSAGES = 4096  # the same in messages
UNANSWERED = 32  # reports of a port, above which ``send`` waits
MESSAGE = 256  # bytes that a message takes besides its content, roughly
PORTS = 1024  # whose counts are kept at once
SAMPLE = 32  # items of a container whose size is looked at
DEPTH = 3  # of containers
FLAT = frozenset({int, float, bool, complex, type(None)})
STRINGS = frozenset({str, bytes, bytearray})
CONTAINERS = frozenset({list, tuple, set, frozenset})


def report_what_is_sent(
    connect: Callable[[], socket.socket], hello: Mapping[str, Any], send_specially: Callable[..., bool]
) -> None:
    """From now on this process reports what it sends to ports. ``connect()`` connects to the engine;
    ``send_specially(port, value, frame, large=)`` sends what Monarch's own method must not, and returns whether it has.
    ``large``: the message seems to be ``LARGE``."""
    from monarch._rust_bindings.monarch_hyperactor.mailbox import OncePortRef  # noqa: PLC0415 - resolved on the worker
    from monarch.actor import Port  # noqa: PLC0415 - resolved on the worker

    send_now, reports = Port.send, PortReports(connect, hello)

    def send(self: Any, obj: Any) -> None:
        nbytes = MESSAGE + size_in_message(obj)
        if not send_specially(self, obj, sys._getframe(1), large=nbytes >= LARGE):
            send_now(self, obj)
        if not isinstance(self._port_ref, OncePortRef):  # which takes one message, and panics if asked for its id then
            reports.sent(self._port_ref.port_id, nbytes)

    send.__doc__ = send_now.__doc__
    Port.send = send


def size_in_message(value: Any) -> int:
    """``size_of``, or 0 if an attribute of a user's object raises or another thread changes a container: that must not
    keep the message from being sent, and the engine corrects what is counted too low."""
    try:
        return size_of(value, DEPTH)
    except Exception:  # noqa: BLE001 - user code
        return 0


def size_of(value: Any, depth: int) -> int:
    """Roughly how many bytes ``value`` takes in a message."""
    kind = type(value)
    if kind in FLAT:
        return 0
    if kind in STRINGS:
        return len(value)
    if kind is dict:
        content = value.values()
    elif kind in CONTAINERS:
        content = value
    else:
        nbytes = getattr(value, "nbytes", None)
        if isinstance(nbytes, int):
            return nbytes
        content = getattr(value, "__dict__", {}).values()
    count = len(content)
    if not count or not depth:
        return 0
    if count <= SAMPLE:
        return sum([size_of(item, depth - 1) for item in content])
    return sum([size_of(item, depth - 1) for item in islice(content, SAMPLE)]) * count // SAMPLE


class _Sent:
    """What was sent to a port since the last report, how many reports are not answered, and by which factor the
    engine finds messages larger than they were reported."""

    def __init__(self, port: Any) -> None:
        self.port, self.closed = port, False
        self.messages = self.nbytes = self.unanswered = 0
        self.factor = 1.0


class PortReports:
    """The reports of one process. Thread-safe. Connects to the engine for the first report."""

    def __init__(self, connect: Callable[[], socket.socket], hello: Mapping[str, Any]) -> None:
        self._connect, self._hello = connect, {**hello, "stream": "ports"}
        self._changed = threading.Condition(threading.Lock())
        self._ports: dict[Any, _Sent] = {}  # by index, which is faster than by port; by port where two have the same
        self._reported: dict[str, _Sent] = {}  # that are not answered
        self._connection: socket.socket | None = None
        self._ended = False

    def sent(self, port: Any, nbytes: int) -> None:
        """Counts a message that was sent. Waits while too many are unread.

        Raises RuntimeError if the channel is closed meanwhile, or the session ends.
        """
        with self._changed:
            sent = self._ports.get(port.index)
            if sent is None or sent.port != port:
                sent = self._find(port, taken=sent is not None)
            sent.messages += 1
            sent.nbytes += nbytes
            if sent.nbytes * sent.factor < CHUNK and sent.messages < CHUNK_MESSAGES:
                return
            self._report(sent)
            while sent.unanswered >= UNANSWERED and not self._ended and not sent.closed:
                self._changed.wait()
            if sent.unanswered >= UNANSWERED:
                reason = "the session has ended" if self._ended else "the channel was closed"
                raise RuntimeError(f"{reason} while this send waited for messages to be received")

    def _find(self, port: Any, *, taken: bool) -> _Sent:
        key = port if taken else port.index
        sent = self._ports.get(key)
        if sent is None:
            if len(self._ports) >= PORTS:  # calls with ports of their own leave one each behind
                del self._ports[next(key for key, sent in self._ports.items() if not sent.unanswered)]
            sent = self._ports[key] = _Sent(port)
        return sent

    def _report(self, sent: _Sent) -> None:
        if self._ended:
            return
        name = str(sent.port)
        self._reported[name] = sent
        report = {"port": name, "messages": sent.messages, "nbytes": sent.nbytes}
        sent.messages = sent.nbytes = 0
        sent.unanswered += 1
        try:
            self._connected().sendall(json.dumps(report).encode() + b"\n")
        except OSError:  # the engine has ended, and this process is about to
            self._end()

    def _connected(self) -> socket.socket:
        if self._connection is None:
            self._connection = self._connect()
            self._connection.sendall(json.dumps(self._hello).encode() + b"\n")
            threading.Thread(target=self._receive, args=(self._connection,), name="meshgate-ports", daemon=True).start()
        return self._connection

    def _receive(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as answers:
                for answer in answers:
                    self._answered(**json.loads(answer))
        except OSError:
            pass  # as its end
        finally:
            with self._changed:
                self._end()

    def _answered(self, port: str, closed: bool, factor: float) -> None:
        with self._changed:
            sent = self._reported.get(port)
            if sent is None:  # of a channel that was closed
                return
            sent.closed, sent.factor = closed, factor
            if not closed:
                sent.unanswered -= 1
            if closed or not sent.unanswered:
                del self._reported[port]
            if closed:
                self._ports = {key: each for key, each in self._ports.items() if each is not sent}
            self._changed.notify_all()

    def _end(self) -> None:
        self._ended = True
        self._changed.notify_all()
