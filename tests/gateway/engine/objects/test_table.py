from __future__ import annotations

import asyncio

import pytest

from meshgate_gateway.engine.failures import RequestFailed
from meshgate_gateway.engine.objects import table
from meshgate_gateway.engine.objects.records import Channel
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_wire.messages import Failure
from tests.gateway.engine.fakes import async_test, turns

BROKEN = Failure(kind="supervision", message="out of memory", step="spawn_procs({}, name='p')", mesh="p")


@async_test
async def test_a_request_waits_for_an_object_that_is_not_created_yet() -> None:
    objects, channel = ObjectTable(), Channel("port")
    waiting = [asyncio.ensure_future(objects.wait(7)) for _ in range(2)]
    await turns()
    assert objects.require(7) is None
    objects.add(7, channel)
    assert await asyncio.gather(*waiting) == [channel, channel]


def test_the_failure_of_an_object_is_kept_as_it_was_reported() -> None:
    objects = ObjectTable()
    objects.add(7, BROKEN)
    objects.add(8, Channel("port"))
    assert [objects.failure(number) for number in (7, 8, 9)] == [BROKEN, None, None]


@async_test
async def test_a_waiter_that_is_cancelled_leaves_the_others_waiting() -> None:
    objects, channel = ObjectTable(), Channel("port")
    gone, waiting = asyncio.ensure_future(objects.wait(7)), asyncio.ensure_future(objects.wait(7))
    await turns()
    gone.cancel()
    await turns()
    objects.add(7, channel)
    assert await waiting is channel


@async_test
async def test_what_waits_for_an_object_that_fails_gets_that_step_as_the_cause() -> None:
    objects = ObjectTable()
    waiting = asyncio.ensure_future(objects.wait(7))
    await turns()
    objects.add(7, BROKEN)
    with pytest.raises(RequestFailed) as caught:
        await waiting
    failure = caught.value.failure
    assert (failure.kind, failure.step, failure.message) == ("step", BROKEN.step, "out of memory")


def test_the_cause_of_a_cause_stays_the_first_failed_step() -> None:
    objects = ObjectTable()
    objects.add(1, BROKEN)
    with pytest.raises(RequestFailed) as first:
        objects.require(1)
    objects.add(2, first.value.failure)
    with pytest.raises(RequestFailed) as second:
        objects.require(2)
    assert second.value.failure == first.value.failure


def test_a_failure_replaces_an_object_and_hides_it() -> None:
    objects = ObjectTable()
    objects.add(1, Channel("port"))
    objects.add(1, BROKEN)
    assert objects.get(1) is None
    assert objects.values() == []
    assert objects.items() == []


@async_test
async def test_a_request_that_waits_for_a_released_object_fails() -> None:
    objects = ObjectTable()
    waiting = asyncio.ensure_future(objects.wait(7))
    await turns()
    objects.release(7)
    with pytest.raises(RequestFailed, match="object 7 was released while a message still refers to it"):
        await waiting


def test_a_number_is_defined_once() -> None:
    objects = ObjectTable()
    objects.add(1, Channel("port"))
    with pytest.raises(RequestFailed, match="object 1 already exists"):
        objects.add(1, Channel("port"))
    objects.release(1)
    with pytest.raises(RequestFailed, match="object 1 already exists"):
        objects.add(1, Channel("port"))


def test_the_late_failure_of_a_released_object_is_ignored() -> None:
    objects = ObjectTable()
    objects.add(1, Channel("port"))
    objects.release(1)
    objects.add(1, BROKEN)
    with pytest.raises(RequestFailed, match="object 1 was released"):
        objects.require(1)


def test_only_the_latest_released_numbers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_RELEASED", 2)
    objects = ObjectTable()
    for number in (1, 2, 3):
        objects.release(number)
    assert objects.require(1) is None
    with pytest.raises(RequestFailed):
        objects.require(2)


def test_references_from_workers_get_negative_numbers_until_they_are_released() -> None:
    objects = ObjectTable()
    first, second = objects.add_reference("mesh a"), objects.add_reference("mesh b")
    assert (first, second) == (-1, -2)
    assert objects.reference(-2) == "mesh b"
    objects.release(-2)
    with pytest.raises(RequestFailed, match="object -2 did not arrive from a worker, or was released"):
        objects.reference(-2)
