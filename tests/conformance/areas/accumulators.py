"""Accumulators: the replies of all actors, folded into one value."""

from __future__ import annotations

import asyncio

from tests.conformance.actors import Owner
from tests.conformance.cases import Kit, raises


def an_accumulator_folds_the_answers(kit: Kit) -> None:
    workers = kit.spawn()
    accumulator = kit.api.Accumulator(workers.rank, 0, lambda total, value: total + value)
    assert accumulator.accumulate().get() == 6


def arguments_reach_every_actor(kit: Kit) -> None:
    workers = kit.spawn()
    accumulator = kit.api.Accumulator(workers.add, 0, lambda total, value: total + value)
    assert accumulator.accumulate(2, times=3).get() == 24
    assert accumulator.accumulate(1).get() == 28


def the_identity_may_be_of_another_type(kit: Kit) -> None:
    accumulator = kit.api.Accumulator(kit.spawn().rank, frozenset(), lambda seen, rank: seen | {rank})
    assert accumulator.accumulate().get() == {0, 1, 2, 3}


def an_accumulation_can_be_awaited(kit: Kit) -> None:
    accumulator = kit.api.Accumulator(kit.spawn().rank, 0, max)

    async def program() -> int:
        largest: int = await accumulator.accumulate()
        return largest

    assert asyncio.run(program()) == 3


def a_failing_reply_fails_the_accumulation(kit: Kit) -> None:
    accumulator = kit.api.Accumulator(kit.spawn().fail_on, 0, max)
    assert "rank 2" in str(raises(kit.api.ActorError, lambda: accumulator.accumulate(2).get()))


def a_failing_fold_fails_the_accumulation(kit: Kit) -> None:
    accumulator = kit.api.Accumulator(kit.spawn().rank, 0, lambda total, value: total + "x")
    raises(TypeError, lambda: accumulator.accumulate().get())


def an_accumulation_inside_an_actor(kit: Kit) -> None:
    assert kit.one(Owner).accumulated.call_one(kit.spawn()).get() == 6
