"""Waiting for work that something else may end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

__all__ = ["before"]


async def before(others: Iterable[asyncio.Future[Any]], work: Coroutine[Any, Any, Any]) -> bool:
    """Whether ``work`` is done before one of ``others`` is, and else ends it. Raises what it raises."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, *others), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        task.cancel()
