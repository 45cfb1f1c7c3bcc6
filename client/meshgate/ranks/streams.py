"""Byte streams between file descriptors here and a peer far away, with credit, so that neither side fills memory.

Runs on the laptop and, sent as source, on hosts: the standard library, and what is sent along. Each side has a
``Hub``; what one side reads is an event, and the other side writes it. A stream has a window in each direction: at most
``WINDOW`` bytes are under way until the other side has written them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

WINDOW = 1 << 20
CHUNK = 128 * 1024
CONNECT_TIMEOUT = 10.0  # seconds
MAX_BATCH = 256 * 1024  # bytes of the events that one poll returns, roughly
READABLE = select.POLLIN | select.POLLHUP | select.POLLERR | select.POLLNVAL
WRITABLE = select.POLLOUT | select.POLLHUP | select.POLLERR | select.POLLNVAL
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")  # a program that uses IPv6 sockets for everything is in the second


class Event(NamedTuple):
    """``data``: bytes were read. ``end``: no others follow. ``wrote``: ``number`` bytes were written. ``closed``: no
    program reads what is written, which is dropped from now on. ``accepted``: a listener has a new stream. ``failed``:
    a connection could not be made, and why. ``exit``: of a process, with its exit code."""

    stream: int
    kind: str
    data: bytes = b""
    number: int = 0


class Stream:
    """``reading`` and ``writing`` are descriptors, or -1. Both may be the same. ``sock`` owns them, if given."""

    def __init__(self, reading: int, writing: int, sock: socket.socket | None = None) -> None:
        self.reading, self.writing, self.sock = reading, writing, sock
        self.listening = False
        self.credit = WINDOW  # bytes that may be read before the peer has written earlier ones
        self.queue: deque[bytes] = deque()
        self.ending = False  # nothing follows what is in the queue


class Hub:
    """The streams of one side. One thread calls ``poll``; any thread may call the other methods.

    The side that listens numbers the streams that it accepts, from 1. Two hubs that are connected have one listener.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[int, Stream] = {}
        self._events: deque[Event] = deque()
        self._exits: deque[tuple[int, int, tuple[int, ...]]] = deque()
        self._next = 1
        self._last_served = -1
        self._closed = False
        self._wake_reading, self._wake_writing = ends = os.pipe()
        for end in ends:
            os.set_blocking(end, False)
            # Not by close(): another thread may be about to use it, and its number would be another file's.
            weakref.finalize(self, os.close, end).atexit = False

    # --- streams

    def add(self, stream: int, reading: int = -1, writing: int = -1) -> None:
        """Adds descriptors, which the hub owns from now on and makes non-blocking."""
        for descriptor in (reading, writing):
            if descriptor >= 0:
                os.set_blocking(descriptor, False)
        with self._lock:
            self._streams[stream] = Stream(reading, writing)
        self._wake()

    def listen(self, stream: int, port: int) -> int:
        """Listens on loopback, for this user, and returns the port; 0 chooses a free one. Raises OSError."""
        listener = socket.create_server(("127.0.0.1", port))
        listener.setblocking(False)
        with self._lock:
            listening = self._streams[stream] = Stream(listener.fileno(), -1, listener)
            listening.listening = True
        self._wake()
        return int(listener.getsockname()[1])

    def connect(self, stream: int, port: int) -> None:
        """Connects to a port of loopback. Returns at once; what is written meanwhile waits. A failure is an event."""
        with self._lock:
            connecting = self._streams[stream] = Stream(-1, -1)
        threading.Thread(target=self._connect, args=(stream, connecting, port), daemon=True).start()

    def _connect(self, number: int, stream: Stream, port: int) -> None:
        try:
            connected = _connect_to_loopback(port)
        except OSError as error:
            self.close_stream(number)
            self.post(Event(number, "failed", f"nothing answers at port {port}: {error.strerror or error}".encode()))
            return
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if self._streams.get(number) is stream:
                stream.sock, stream.reading, stream.writing = connected, connected.fileno(), connected.fileno()
            else:  # closed meanwhile
                connected.close()
        self._wake()

    def write(self, stream: int, data: bytes) -> None:
        """Queues data; empty data ends the stream in this direction. Data for a closed stream is dropped."""
        with self._lock:
            found = self._streams.get(stream)
            if found is None:
                return
            if data:
                found.queue.append(data)
            else:
                found.ending = True
        self._wake()

    def ack(self, stream: int, count: int) -> None:
        """The peer has written ``count`` bytes of this stream."""
        with self._lock:
            found = self._streams.get(stream)
            if found is not None:
                found.credit += count
        self._wake()

    def close_stream(self, stream: int) -> None:
        with self._lock:
            found = self._streams.pop(stream, None)
        if found is not None:
            _close(found)
        self._wake()

    def post(self, event: Event) -> None:
        """Makes ``poll`` return an event."""
        with self._lock:
            self._events.append(event)
        self._wake()

    def exited(self, stream: int, code: int, outputs: tuple[int, ...]) -> None:
        """A process has exited: what it has written to the streams ``outputs`` is read, then they end."""
        with self._lock:
            self._exits.append((stream, code, outputs))
        self._wake()

    def close(self) -> None:
        """Ends ``poll``, which then returns nothing, and closes all streams."""
        with self._lock:
            self._closed = True
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            _close(stream)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so ``poll`` wakes up anyway
            os.write(self._wake_writing, b"x")

    # --- what happens

    def poll(self) -> list[Event]:
        """Waits until something happens and returns it; nothing once the hub is closed."""
        while True:
            with self._lock:
                if self._closed:
                    return []
                events = list(self._events)
                self._events.clear()
                exits = list(self._exits)
                self._exits.clear()
                watched = dict(self._streams)
            for stream, code, outputs in exits:
                events += self._drain(outputs)
                events.append(Event(stream, "exit", number=code))
            if events:
                return events
            # In turns, or a stream that always has more would hold up the others, on which this poll has no room left.
            turns = deque(sorted(self._wait(watched), key=lambda each: (each[0] <= self._last_served, each[0])))
            size = 0
            while turns and size < MAX_BATCH:
                number, flags = turns.popleft()
                self._last_served = number
                found = self._serve(number, watched[number], flags)
                events += found
                if found and len(found[-1].data) == CHUNK:  # perhaps there is more
                    turns.append((number, flags))
                size += sum(len(event.data) for event in found)
            if events:
                return events

    def _wait(self, watched: dict[int, Stream]) -> list[tuple[int, int]]:
        poller = select.poll()
        poller.register(self._wake_reading, select.POLLIN)
        owners: dict[int, list[int]] = {}
        masks: dict[int, int] = {}
        for number, stream in watched.items():
            if stream.reading >= 0 and stream.credit > 0:
                masks[stream.reading] = masks.get(stream.reading, 0) | select.POLLIN
                owners.setdefault(stream.reading, []).append(number)
            if stream.writing >= 0 and (stream.queue or stream.ending):
                masks[stream.writing] = masks.get(stream.writing, 0) | select.POLLOUT
                owners.setdefault(stream.writing, []).append(number)
        for descriptor, mask in masks.items():
            poller.register(descriptor, mask)
        ready: dict[int, int] = {}
        for descriptor, flags in poller.poll():
            if descriptor == self._wake_reading:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_reading, 4096)
                continue
            for number in owners.get(descriptor, ()):
                ready[number] = ready.get(number, 0) | flags
        return list(ready.items())

    def _serve(self, number: int, stream: Stream, flags: int) -> list[Event]:
        with self._lock:
            if self._streams.get(number) is not stream:
                return []  # closed meanwhile, and its descriptors perhaps used again
            if stream.listening:
                return self._accept(stream)
            events = []
            if flags & WRITABLE and (stream.queue or stream.ending) and stream.writing >= 0:
                events += self._write_queue(number, stream)
            if flags & READABLE and stream.credit > 0 and stream.reading >= 0:
                events += self._read(number, stream, min(CHUNK, stream.credit))
            self._forget_if_over(number, stream)
        return events

    def _accept(self, listener: Stream) -> list[Event]:
        assert listener.sock is not None
        try:
            accepted, _ = listener.sock.accept()
        except OSError:  # the caller has hung up
            return []
        if not may_connect(accepted):
            accepted.close()
            return []
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number, self._next = self._next, self._next + 1
        self._streams[number] = Stream(accepted.fileno(), accepted.fileno(), accepted)
        return [Event(number, "accepted")]

    def _read(self, number: int, stream: Stream, size: int) -> list[Event]:
        try:
            data = os.read(stream.reading, size)
        except BlockingIOError:
            return []
        except OSError:  # a terminal whose process has ended (EIO), or a connection that was reset
            data = b""
        if data:
            stream.credit -= len(data)
            return [Event(number, "data", data)]
        stream.reading = _close_half(stream, stream.reading, stream.writing, socket.SHUT_RD)
        return [Event(number, "end")]

    def _write_queue(self, number: int, stream: Stream) -> list[Event]:
        written, closed = 0, []
        try:
            while stream.queue:
                data = stream.queue[0]
                count = os.write(stream.writing, data)
                written += count
                if count < len(data):
                    stream.queue[0] = data[count:]
                    break
                stream.queue.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EIO, errno.ENOTCONN):
                raise
            written += sum(map(len, stream.queue))  # no program reads it
            stream.queue.clear()
            stream.ending = True
            closed = [Event(number, "closed")]
        if not stream.queue and stream.ending:
            stream.writing = _close_half(stream, stream.writing, stream.reading, socket.SHUT_WR)
        return [Event(number, "wrote", number=written), *closed] if written else closed

    def _drain(self, outputs: tuple[int, ...]) -> list[Event]:
        """The rest of what an ended process has written, and the ends of these streams."""
        events = []
        with self._lock:
            for number in outputs:
                stream = self._streams.get(number)
                if stream is None or stream.reading < 0:
                    continue
                for _ in range(WINDOW // CHUNK):  # a process that it left behind may go on writing
                    found = self._read(number, stream, CHUNK)
                    events += found
                    if not found or found[0].kind == "end":
                        break
                if stream.reading >= 0:
                    events.append(Event(number, "end"))
                del self._streams[number]
                _close(stream)
        return events

    def _forget_if_over(self, number: int, stream: Stream) -> None:
        if stream.reading < 0 and stream.writing < 0:
            del self._streams[number]
            _close(stream)


def _connect_to_loopback(port: int) -> socket.socket:
    """Raises the OSError of 127.0.0.1 if ::1, on which alone some servers listen, does not answer either."""
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=CONNECT_TIMEOUT)
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):
            return socket.create_connection(("::1", port), timeout=CONNECT_TIMEOUT)
        raise


def _close_half(stream: Stream, descriptor: int, other: int, how: int) -> int:
    """Ends one direction and returns -1."""
    if stream.sock is not None:
        with contextlib.suppress(OSError):
            stream.sock.shutdown(how)
    elif descriptor != other:
        os.close(descriptor)
    return -1


def _close(stream: Stream) -> None:
    if stream.sock is not None:
        stream.sock.close()
        return
    for descriptor in {stream.reading, stream.writing} - {-1}:
        os.close(descriptor)


def may_connect(connection: Any) -> bool:
    """Whether the other end of ``connection``, a TCP socket over IPv4 loopback, is a process of this user or of root.

    True on systems that do not tell (without /proc/net). False for a connection that its other end has closed already,
    where the system does not tell any more whose it was.
    """
    if not os.path.exists(TABLES[0]):
        return True
    try:
        here, there = connection.getsockname(), connection.getpeername()
    except OSError:
        return False
    return any(owner in {os.geteuid(), 0} for owner in _owners(_address(*there), _address(*here)))


def _owners(local: str, remote: str) -> Iterator[int]:
    """The user of each socket between two addresses. One that no process has, and so no inode, may only seem root's."""
    for table in TABLES:
        if os.path.exists(table):
            with open(table, encoding="ascii") as lines:
                for line in lines:
                    fields = line.split()
                    if fields[1].endswith(local) and fields[2].endswith(remote) and fields[7:10:2] != ["0", "0"]:
                        yield int(fields[7])


def _address(host: str, port: int) -> str:
    """As the tables write it: the bytes of the address as a number of this machine. IPv6 has others before them."""
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
