from __future__ import annotations

import asyncio

from meshgate.session.transport.event_loop import cancel_all_tasks, new_event_loop


def test_the_other_tasks_of_the_loop_are_cancelled_and_awaited() -> None:
    ended: list[str] = []

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("waiter")

    async def main() -> None:
        task = asyncio.ensure_future(wait_for_ever())
        await asyncio.sleep(0)
        await cancel_all_tasks()
        assert task.cancelled()

    loop = new_event_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert ended == ["waiter"]
