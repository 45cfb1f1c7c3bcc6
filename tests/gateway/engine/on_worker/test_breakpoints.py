"""The worker's side of the debugger. The laptop's side, with real processes, is in tests/client/ranks/test_debug.py."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from meshgate_gateway.engine.on_worker.breakpoints import (
    ATTACH,
    DETACH,
    PROMPT,
    RESUMED,
    Dialogue,
    current_actor,
    install_breakpoints,
)


class Reading:
    """A dialogue whose ``readline`` runs in a thread."""

    def __init__(self) -> None:
        self.dialogue = Dialogue()
        self.lines: list[str] = []

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=lambda: self.lines.append(self.dialogue.readline()))
        thread.start()
        return thread

    def send(self, text: str) -> None:
        os.write(self.dialogue.commands, text.encode())

    def receive(self, size: int) -> str:
        data = b""
        while len(data) < size:
            data += os.read(self.dialogue.output, size - len(data))
        return data.decode()


@pytest.fixture
def reading() -> Iterator[Reading]:
    reading = Reading()
    yield reading
    reading.dialogue._input.close()
    for end in (reading.dialogue.commands, reading.dialogue.output, reading.dialogue._output):
        os.close(end)


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
    os.set_blocking(reading.dialogue.output, False)
    with pytest.raises(BlockingIOError):
        os.read(reading.dialogue.output, 1)


def test_outside_of_an_actor_there_is_no_name() -> None:
    assert current_actor(sys._getframe()) == {}


def test_a_system_without_anonymous_files_keeps_its_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    before = sys.breakpointhook
    install_breakpoints("procs", 0, "workers-0")
    assert sys.breakpointhook is before
