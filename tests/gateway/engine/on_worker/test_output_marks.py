"""What a reply says of the output before it, with connections of the loopback interface."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from meshgate_gateway.engine.on_worker.output_marks import (
    MARKED,
    MAX_UNDERWAY,
    POSITIONS,
    RANK_BITS,
    RECENT,
    OutputMarks,
    WrittenBytes,
    replies_to_the_engine,
    total,
    with_mark,
    without_mark,
)

linux_only = pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the kernel does not count what is written")


@contextmanager
def connections() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection by TCP, and its other end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as here, listener.accept()[0] as there:
            yield here, there


def handle(marks: OutputMarks, response_port: Any, correlation_id: int | None) -> int | None:
    """As Monarch's method that handles a call and replies to it."""
    rank = marks.rank(response_port, sys._getframe(0))
    assert correlation_id in (None, 7)
    return rank


def call(marks: OutputMarks, port: Any) -> int | None:
    return handle(marks, port, None)


def test_a_rank_and_its_mark_are_read_as_they_were_written() -> None:
    assert without_mark(with_mark(1000, (5, POSITIONS + 7))) == (1000, (5, 7))
    assert without_mark(with_mark(0, (POSITIONS, 0))) == (0, (0, 0))
    assert without_mark(1000) == (1000, None)
    largest = with_mark(2**RANK_BITS - 1, (POSITIONS - 1, POSITIONS - 1))
    assert largest < 2**64
    assert without_mark(largest) == (2**RANK_BITS - 1, (POSITIONS - 1, POSITIONS - 1))


@pytest.mark.parametrize("rank", [2**RANK_BITS, 2**20, 2**40 + 3, MARKED - 1])
def test_a_rank_that_leaves_no_space_has_no_mark(rank: int) -> None:
    assert without_mark(with_mark(rank, (5, 7))) == (rank, None)


@linux_only
def test_a_position_is_never_too_far_away_to_be_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = 3 * POSITIONS  # as in the buffer of a kernel that is set up for long distances
    monkeypatch.setattr("fcntl.ioctl", lambda descriptor, request, argument: struct.pack("i", queued))
    with connections() as (here, _):
        position = WrittenBytes(here).position()
    assert position == MAX_UNDERWAY
    assert total(position % POSITIONS, 0) == position


@pytest.mark.parametrize("distance", [0, 1, -1, POSITIONS // 2 - 1, -POSITIONS // 2])
@pytest.mark.parametrize("near", [POSITIONS // 2, 10 * POSITIONS - 1, 10 * POSITIONS])
def test_a_position_is_the_one_that_is_near(near: int, distance: int) -> None:
    assert total((near + distance) % POSITIONS, near) == near + distance


@linux_only
def test_what_is_written_is_counted_before_it_arrives_also_through_copies() -> None:
    with connections() as (here, there):
        written, count = WrittenBytes(here), 0
        assert written.position() == 0
        here.setblocking(False)
        copy = os.dup(here.fileno())
        os.write(copy, b"through a copy of the descriptor")
        count += 32
        assert written.position() == count
        with suppress(BlockingIOError):
            while True:
                count += os.write(copy, bytes(2**16))
        assert written.position() == count
        there.recv(2**20)
        assert written.position() == count
        os.close(copy)


@linux_only
def test_a_reply_has_a_mark_if_something_was_printed_in_the_second_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now)
    with connections() as (out, _), connections() as (err, _):
        marks, port = OutputMarks([out, err]), SimpleNamespace(_rank=3)
        assert call(marks, port) == 3
        out.sendall(b"a line\n")
        assert handle(marks, port, 7) == 3  # the reply to another actor's call
        assert without_mark(call(marks, port) or 0) == (3, (7, 0))
        now += RECENT / 2
        other = SimpleNamespace(_rank=4)  # of a concurrent endpoint: its reply may arrive first
        assert without_mark(call(marks, other) or 0) == (4, (7, 0))
        now += RECENT
        assert without_mark(call(marks, port) or 0)[1] is None
        err.sendall(b"!")
        assert without_mark(call(marks, port) or 0) == (3, (7, 1))
        err.sendall(b"!")
        assert call(marks, SimpleNamespace(_rank=None)) is None  # a channel's port
        out.close()  # by the program, which does not know it
        assert call(marks, port) == 3


def test_a_unix_socket_needs_no_marks() -> None:
    here, there = socket.socketpair()
    with here, there:
        marks = OutputMarks([here, here])
        here.sendall(b"a line\n")
        assert call(marks, SimpleNamespace(_rank=3)) == 3


def test_only_the_port_of_an_engines_call_replies_to_it() -> None:
    def handle(response_port: object, args: tuple[object, ...], correlation_id: int | None, port: object) -> bool:
        return replies_to_the_engine(port, sys._getframe(0)) and correlation_id is None and (response_port, args) != ()

    port, other = object(), object()
    assert handle(port, (), None, port)
    assert handle(other, (port,), None, port)  # explicit
    assert not handle(other, (other, port), None, port)  # that an argument brings
    assert not handle(port, (), 7, port)
    assert not replies_to_the_engine(port, None)
