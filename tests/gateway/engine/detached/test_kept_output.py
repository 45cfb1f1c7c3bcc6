from __future__ import annotations

import pytest

from meshgate_gateway.engine.detached import kept_output as module
from meshgate_gateway.engine.detached.kept_output import KeptOutput
from meshgate_gateway.engine.detached.spool import Spool
from meshgate_wire.messages import Output, OutputLine


class Holder:
    def __init__(self, spool: Spool | None = None) -> None:
        self.sent: list[Output] = []
        self.queued = 0
        self.log = KeptOutput(self.sent.append, lambda: self.queued, spool=spool)

    def print(self, *texts: str, read: bool = False) -> None:
        self.log.add(tuple(OutputLine(stream="stdout", text=text) for text in texts), read=read)

    @property
    def seen(self) -> list[tuple[int, str]]:
        return [(output.first + at, line.text) for output in self.sent for at, line in enumerate(output.lines)]


def test_lines_are_numbered_and_sent_at_once() -> None:
    holder = Holder()
    holder.print("a", "b")
    holder.print("c")
    assert holder.seen == [(1, "a"), (2, "b"), (3, "c")]
    assert holder.log.unread == 3


def test_lines_wait_while_the_wire_has_no_space() -> None:
    holder = Holder()
    holder.queued = module.MAX_QUEUED
    holder.print("a")
    holder.queued = 0
    holder.print("b")  # not before "a"
    assert holder.seen == []
    holder.log.feed()
    assert holder.seen == [(1, "a"), (2, "b")]


@pytest.mark.parametrize(("replay", "expected"), [(False, ["c", "d"]), (True, ["a", "b", "c", "d"])])
def test_a_new_holder_gets_what_was_not_read_or_everything(replay: bool, expected: list[str]) -> None:
    holder = Holder(Spool(memory=0, disk=10_000))
    for text in "abc":
        holder.print(text)
    holder.log.mark_read(2)
    holder.log.holder_changed()
    holder.print("d")
    holder.log.feed()
    holder.sent.clear()
    holder.log.resume(replay=replay)
    assert [text for _, text in holder.seen] == expected
    holder.print("e")
    assert holder.seen[-1] == (5, "e")


def test_lines_that_the_holder_has_hidden_are_kept_for_a_replay_alone() -> None:
    holder = Holder()
    holder.print("a", read=True)
    assert (holder.sent, holder.log.unread) == ([], 0)
    holder.log.resume(replay=True)
    assert holder.seen == [(1, "a")]


def test_without_space_what_was_read_is_dropped_first_and_then_workers_wait() -> None:
    holder = Holder(Spool(memory=0, disk=200))
    holder.print("a")
    holder.print("b")
    assert holder.log.full
    holder.log.mark_read(1)
    assert (holder.log.dropped, holder.log.full) == (1, True)
    holder.log.mark_read(2)
    assert not holder.log.full
    holder.log.holder_changed()
    holder.print("c")
    holder.sent.clear()
    holder.log.resume(replay=True)
    assert [text for _, text in holder.seen] == ["c"]
    assert holder.log.dropped == 2


def test_lines_that_were_read_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READ_BYTES", 500)
    holder = Holder()
    for number in range(20):
        holder.print(f"line {number}")
        holder.log.mark_read(number + 1)
    assert 10 < holder.log.dropped < 20
