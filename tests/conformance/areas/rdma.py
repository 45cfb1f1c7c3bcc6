"""RDMA buffers over TCP: memory of one actor, read and written by another."""

from __future__ import annotations

from typing import Any

from tests.conformance.actors import Memory, rdma_over_tcp
from tests.conformance.cases import Kit


def _memories(kit: Kit) -> tuple[Any, Any]:
    """Two actors, on different hosts."""
    procs = kit.procs(1, bootstrap=rdma_over_tcp)
    actors = procs.spawn("memory", Memory)
    return actors.slice(hosts=0), actors.slice(hosts=1)


def an_actor_reads_the_memory_of_another(kit: Kit) -> None:
    owner, other = _memories(kit)
    assert other.read.call_one(owner.share.call_one().get()).get() == bytes(range(256))


def an_actor_writes_the_memory_of_another(kit: Kit) -> None:
    owner, other = _memories(kit)
    other.write.call_one(owner.share.call_one().get(), bytes(256)).get()
    assert owner.content.call_one().get() == bytes(256)


def a_buffer_inside_other_values(kit: Kit) -> None:
    owner, other = _memories(kit)
    shared = {"buffers": [owner.share.call_one().get()]}
    assert other.read_nested.call_one(shared).get() == bytes(range(256))


def the_program_asks_for_the_size_of_a_buffer(kit: Kit) -> None:
    owner, _ = _memories(kit)
    assert owner.share.call_one().get().size() == 256


def actors_pass_buffers_to_each_other(kit: Kit) -> None:
    owner, other = _memories(kit)
    assert other.read_from.call_one(owner).get() == bytes(range(256))
