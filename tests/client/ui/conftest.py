from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from queue import Queue

import pytest

from meshgate.ui.server import Feed, run_page


@contextlib.contextmanager
def serving(feed: Feed) -> Iterator[str]:
    """Serves the page in a thread; yields the one-time link."""
    links: Queue[str] = Queue()
    loop = asyncio.new_event_loop()
    task = loop.create_task(run_page(feed, 0, links.put))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield links.get(timeout=60)
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate.ui.server.INTERVAL", 0.05)
    monkeypatch.setattr("meshgate.ui.server.USAGE_INTERVAL", 0.05)
