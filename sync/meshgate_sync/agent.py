"""A host's relay as something to start and stop: a thread with an event loop of its own.

It runs inside an actor that the engine has spawned on the host, or inside any other process (``serve``); what that does
otherwise is no concern of it.

Imports nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from .home import default_home
from .plan import Routes
from .runner import Address, Runner
from .store import Store
from .timing import Timing

__all__ = ["HostAgent"]

_T = TypeVar("_T")
_START_SECONDS = 60.0


class HostAgent:
    """Opens the store below ``home`` and listens on ``bind``; ``address`` is where, with ``advertise`` (the pod's IP)
    in place of the bound host where given. Takes part once ``configure`` has been called. Thread-safe.

    Raises StoreError when the store cannot be opened, OSError when the address cannot be bound.
    """

    def __init__(
        self, name: str, *, secret: bytes, owner: str, home: str | None = None, bind: str = "127.0.0.1",
        port: int = 0, advertise: str | None = None, timing: Timing | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.home = home or default_home()
        self._owner = owner
        self._store = Store(self.home)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meshgate-relay", daemon=True)
        self._thread.start()
        self._runner = Runner(name, self._store, secret=secret, owner=owner, timing=timing)
        try:
            host, bound = self._call(self._runner.listen(bind, port))
        except BaseException:
            self.stop()
            raise
        self.address: Address = (advertise or host, bound)

    def configure(self, routes: Routes, addresses: Mapping[str, Address]) -> None:
        """Whom to ask, and where they are; the gateway's name is ``plan.GATEWAY``. Called once."""
        self._call(self._configure(routes, dict(addresses)))

    async def _configure(self, routes: Routes, addresses: Mapping[str, Address]) -> None:
        self._runner.configure(routes, addresses)

    def moved(self, addresses: Mapping[str, Address]) -> None:
        """Hosts that had ended are there again, at these addresses. Where they come first, they are asked again."""
        self._call(self._moved(dict(addresses)))

    async def _moved(self, addresses: Mapping[str, Address]) -> None:
        self._runner.moved(addresses)

    def stop(self) -> None:
        """Ends the relay and closes the store; versions stay. Idempotent."""
        if self._loop.is_closed():
            return
        self._call(self._runner.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._store.snapshots.release(self._owner)
        self._store.close()

    def _call(self, step: Coroutine[Any, Any, _T]) -> _T:
        waiting: concurrent.futures.Future[_T] = asyncio.run_coroutine_threadsafe(step, self._loop)
        return waiting.result(_START_SECONDS)
