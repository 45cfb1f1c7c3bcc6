"""Work that is cut short leaves nothing running."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshgate_gateway.engine.code.run_until import run_until


class Work:
    """Runs until it is cancelled, and then takes a moment to end."""

    def __init__(self) -> None:
        self.ended = False

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.ended = True


async def fails() -> None:
    raise KeyError("what it raises")


def never() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def test_work_that_ends_first_is_done() -> None:
    async def main() -> bool:
        return await run_until((never(),), asyncio.sleep(0), timeout=60)

    assert asyncio.run(main())


def test_what_work_raises_is_raised() -> None:
    async def main() -> None:
        await run_until((never(),), fails())

    with pytest.raises(KeyError, match="what it raises"):
        asyncio.run(main())


@pytest.mark.parametrize("timeout", [None, 0.01])
def test_work_that_is_cut_short_has_ended_on_return(timeout: float | None) -> None:
    async def main() -> None:
        work, stop = Work(), never()
        if timeout is None:
            asyncio.get_running_loop().call_soon(stop.set_result, None)
        assert not await run_until((stop,), work.run(), timeout=timeout)
        assert work.ended

    asyncio.run(main())


def test_cancelling_the_wait_cancels_the_work() -> None:
    async def main() -> None:
        work = Work()
        waiting = asyncio.ensure_future(run_until((never(),), work.run()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert work.ended

    asyncio.run(main())
