"""The worker's side of the debugger. The laptop's side, with real processes, is in tests/client/ranks/test_debug.py."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshgate_gateway.engine.on_worker import breakpoints
from meshgate_gateway.engine.on_worker.breakpoints import (
    ATTACH,
    DETACH,
    PROMPT,
    RESUMED,
    Dialogue,
    current_actor,
    install_breakpoints,
)

DEADLINE = 30.0


class Reading:
    """A dialogue whose ``readline`` runs in a thread, and a client's end of its output."""

    def __init__(self) -> None:
        self.dialogue = Dialogue()
        self.output = self.open_output()
        self.lines: list[str] = []

    def open_output(self) -> int:
        return os.open(f"/proc/self/fd/{self.dialogue.output}", os.O_RDONLY)

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=lambda: self.lines.append(self.dialogue.readline()))
        thread.start()
        return thread

    def send(self, text: str) -> None:
        os.write(self.dialogue.commands, text.encode())

    def receive(self, size: int) -> str:
        data = b""
        while len(data) < size:
            data += os.read(self.output, size - len(data))
        return data.decode()

    def receive_until(self, marker: str) -> str:
        data = b""
        while not data.endswith(marker.encode()):
            data += os.read(self.output, 1 << 16)
        return data.decode()


@pytest.fixture
def reading() -> Iterator[Reading]:
    if not Path("/proc").is_dir():
        pytest.skip("debuggers are reached through /proc")
    reading = Reading()
    yield reading
    for end in (reading.dialogue.commands, reading.dialogue.output, reading.output):
        os.close(end)  # ends the thread that reads commands, if a test has left it
    reading.dialogue._input.close()


def test_who_attaches_gets_the_output_since_the_last_command(reading: Reading) -> None:
    reading.dialogue.write("earlier\n")
    thread = reading.start()
    for line in (f"{ATTACH}1\n", f"{ATTACH}2\n"):
        answer = f"{line}earlier\n{PROMPT}"
        reading.send(line)
        assert reading.receive(len(answer)) == answer
        reading.send(DETACH)
    reading.send(f"{ATTACH}3\n")
    reading.receive(len(answer))
    reading.send("next\n")
    thread.join()
    assert reading.lines == ["next\n"]
    reading.dialogue.write("now")
    assert reading.receive(3) == "now"
    reading.dialogue.resumed()
    assert reading.receive(1) == RESUMED
    assert not reading.dialogue.attached


def test_without_a_debugger_nothing_is_sent(reading: Reading) -> None:
    reading.dialogue.write("x" * 1_000_000)  # more than a pipe holds
    thread = reading.start()
    reading.send("continue\n")
    thread.join()
    os.set_blocking(reading.output, False)
    with pytest.raises(BlockingIOError):
        os.read(reading.output, 1)


def test_a_client_that_leaves_while_output_waits_for_it_lets_the_thread_go_on(reading: Reading) -> None:
    reading.dialogue.attached = True
    text = "x" * 200_000  # more than a pipe holds
    thread = threading.Thread(target=reading.dialogue.write, args=(text,), daemon=True)
    thread.start()
    select.select([reading.output], [], [])
    os.close(reading.output)
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert not reading.dialogue.attached
    reading.output = reading.open_output()  # the next client's
    thread = reading.start()
    reading.send(f"{ATTACH}2\n")
    unread, _, shown = reading.receive_until(PROMPT).partition(f"{ATTACH}2\n")
    assert unread.strip("x") == ""
    assert shown == text + PROMPT
    reading.send("next\n")
    thread.join()


def test_output_beyond_the_bound_is_dropped_and_counted(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakpoints, "MAX_RECENT", 8)
    for text in ("earlier, ", "and ", "the last"):
        reading.dialogue.write(text)
    for shown in ("(13 earlier characters are not shown)\nthe last", "now", ""):
        thread = reading.start()
        reading.send(f"{ATTACH}1\n")
        assert reading.receive_until(PROMPT) == f"{ATTACH}1\n{shown}{PROMPT}"
        reading.send(f"{DETACH}next\n")
        thread.join()
        reading.dialogue.write("now")
        if shown == "now":
            reading.dialogue.write("much more than is kept")
            reading.dialogue.resumed()


def test_outside_of_an_actor_there_is_no_name() -> None:
    assert current_actor(sys._getframe()) == {}


def test_a_system_without_anonymous_files_keeps_its_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    before = sys.breakpointhook
    install_breakpoints("procs", 0, "workers-0")
    assert sys.breakpointhook is before
