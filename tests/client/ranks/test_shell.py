"""The laptop's side of a terminal. Real shells are in tests/end_to_end/test_ranks.py."""

from __future__ import annotations

import fcntl
import os
import pty
import queue
import signal
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from meshgate.ranks.host_streams import HostStreams
from meshgate.ranks.on_host import PROCESS, STDIN
from meshgate.ranks.shell import _forwarding_input, _on_resize, _raw, _show_output, _size, run_shell
from meshgate.session.futures import FutureProxy


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A terminal: our end, and the one that programs use."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


class Endpoint:
    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.results: list[FutureProxy[Any]] = []

    def broadcast(self, *arguments: Any) -> None:
        self.sent.put(arguments)

    def call_one(self) -> FutureProxy[Any]:
        return self.results.pop(0) if self.results else FutureProxy()


class Actor:
    def __init__(self) -> None:
        self.read, self.write, self.ack = Endpoint(), Endpoint(), Endpoint()


def test_the_terminal_is_raw_meanwhile_and_as_before_afterwards(terminal: tuple[int, int]) -> None:
    _, theirs = terminal
    before = termios.tcgetattr(theirs)
    with _raw(theirs):
        assert not termios.tcgetattr(theirs)[3] & (termios.ICANON | termios.ECHO | termios.ISIG)
    assert termios.tcgetattr(theirs) == before


def test_keys_are_sent_as_they_are_typed(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    actor = Actor()
    with _raw(theirs), _forwarding_input(theirs, actor):
        for keys in (b"l", b"s\r", b"\x03"):
            os.write(ours, keys)
            assert actor.write.sent.get(timeout=30) == (STDIN, keys)


def test_the_size_of_the_terminal_is_sent_when_it_changes(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 132, 0, 0))
    assert _size(theirs) == (50, 132)
    sizes: list[tuple[int, int]] = []
    before = signal.getsignal(signal.SIGWINCH)
    with _on_resize(lambda: sizes.append(_size(theirs))):
        signal.raise_signal(signal.SIGWINCH)
    assert sizes == [(50, 132)]
    assert signal.getsignal(signal.SIGWINCH) == before
    with open(os.devnull) as file:
        assert _size(file.fileno()) == (24, 80)


def test_a_thread_that_gets_no_signals_has_no_handler() -> None:
    before = signal.getsignal(signal.SIGWINCH)
    seen = []

    def run() -> None:
        with _on_resize(lambda: None):
            seen.append(signal.getsignal(signal.SIGWINCH))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize(("kind", "data", "code"), [("exit", b"", 3), ("failed", b"cannot run x", 127)])
def test_output_is_shown_until_the_command_ends(terminal: tuple[int, int], kind: str, data: bytes, code: int) -> None:
    ours, theirs = terminal
    actor = Actor()
    actor.read.results = [
        FutureProxy.resolved((0, [(STDIN, "data", b"50 %\r", 0)])),
        FutureProxy.resolved((1, [(STDIN, "end", b"", 0), (PROCESS, kind, data, code)])),
    ]
    host = HostStreams(0, actor, actor, queue.SimpleQueue())
    host.start()
    with _raw(theirs):
        assert _show_output(host, theirs) == code
    shown = b"50 %\r" + (data + b"\r\n" if data else b"")
    found = b""
    while len(found) < len(shown):
        found += os.read(ours, 100)
    assert found == shown
    assert actor.ack.sent.get(timeout=30) == (STDIN, 5)


def test_a_shell_needs_a_terminal_and_a_known_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the mesh has ranks 0 to 0"):
        run_shell([None], 1)  # type: ignore[arg-type]
    with open(os.devnull) as file:
        monkeypatch.setattr(sys, "stdin", file)
        monkeypatch.setattr(sys, "stdout", file)
        with pytest.raises(ValueError, match="needs a terminal"):
            run_shell([None], 0)  # type: ignore[arg-type]
