"""Work that something else may end leaves nothing running."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshgate_gateway.engine.races import before


class Work:
    """Goes on until it is ended, which takes a moment."""

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


def test_work_that_is_done_first_is_done() -> None:
    async def main() -> bool:
        return await before((never(),), asyncio.sleep(0), limit=60)

    assert asyncio.run(main())


def test_what_work_raises_passes_through() -> None:
    async def main() -> None:
        await before((never(),), fails())

    with pytest.raises(KeyError, match="what it raises"):
        asyncio.run(main())


@pytest.mark.parametrize("limit", [None, 0.01])
def test_work_that_is_cut_short_has_ended_when_that_is_told(limit: float | None) -> None:
    async def main() -> None:
        work, other = Work(), never()
        if limit is None:
            asyncio.get_running_loop().call_soon(other.set_result, None)
        assert not await before((other,), work.run(), limit=limit)
        assert work.ended

    asyncio.run(main())


def test_who_is_cancelled_leaves_no_work() -> None:
    async def main() -> None:
        work = Work()
        waiting = asyncio.ensure_future(before((never(),), work.run()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert work.ended

    asyncio.run(main())
