from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

from meshgate_gateway.engine.detached import kept_channels as module
from meshgate_gateway.engine.detached.kept_channels import KeptChannels
from meshgate_gateway.engine.detached.spool import OVERHEAD, Spool
from meshgate_wire.messages import PortMessage


class Holder:
    def __init__(self, spool: Spool | None = None) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.queued = 0
        self.channels = KeptChannels(self._send, lambda stream: self.queued, spool=spool)

    def _send(self, header: PortMessage, buffers: Sequence[Any], stream: int) -> None:
        self.sent.append((header.number, bytes(buffers[0])))

    def put(self, data: bytes, port: int = 4) -> None:
        self.channels.keep(PortMessage(port=port), (data,))


def test_messages_are_numbered_and_sent_at_once() -> None:
    holder = Holder()
    for data in (b"a", b"b"):
        holder.put(data)
    assert holder.sent == [(1, b"a"), (2, b"b")]


def test_a_new_holder_gets_what_was_not_taken() -> None:
    holder = Holder()
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
    holder = Holder()
    holder.queued = module.MAX_QUEUED
    holder.put(b"a")
    holder.channels.mark_taken({4: 1})  # not sent, so it cannot have been taken
    assert holder.sent == []
    holder.queued = 0
    holder.channels.feed()
    assert holder.sent == [(1, b"a")]


def test_without_space_the_ports_are_not_read_until_something_is_taken() -> None:
    holder = Holder(Spool(memory=0, disk=1))
    holder.put(b"a")
    assert not holder.channels.full
    holder.put(b"b")
    assert holder.channels.full
    assert holder.sent == [(1, b"a"), (2, b"b")]
    holder.channels.mark_taken({4: 2})
    assert not holder.channels.full


def test_a_closed_channel_frees_its_messages() -> None:
    holder = Holder(Spool(memory=0, disk=1))
    for data in (b"a", b"b"):
        holder.put(data)
    holder.channels.released(4)
    assert not holder.channels.full
    holder.channels.holder_changed()
    holder.channels.resume()
    assert len(holder.sent) == 2


def test_what_is_taken_makes_space() -> None:
    holder = Holder(Spool(memory=0, disk=2))
    for number in range(1, 6):
        holder.put(b"ab")
        assert not holder.channels.full
        holder.channels.mark_taken({4: number})


def test_a_small_message_takes_no_more_memory_than_is_counted_in_memory_or_on_disk() -> None:
    count = 5_000
    for memory in (count * (OVERHEAD + 10), 0):
        channels = KeptChannels(lambda *sent: None, lambda stream: module.MAX_QUEUED, spool=Spool(memory, 10 * count))
        tracemalloc.start()
        for number in range(1_000, 1_000 + count):
            channels.keep(PortMessage(port=4, rank=1), (str(number).encode(),))
        assert tracemalloc.get_traced_memory()[0] < count * OVERHEAD
        tracemalloc.stop()
        assert not channels.full
        channels.close()
