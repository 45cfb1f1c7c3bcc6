from __future__ import annotations

from meshgate_sync.acks import Acks
from meshgate_sync.frames import Ack

ROOT, OTHER = b"r" * 32, b"o" * 32


def opened() -> Acks:
    acks = Acks(0.002)
    acks.open(ROOT, 0.0)
    return acks


def test_the_first_is_due_at_once_and_those_after_it_are_gathered() -> None:
    acks = opened()
    acks.note(ROOT, ["a"], {}, 1.0)
    assert acks.deadline == 1.0
    assert acks.untold(1.0) == [Ack(ROOT, ("a",))]
    assert acks.deadline is None
    acks.note(ROOT, ["b"], {}, 1.001)
    acks.note(ROOT, ["c"], {"d": "full"}, 1.0015)
    assert acks.deadline == 1.002
    assert acks.untold(1.002) == [Ack(ROOT, ("b", "c"), (("d", "full"),))]
    assert acks.untold(1.003) == []


def test_what_was_heard_last_of_a_host_counts() -> None:
    acks = opened()
    acks.note(ROOT, [], {"a": "full"}, 1.0)
    acks.note(ROOT, ["a"], {}, 1.0)
    acks.note(ROOT, ["b"], {}, 1.0)
    acks.note(ROOT, [], {"b": "full"}, 1.0)
    assert acks.untold(1.0) == [Ack(ROOT, ("a",), (("b", "full"),))]
    assert acks.failed(ROOT) == {"b": "full"}


def test_a_new_parent_is_told_everything() -> None:
    acks = opened()
    acks.note(ROOT, ["a"], {"b": "full"}, 1.0)
    acks.untold(1.0)
    assert acks.everything(2.0) == [Ack(ROOT, ("a",), (("b", "full"),))]
    assert acks.untold(2.0) == []


def test_what_is_heard_of_a_version_before_it_is_known_is_kept() -> None:
    acks = opened()
    acks.note(OTHER, ["a"], {"b": "full"}, 1.0)
    assert acks.untold(1.0) == []
    acks.open(OTHER, 1.0)
    assert acks.untold(1.0) == [Ack(OTHER, ("a",), (("b", "full"),))]


def test_a_closed_version_is_told_no_more() -> None:
    acks = opened()
    acks.note(ROOT, ["a"], {}, 1.0)
    acks.close(ROOT)
    assert acks.everything(1.0) == []
