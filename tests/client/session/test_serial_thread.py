from __future__ import annotations

import logging
import threading

import pytest

from meshgate.session.serial_thread import SerialThread


def test_functions_are_called_in_order_on_one_thread() -> None:
    serial = SerialThread("meshgate-test")
    done: list[tuple[int, threading.Thread]] = []
    for i in range(100):
        serial.call(lambda i=i: done.append((i, threading.current_thread())))
    serial.close(timeout=10)
    assert [i for i, _ in done] == list(range(100))
    assert len({thread for _, thread in done}) == 1
    assert not done[0][1].is_alive()


def test_an_exception_is_logged_and_the_next_function_is_called(caplog: pytest.LogCaptureFixture) -> None:
    serial = SerialThread("meshgate-test")
    done: list[int] = []
    serial.call(lambda: 1 / 0)
    serial.call(lambda: done.append(1))
    serial.close(timeout=10)
    assert done == [1]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_closing_from_the_thread_itself_does_not_wait() -> None:
    serial = SerialThread("meshgate-test")
    closed = threading.Event()
    serial.call(lambda: (serial.close(timeout=30), closed.set()))
    assert closed.wait(10)


def test_closing_an_unused_thread_does_nothing() -> None:
    SerialThread("meshgate-test").close(timeout=10)
