"""SIGTERM and SIGHUP in a ``with`` block."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from meshgate.jobs import signals
from tests.client.jobs.fake_job import RUNNING, FakeJob

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _default_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(signals, "_blocks", 0)  # fixtures of other modules may hold a job in a with block
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    assert all(signal.getsignal(number) is signal.SIG_DFL for number in SIGNALS)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_a_with_block_ends_the_job_and_exits_as_shells_expect(number: signal.Signals) -> None:
    outer, inner = FakeJob(1), FakeJob(2)

    def run() -> None:
        with outer, inner:
            outer.apply()
            inner.apply()
            os.kill(os.getpid(), number)
            signal.sigtimedwait([], 10)  # the handler raises here at the latest

    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 128 + number
    assert not {outer.allocation, inner.allocation} & RUNNING


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_held_signal_raises_at_the_end_of_the_block_and_a_second_one_at_once(number: signal.Signals) -> None:
    reached: list[int] = []

    def run(times: int) -> None:
        with signals.hold_signals():
            for each in range(times):
                signal.raise_signal(number)
                reached.append(each)

    before = signal.getsignal(signal.SIGINT)
    assert signals.catch_end_signals()
    for times in (1, 2):
        reached.clear()
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run(times)
        assert reached == [0]
        assert signal.getsignal(signal.SIGINT) is before
    signals.restore_signals()


def test_handlers_of_the_program_are_left_alone() -> None:
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with FakeJob(1) as job:
        job.apply()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert job.allocation in RUNNING
        assert received == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def test_a_block_in_another_thread_sets_no_handlers() -> None:
    found = []

    def run() -> None:
        with FakeJob(1):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_handlers_that_a_library_replaces_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with contextlib.suppress(ValueError), signals.keep_handlers():
        signal.signal(number, lambda *_: None)
        raise ValueError("of the library")
    assert signal.getsignal(number) is before


def test_other_threads_leave_the_handlers_alone() -> None:
    entered: list[bool] = []

    def run() -> None:
        with signals.keep_handlers():
            entered.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert entered
