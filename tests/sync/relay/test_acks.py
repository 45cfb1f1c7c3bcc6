from __future__ import annotations

from meshgate_sync.relay.acks import AckBuffer
from meshgate_sync.relay.frames import Ack

ROOT, OTHER = b"r" * 32, b"o" * 32


def opened() -> AckBuffer:
    acks = AckBuffer(0.002)
    acks.open(ROOT, 0.0)
    return acks


def test_the_first_report_is_due_at_once_and_later_ones_are_gathered() -> None:
    acks = opened()
    acks.add(ROOT, ["a"], {}, 1.0)
    assert acks.deadline == 1.0
    assert acks.take_unreported(1.0) == [Ack(ROOT, ("a",))]
    assert acks.deadline is None
    acks.add(ROOT, ["b"], {}, 1.001)
    acks.add(ROOT, ["c"], {"d": "full"}, 1.0015)
    assert acks.deadline == 1.002
    assert acks.take_unreported(1.002) == [Ack(ROOT, ("b", "c"), (("d", "full"),))]
    assert acks.take_unreported(1.003) == []


def test_the_latest_acknowledgement_of_a_host_counts() -> None:
    acks = opened()
    acks.add(ROOT, [], {"a": "full"}, 1.0)
    acks.add(ROOT, ["a"], {}, 1.0)
    acks.add(ROOT, ["b"], {}, 1.0)
    acks.add(ROOT, [], {"b": "full"}, 1.0)
    assert acks.take_unreported(1.0) == [Ack(ROOT, ("a",), (("b", "full"),))]
    assert acks.failed(ROOT) == {"b": "full"}


def test_a_new_parent_gets_everything() -> None:
    acks = opened()
    acks.add(ROOT, ["a"], {"b": "full"}, 1.0)
    acks.take_unreported(1.0)
    assert acks.take_all(2.0) == [Ack(ROOT, ("a",), (("b", "full"),))]
    assert acks.take_unreported(2.0) == []


def test_acknowledgements_before_the_announcement_are_kept() -> None:
    acks = opened()
    acks.add(OTHER, ["a"], {"b": "full"}, 1.0)
    assert acks.take_unreported(1.0) == []
    acks.open(OTHER, 1.0)
    assert acks.take_unreported(1.0) == [Ack(OTHER, ("a",), (("b", "full"),))]


def test_a_closed_version_is_not_reported() -> None:
    acks = opened()
    acks.add(ROOT, ["a"], {}, 1.0)
    acks.close(ROOT)
    assert acks.take_all(1.0) == []
