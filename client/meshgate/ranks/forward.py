"""Ports of a host's loopback on the laptop's loopback, and the other way round.

Each side has a hub; what one reads, the other writes. A port that a program on the host listens on appears here, or,
with ``reverse``, one that listens here appears there.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshgate.errors import JobError, MeshgateError
from meshgate.ranks.host_streams import HostStreams, spawn_streams
from meshgate.ranks.streams import Event, Hub
from meshgate.session.futures import FutureProxy

if TYPE_CHECKING:
    from types import TracebackType

    from meshgate.proxies import HostMeshProxy

LISTENER = 0


class ForwardedPort:
    """A forwarded port; connect to ``port``. Ends with ``close()`` or a ``with`` block."""

    def __init__(self, host: HostStreams, target: int, stack: contextlib.ExitStack, *, reverse: bool) -> None:
        self.rank, self.target, self.reverse = host.rank, target, reverse
        self.port = 0
        self._host, self._stack = host, stack
        self._hub = Hub()
        self._closed = False
        self._error: MeshgateError | None = None
        self._reported: set[bytes] = set()
        self._threads = [
            threading.Thread(target=run, name="meshgate-forward", daemon=True)
            for run in (self._from_here, self._from_there)
        ]

    def open(self, listen: int) -> None:
        """Listens at ``listen``, 0 for a free port. Raises JobError if it is in use."""
        if self.reverse:
            answer = self._host.writer.listen.call_one(LISTENER, listen).get()
            if isinstance(answer, str):
                raise JobError(f"cannot listen on port {listen} of rank {self.rank}: {answer}")
            self.port = answer
        else:
            try:
                self.port = self._hub.listen(LISTENER, listen)
            except OSError as error:
                raise JobError(f"cannot listen on port {listen} of this machine: {error.strerror or error}") from error
        self._host.start()
        for thread in self._threads:
            thread.start()

    @property
    def error(self) -> MeshgateError | None:
        """Why it no longer works, such as that the host was lost; None while it does."""
        return self._error

    def wait(self) -> None:
        """Returns when it is closed. Raises its error if it no longer works."""
        for thread in self._threads:  # a listener is closed once no thread polls it
            thread.join()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends all connections and stops listening."""
        self._closed = True
        self._hub.close()
        self._host.arrivals.put((self._host, FutureProxy()))  # wakes _from_there: without a connection, no read returns
        self._stack.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _from_here(self) -> None:
        writer = self._host.writer
        with self._until_the_host_is_lost():
            while events := self._hub.poll():
                for event in events:
                    self._pass_on(event, writer.write.broadcast, writer.ack.broadcast)
                    if event.kind == "accepted":
                        writer.connect.broadcast(event.stream, self.target)

    def _from_there(self) -> None:
        with self._until_the_host_is_lost():
            while True:
                host, future = self._host.arrivals.get()
                if self._closed:
                    return
                for event in host.take(future):
                    self._pass_on(event, self._hub.write, self._hub.ack)
                    if event.kind == "accepted":
                        self._hub.connect(event.stream, self.target)

    @contextlib.contextmanager
    def _until_the_host_is_lost(self) -> Iterator[None]:
        """Ends the other thread with this one. Once the port is closed, the host's processes are stopped, and what is
        under way fails."""
        try:
            yield
        except MeshgateError as error:
            if not self._closed:
                self._error = self._error or error
                self._hub.close()

    def _pass_on(self, event: Event, write: Any, ack: Any) -> None:
        if event.kind == "data":
            write(event.stream, event.data)
        elif event.kind == "end":
            write(event.stream, b"")
        elif event.kind == "wrote":
            ack(event.stream, event.number)
        elif event.kind in ("failed", "closed"):  # no program takes what is sent: the sender must notice
            if event.kind == "failed" and event.data not in self._reported:
                self._reported.add(event.data)
                there = "this machine" if self.reverse else f"rank {self.rank}"
                line = f"meshgate: forward to {there}: {event.data.decode()}"
                print(line, file=sys.stderr)  # noqa: T201 - for the user's terminal
            self._hub.close_stream(event.stream)
            self._host.writer.close_stream.broadcast(event.stream)

    def __enter__(self) -> ForwardedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        here, there = ("this machine", f"rank {self.rank}")
        listening, serving = (there, here) if self.reverse else (here, there)
        return f"<ForwardedPort 127.0.0.1:{self.port} of {listening} → port {self.target} of {serving}>"


def forward(hosts: HostMeshProxy, port: int, rank: int, *, local_port: int | None, reverse: bool) -> ForwardedPort:
    """``port`` is the host's; ``local_port`` is this machine's (None: a free one, or with ``reverse`` the same)."""
    for name, value in (("port", port), ("local_port", local_port)):
        if value is not None and (not isinstance(value, int) or value not in range(65_536)):
            raise ValueError(f"forward({name}={value!r}): expected a port, 1 to 65535")
    if port == 0 and not reverse:
        raise ValueError(
            "forward(port=0): expected the port of a server on the host; only a port to listen on may be 0"
        )
    if not isinstance(rank, int) or rank not in range(len(hosts)):
        raise ValueError(f"rank={rank!r}: the mesh has ranks 0 to {len(hosts) - 1}")
    target, listen = (port, local_port or 0) if not reverse else (port if local_port is None else local_port, port)
    stack = contextlib.ExitStack()
    forwarded = ForwardedPort(
        spawn_streams(hosts, [rank], "meshgate_forward", stack)[rank], target, stack, reverse=reverse
    )
    try:
        forwarded.open(listen)
    except BaseException:
        stack.close()
        raise
    return forwarded
