from __future__ import annotations

from meshgate_gateway.engine.calls.backlog import LOOK_INTERVAL, Backlog
from tests.gateway.engine.fakes import Timers

PORT = "a port"
LIMIT = 100


class Producers:
    """Processes that send to ``PORT``. ``answers``: by report, in order of their answers."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bool]] = []
        self.factor = 1.0
        self.warnings: list[str] = []
        self.timers = Timers()
        self.backlog = Backlog(self.timers, self.warnings.append, LIMIT)
        self.backlog.opened(PORT)
        self._reports = 0

    def report(self, messages: int = 10, nbytes: int = 60, port: str = PORT) -> None:
        number, self._reports = self._reports, self._reports + 1

        def answer(closed: bool, factor: float) -> None:
            self.answers.append((number, closed))
            self.factor = factor

        self.backlog.reported(port, messages, nbytes, answer)

    def read(self, messages: int = 10, nbytes: int = 6) -> None:
        for _ in range(messages):
            self.backlog.read(PORT, nbytes)


def test_reports_are_answered_at_once_while_there_is_space() -> None:
    producers = Producers()
    producers.report()
    assert producers.answers == [(0, False)]
    producers.report()
    assert len(producers.answers) == 1
    producers.read(9)
    assert len(producers.answers) == 1
    producers.read(1)
    assert producers.answers == [(0, False), (1, False)]


def test_a_report_is_answered_when_its_messages_are_read_although_another_channel_is_full() -> None:
    producers = Producers()
    producers.backlog.opened("another")
    producers.report(nbytes=LIMIT + 1, port="another")
    producers.report()
    assert producers.answers == []
    producers.read()
    assert producers.answers == [(1, False)]


def test_messages_that_were_read_before_they_were_reported_are_not_waited_for_for_good() -> None:
    producers = Producers()
    producers.read(10)
    producers.report(nbytes=LIMIT + 1)
    producers.read(10)
    producers.report(nbytes=LIMIT + 1)
    assert producers.answers == [(0, False)]
    producers.read(10)
    assert producers.answers == [(0, False), (1, False)]


def test_messages_that_are_not_reported_make_no_space() -> None:
    producers = Producers()
    producers.read(1000)
    producers.report(nbytes=LIMIT + 1)
    assert producers.answers == []


def test_processes_learn_that_their_messages_are_larger_than_they_report() -> None:
    producers = Producers()
    producers.report(messages=10, nbytes=1)
    producers.read(10, nbytes=7)
    producers.report()
    assert producers.factor == 70 / 61


def test_the_end_of_a_channel_releases_its_producers() -> None:
    producers = Producers()
    producers.report(nbytes=LIMIT + 1)
    producers.backlog.closed(PORT)
    assert producers.answers == [(0, True)]
    producers.report(nbytes=LIMIT + 1)  # to a port that belongs to no known channel
    assert producers.answers[1:] == [(1, False)]


def test_no_one_waits_for_the_messages_of_a_process_that_was_killed() -> None:
    producers = Producers()
    producers.report(nbytes=LIMIT + 1)  # and then it was killed
    producers.report()
    producers.timers.fire(LOOK_INTERVAL)
    assert producers.answers == [(0, False), (1, False)]
    assert not producers.warnings
    producers.report()
    assert producers.answers[2:] == [(2, False)]


def test_while_nothing_is_received_they_wait_and_the_user_is_warned_once() -> None:
    producers = Producers()
    producers.backlog.reading(PORT, False)
    producers.report(nbytes=LIMIT + 1)
    for _ in range(3):
        producers.timers.fire(LOOK_INTERVAL)
    assert producers.answers == []
    (warning,) = producers.warnings
    assert "Receive them, or close the channel" in warning
    producers.backlog.reading(PORT, True)
    producers.read(10)
    assert producers.answers == [(0, False)]
    producers.timers.fire(LOOK_INTERVAL)
    assert not producers.timers.waiting
