from __future__ import annotations

import pytest

from meshgate_sync.relay.commands import Command, PeerLink, ReportStatus, ReportUnreachable, Send, Timeouts
from meshgate_sync.relay.frames import Ack, Message, Unreachable
from meshgate_sync.relay.plan import GATEWAY, Routes
from meshgate_sync.relay.status_reporter import AckBuffer, StatusReporter
from meshgate_sync.relay.upstream import Upstream

ROOT = b"r" * 32
GATHER = 0.002
ROOT_ACKS, OTHER = b"r" * 32, b"o" * 32


class Setup:
    """A reporter on a host with the control parents ``a`` and ``b``, or at the gateway."""

    def __init__(self, *, gateway: bool = False) -> None:
        self.commands: list[Command] = []
        self.upstream = None
        if not gateway:
            self.upstream = Upstream("host", Routes(("a", "b", GATEWAY), ()), Timeouts(), 1000, [])
            self.upstream.start(0.0)
        self.reporter = StatusReporter("" if gateway else "host", self.upstream, GATHER, self.commands)

    def take(self) -> list[Command]:
        taken = list(self.commands)
        self.commands.clear()
        return taken


def sent(peer: str, message: Message) -> Send:
    return Send(PeerLink(peer, up=True), message)


def connected() -> Setup:
    setup = Setup()
    assert setup.upstream is not None
    setup.upstream.connected("a", 0.0)
    setup.reporter.open(ROOT, 0.0)
    return setup


def test_the_gateway_reports_to_the_engine() -> None:
    setup = Setup(gateway=True)
    setup.reporter.open(ROOT, 0.0)
    setup.reporter.add(ROOT, ["h0"], {"h1": "full"}, 1.0)
    assert setup.take() == [ReportStatus(ROOT, ("h0",), (("h1", "full"),))]
    assert setup.reporter.failed(ROOT) == {"h1": "full"}


def test_a_host_reports_at_once_and_then_gathers() -> None:
    setup = connected()
    setup.reporter.add(ROOT, ["h0"], {}, 1.0)
    assert setup.take() == [sent("a", Ack(ROOT, ("h0",)))]
    setup.reporter.add(ROOT, ["h1"], {}, 1.0 + GATHER / 4)
    setup.reporter.add(ROOT, ["h2"], {}, 1.0 + GATHER / 2)
    assert setup.take() == []
    assert setup.reporter.deadline == 1.0 + GATHER
    setup.reporter.report_if_due(1.0 + GATHER)
    assert setup.take() == [sent("a", Ack(ROOT, ("h1", "h2")))]


def test_a_host_without_a_parent_reports_all_to_the_next() -> None:
    setup = Setup()
    assert setup.upstream is not None
    setup.reporter.open(ROOT, 0.0)
    setup.reporter.add(ROOT, ["h0"], {}, 1.0)
    assert setup.take() == []
    assert setup.reporter.deadline is None
    setup.upstream.connected("a", 2.0)
    setup.reporter.report_all("a", 2.0)
    assert setup.take() == [sent("a", Ack(ROOT, ("h0",)))]


def test_the_backup_gets_the_same_reports() -> None:
    setup = connected()
    assert setup.upstream is not None
    setup.upstream.alert_until = 5.0
    now = 0.0
    while setup.upstream._backup is None:
        now += 0.05
        setup.upstream.tick(now)
    setup.upstream.connected("b", now)
    setup.reporter.add(ROOT, ["h0"], {}, now)
    assert setup.take() == [sent("a", Ack(ROOT, ("h0",))), sent("b", Ack(ROOT, ("h0",)))]


def test_a_withdrawn_version_is_not_reported() -> None:
    setup = connected()
    setup.reporter.add(ROOT, ["h0"], {}, 1.0)
    setup.take()
    setup.reporter.close(ROOT)
    setup.reporter.report_all("a", 2.0)
    assert setup.take() == []
    setup.reporter.validate_state([])
    with pytest.raises(AssertionError):
        setup.reporter.validate_state([ROOT])


def test_unreachable_parents_are_passed_on_when_they_change() -> None:
    setup = connected()
    for _ in range(2):
        setup.reporter.add_unreachable([("h0", "cannot reach x"), ("h1", "")])
    assert setup.take() == [sent("a", Unreachable((("h0", "cannot reach x"),)))]
    setup.reporter.add_unreachable([("h0", "")])
    assert setup.take() == [sent("a", Unreachable((("h0", ""),)))]


def test_a_new_parent_learns_what_is_unreachable() -> None:
    setup = Setup()
    setup.reporter.add_unreachable([("h0", "cannot reach x")])
    setup.reporter.report_unreachable("b")
    assert setup.take() == [sent("b", Unreachable((("h0", "cannot reach x"),)))]


def test_the_gateway_reports_unreachable_parents_to_the_engine() -> None:
    setup = Setup(gateway=True)
    setup.reporter.add_unreachable([("h0", "cannot reach x")])
    assert setup.take() == [ReportUnreachable((("h0", "cannot reach x"),))]


def opened() -> AckBuffer:
    acks = AckBuffer(0.002)
    acks.open(ROOT_ACKS, 0.0)
    return acks


def test_the_first_report_is_due_at_once_and_later_ones_are_gathered() -> None:
    acks = opened()
    acks.add(ROOT_ACKS, ["a"], {}, 1.0)
    assert acks.deadline == 1.0
    assert acks.take_unreported(1.0) == [Ack(ROOT_ACKS, ("a",))]
    assert acks.deadline is None
    acks.add(ROOT_ACKS, ["b"], {}, 1.001)
    acks.add(ROOT_ACKS, ["c"], {"d": "full"}, 1.0015)
    assert acks.deadline == 1.002
    assert acks.take_unreported(1.002) == [Ack(ROOT_ACKS, ("b", "c"), (("d", "full"),))]
    assert acks.take_unreported(1.003) == []


def test_the_latest_acknowledgement_of_a_host_counts() -> None:
    acks = opened()
    acks.add(ROOT_ACKS, [], {"a": "full"}, 1.0)
    acks.add(ROOT_ACKS, ["a"], {}, 1.0)
    acks.add(ROOT_ACKS, ["b"], {}, 1.0)
    acks.add(ROOT_ACKS, [], {"b": "full"}, 1.0)
    assert acks.take_unreported(1.0) == [Ack(ROOT_ACKS, ("a",), (("b", "full"),))]
    assert acks.failed(ROOT_ACKS) == {"b": "full"}


def test_a_new_parent_gets_everything() -> None:
    acks = opened()
    acks.add(ROOT_ACKS, ["a"], {"b": "full"}, 1.0)
    acks.take_unreported(1.0)
    assert acks.take_all(2.0) == [Ack(ROOT_ACKS, ("a",), (("b", "full"),))]
    assert acks.take_unreported(2.0) == []


def test_acknowledgements_before_the_announcement_are_kept() -> None:
    acks = opened()
    acks.add(OTHER, ["a"], {"b": "full"}, 1.0)
    assert acks.take_unreported(1.0) == []
    acks.open(OTHER, 1.0)
    assert acks.take_unreported(1.0) == [Ack(OTHER, ("a",), (("b", "full"),))]


def test_a_closed_version_is_not_reported() -> None:
    acks = opened()
    acks.add(ROOT_ACKS, ["a"], {}, 1.0)
    acks.close(ROOT_ACKS)
    assert acks.take_all(1.0) == []
