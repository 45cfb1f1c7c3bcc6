"""Reports of what a process sends to ports, with the engine's end of the connection in the hands of the test."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshgate_gateway.engine.on_worker import ports
from meshgate_gateway.engine.on_worker.ports import CHUNK, UNANSWERED, PortReports, size_in_message, size_of


@dataclass(frozen=True)
class PortId:
    index: int
    owner: str = "engine"


PORT = PortId(5)
TIMEOUT = 60.0


class Reporting:
    def __init__(self) -> None:
        self.engine, self._process = socket.socketpair()
        self.engine.settimeout(TIMEOUT)
        self._lines = self.engine.makefile("rb")
        self.connections = 0
        self.reports = PortReports(self._connect, {"pid": 1})
        self.failure: Exception | None = None

    def _connect(self) -> socket.socket:
        self.connections += 1
        return self._process

    def line(self) -> Any:
        return json.loads(self._lines.readline())

    def answer(self, *, closed: bool = False, factor: float = 1.0) -> None:
        self.engine.sendall(json.dumps({"port": str(PORT), "closed": closed, "factor": factor}).encode() + b"\n")

    def fill(self) -> threading.Thread:
        """A thread that sends until it waits."""
        thread = threading.Thread(target=self._send)
        thread.start()
        assert self.line()["stream"] == "ports"
        for _ in range(UNANSWERED):
            assert self.line() == {"port": str(PORT), "messages": 1, "nbytes": CHUNK}
        thread.join(0.05)
        assert thread.is_alive()
        return thread

    def _send(self) -> None:
        try:
            for _ in range(UNANSWERED):
                self.reports.sent(PORT, CHUNK)
        except RuntimeError as error:
            self.failure = error

    def close(self) -> None:
        self._lines.close()
        self.engine.close()
        self._process.close()


@pytest.fixture
def reporting() -> Iterator[Reporting]:
    made = Reporting()
    yield made
    made.close()


def test_a_process_that_sends_little_does_not_connect(reporting: Reporting) -> None:
    for _ in range(10):
        reporting.reports.sent(PORT, CHUNK // 20)
    assert reporting.connections == 0


def test_it_waits_until_a_report_is_answered(reporting: Reporting) -> None:
    thread = reporting.fill()
    reporting.answer()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert reporting.failure is None
    assert reporting.connections == 1


def test_the_end_of_the_channel_releases_it_with_an_error(reporting: Reporting) -> None:
    thread = reporting.fill()
    for _ in range(UNANSWERED):
        reporting.answer(closed=True)
    thread.join(TIMEOUT)
    assert "the channel was closed" in str(reporting.failure)
    reporting.reports.sent(PortId(6), CHUNK)
    assert reporting.line()["port"] == str(PortId(6))


def test_the_end_of_the_session_releases_it_with_an_error(reporting: Reporting) -> None:
    thread = reporting.fill()
    reporting.engine.shutdown(socket.SHUT_RDWR)
    thread.join(TIMEOUT)
    assert "the session has ended" in str(reporting.failure)


def test_messages_that_are_larger_than_they_look_are_reported_sooner(reporting: Reporting) -> None:
    reporting.reports.sent(PORT, CHUNK)
    reporting.line(), reporting.line()
    reporting.answer(factor=100.0)
    while reporting.reports._ports[PORT.index].unanswered:
        threading.Event().wait(0.001)
    reporting.reports.sent(PORT, CHUNK // 50)
    assert reporting.line() == {"port": str(PORT), "messages": 1, "nbytes": CHUNK // 50}


def test_ports_of_other_actors_are_counted_by_themselves(reporting: Reporting) -> None:
    other = PortId(PORT.index, "an actor")
    for port in (PORT, other, other, PORT):
        reporting.reports.sent(port, CHUNK // 2)
    reporting.line()
    assert [reporting.line()["port"] for _ in range(2)] == [str(other), str(PORT)]


def test_ports_of_single_calls_are_forgotten(reporting: Reporting) -> None:
    for number in range(3 * ports.PORTS):
        reporting.reports.sent(PortId(number), 1)
    assert len(reporting.reports._ports) == ports.PORTS


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"x" * 1000, 1000),
        ("x" * 1000, 1000),
        (np.zeros(1000), 8000),
        ((1, np.zeros(1000)), 8000),
        ({"a": [b"x" * 100] * 50}, 5000),
        (SimpleNamespace(data=bytearray(1000)), 1000),
        (7, 0),
        (None, 0),
    ],
)
def test_sizes(value: object, expected: int) -> None:
    assert size_of(value, ports.DEPTH) == expected


class Raising:
    @property
    def nbytes(self) -> int:
        raise RuntimeError("not known yet")


@pytest.mark.parametrize("value", [Raising(), [Raising()], {"key": Raising()}])
def test_an_object_whose_size_raises_does_not_fail_the_message_that_was_sent(value: object) -> None:
    assert size_in_message(value) == 0
    assert size_in_message(b"abc") == 3
