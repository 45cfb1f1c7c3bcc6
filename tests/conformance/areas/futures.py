"""Futures: waiting, time limits, asyncio."""

from __future__ import annotations

import asyncio

from tests.conformance.actors import Concurrent
from tests.conformance.cases import Kit, raises


def get_may_be_called_twice(kit: Kit) -> None:
    future = kit.one().echo.call_one(3)
    assert (future.get(), future.get()) == (3, 3)


def get_times_out_and_may_be_called_again(kit: Kit) -> None:
    actor = kit.one(Concurrent)
    waiting = actor.wait.call_one()
    raises(TimeoutError, lambda: waiting.get(timeout=0.2))
    actor.open.call_one().get()
    assert waiting.get(timeout=30) == "opened"


def result_and_exception(kit: Kit) -> None:
    worker = kit.one()
    assert worker.echo.call_one(1).result() == 1
    assert worker.echo.call_one(1).exception() is None
    assert isinstance(worker.fail.call_one().exception(), kit.api.ActorError)


def await_in_asyncio(kit: Kit) -> None:
    worker = kit.one()

    async def program() -> list[int]:
        first = await worker.echo.call_one(1)
        rest = await asyncio.gather(*(worker.echo.call_one(number).as_asyncio() for number in (2, 3)))
        return [first, *rest]

    assert asyncio.run(program()) == [1, 2, 3]


def await_raises_the_error(kit: Kit) -> None:
    worker = kit.one()

    async def program() -> None:
        await worker.fail.call_one("awaited")

    assert "awaited" in str(raises(kit.api.ActorError, lambda: asyncio.run(program())))


def futures_are_monarchs(kit: Kit) -> None:
    import monarch.actor

    assert isinstance(kit.one().echo.call_one(1), monarch.actor.Future)


def futures_are_not_constructed_by_programs(kit: Kit) -> None:
    raises(TypeError, kit.api.Future)


def initialized_resolves(kit: Kit) -> None:
    procs = kit.procs()
    assert kit.hosts.initialized.get() is True
    assert procs.initialized.get() is True
