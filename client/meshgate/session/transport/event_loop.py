"""The event loop of a connection thread."""

from __future__ import annotations

import asyncio


def new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # noqa: PLC0415 - does not exist for Windows; saves a fifth of each round trip
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def cancel_all_tasks() -> None:
    """Cancels the other tasks of the running loop and waits for them."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
