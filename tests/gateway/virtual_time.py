"""An event loop whose clock jumps to the next timer, for tests of timeouts."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, but waiting for a timer takes no time. ``main`` must not wait for input or threads."""
    loop = _VirtualTimeLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_SkippingSelector(self))

    def time(self) -> float:
        return self.now


class _SkippingSelector(selectors.BaseSelector):
    """Advances the clock of ``loop`` instead of waiting."""

    def __init__(self, loop: _VirtualTimeLoop) -> None:
        self._loop, self._selector = loop, selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._selector.select(0)
        if not ready:
            assert timeout is not None, "every task waits and no timer is set"
            self._loop.now += timeout
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._selector.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._selector.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._selector.get_map()

    def close(self) -> None:
        self._selector.close()
