from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from meshgate_gateway.engine.detached import kept_streams as module
from meshgate_gateway.engine.detached.kept_streams import KeptChannels, KeptOutput
from meshgate_gateway.engine.detached.spool import OVERHEAD, Spool
from meshgate_wire.messages import Output, OutputLine, PortMessage


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
    holder.queued = module.MAX_QUEUED_OUTPUT
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


class ChannelHolder:
    def __init__(self, spool: Spool | None = None) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.queued = 0
        self.channels = KeptChannels(self._send, lambda stream: self.queued, spool=spool)

    def _send(self, header: PortMessage, buffers: Sequence[Any], stream: int) -> None:
        self.sent.append((header.number, bytes(buffers[0])))

    def put(self, data: bytes, port: int = 4) -> None:
        self.channels.keep(PortMessage(port=port), (data,))


def test_messages_are_numbered_and_sent_at_once() -> None:
    holder = ChannelHolder()
    for data in (b"a", b"b"):
        holder.put(data)
    assert holder.sent == [(1, b"a"), (2, b"b")]


def test_a_new_holder_gets_what_was_not_taken() -> None:
    holder = ChannelHolder()
    for data in (b"a", b"b", b"c"):
        holder.put(data)
    holder.channels.mark_taken({4: 1})
    holder.channels.holder_changed()
    holder.put(b"d")
    holder.sent.clear()
    holder.channels.resume()
    assert holder.sent == [(2, b"b"), (3, b"c"), (4, b"d")]
    holder.channels.mark_taken({4: 3, 99: 7})
    holder.channels.holder_changed()
    holder.channels.resume()
    assert holder.sent[3:] == [(4, b"d")]


def test_messages_wait_while_the_wire_has_no_space() -> None:
    holder = ChannelHolder()
    holder.queued = module.MAX_QUEUED_MESSAGES
    holder.put(b"a")
    holder.channels.mark_taken({4: 1})  # not sent, so it cannot have been taken
    assert holder.sent == []
    holder.queued = 0
    holder.channels.feed()
    assert holder.sent == [(1, b"a")]


def test_without_space_the_ports_are_not_read_until_something_is_taken() -> None:
    holder = ChannelHolder(Spool(memory=0, disk=1))
    holder.put(b"a")
    assert not holder.channels.full
    holder.put(b"b")
    assert holder.channels.full
    assert holder.sent == [(1, b"a"), (2, b"b")]
    holder.channels.mark_taken({4: 2})
    assert not holder.channels.full


def test_a_closed_channel_frees_its_messages() -> None:
    holder = ChannelHolder(Spool(memory=0, disk=1))
    for data in (b"a", b"b"):
        holder.put(data)
    holder.channels.released(4)
    assert not holder.channels.full
    holder.channels.holder_changed()
    holder.channels.resume()
    assert len(holder.sent) == 2


def test_what_is_taken_makes_space() -> None:
    holder = ChannelHolder(Spool(memory=0, disk=2))
    for number in range(1, 6):
        holder.put(b"ab")
        assert not holder.channels.full
        holder.channels.mark_taken({4: number})


def test_a_small_message_takes_no_more_memory_than_is_counted_in_memory_or_on_disk() -> None:
    count = 5_000
    for memory in (count * (OVERHEAD + 10), 0):
        channels = KeptChannels(
            lambda *sent: None, lambda stream: module.MAX_QUEUED_MESSAGES, spool=Spool(memory, 10 * count)
        )
        tracemalloc.start()
        for number in range(1_000, 1_000 + count):
            channels.keep(PortMessage(port=4, rank=1), (str(number).encode(),))
        assert tracemalloc.get_traced_memory()[0] < count * OVERHEAD
        tracemalloc.stop()
        assert not channels.full
        channels.close()
