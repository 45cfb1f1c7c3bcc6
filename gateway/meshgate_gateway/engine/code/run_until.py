"""Work that something else may cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def run_until(
    stops: Iterable[asyncio.Future[Any]], work: Coroutine[Any, Any, Any], *, timeout: float | None = None
) -> bool:
    """Runs ``work`` until it is done, one of ``stops`` is, or ``timeout`` seconds pass. Returns whether it is done.

    Raises what ``work`` raises. Unfinished work is cancelled, and has ended when this returns or is cancelled itself.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, *stops), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
