"""Waiting for work that something else may end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

__all__ = ["before"]


async def before(
    others: Iterable[asyncio.Future[Any]], work: Coroutine[Any, Any, Any], *, limit: float | None = None
) -> bool:
    """Whether ``work`` is done before one of ``others`` is and within ``limit`` seconds, and else ends it. Raises what
    it raises. Work that was cut short has ended when this returns, as it has when this is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, *others), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
