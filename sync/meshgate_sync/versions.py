"""Which host is ready to run which version, as the engine knows it, and how one waits for it.

The board is told of every acknowledgement and of every version whose snapshots are given up; futures of those who wait
belong to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .errors import HostsBehind

__all__ = ["Board", "Standing"]


@dataclass(slots=True)
class Standing:
    """Of one version: hosts that are ready for it, and why others cannot be; why the gateway cannot hand it on."""

    ready: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    gateway: str | None = None


class Board:
    def __init__(self) -> None:
        self._standings: dict[bytes, Standing] = {}
        self._waiting: dict[bytes, list[asyncio.Future[None]]] = {}
        self._gone: dict[str, str] = {}
        self._troubles: dict[str, str] = {}

    def standing(self, root: bytes) -> Standing:
        return self._standings.get(root) or Standing()

    def awaited(self, root: bytes) -> bool:
        """Whether anyone waits for this version now."""
        return bool(self._waiting.get(root))

    def note(self, root: bytes, ready: Iterable[str], failed: Mapping[str, str]) -> None:
        standing = self._standings.setdefault(root, Standing())
        for name in ready:
            standing.ready.add(name)
            standing.failed.pop(name, None)
        for name, reason in failed.items():
            standing.ready.discard(name)
            standing.failed[name] = reason
        self._wake(root)

    def note_gateway(self, root: bytes, problem: str | None) -> None:
        """The gateway itself cannot hand the version on; or, with None, it can."""
        self._standings.setdefault(root, Standing()).gateway = problem
        self._wake(root)

    def _wake(self, root: bytes) -> None:
        for waiter in self._waiting.pop(root, []):
            if not waiter.done():
                waiter.set_result(None)

    def forget(self, root: bytes) -> None:
        """Nothing is known any more of who has this version."""
        self._standings.pop(root, None)

    @property
    def missing(self) -> Mapping[str, str]:
        """The hosts that are gone, and why."""
        return self._gone

    def trouble(self, host: str, why: str) -> None:
        """What the host cannot reach and why: told of it when it is late. "" when that is over."""
        self._troubles[host] = why

    def gone(self, host: str, why: str) -> None:
        """A host was lost: it has nothing, and whoever waits for it is told why."""
        self._gone[host] = why
        self._clear(host)
        for root in list(self._waiting):
            self._wake(root)

    def came(self, host: str) -> None:
        """A host is there, new or again: it has nothing yet."""
        self._gone.pop(host, None)
        self._troubles.pop(host, None)
        self._clear(host)

    def _clear(self, host: str) -> None:
        for standing in self._standings.values():
            standing.ready.discard(host)
            standing.failed.pop(host, None)

    async def wait(self, root: bytes, hosts: Iterable[str], timeout: float) -> None:
        """Until all ``hosts`` are ready for ``root``. Raises HostsBehind as soon as one cannot be or
        the gateway cannot hand it on, or after ``timeout`` seconds, naming those that are not."""
        wanted = set(hosts)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            standing = self.standing(root)
            lacking = wanted - standing.ready
            if not lacking:
                return
            if standing.gateway is not None:
                raise HostsBehind(root.hex(), {}, standing.gateway)
            why = {**standing.failed, **self._gone}
            failed = {name: why[name] for name in sorted(lacking) if name in why}
            if failed:
                raise HostsBehind(root.hex(), failed)
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiting.setdefault(root, []).append(waiter)
            try:
                await asyncio.wait_for(waiter, max(0.0, deadline - loop.time()))
            except asyncio.TimeoutError:
                late = f"did not acknowledge it within {timeout:.0f} s"
                why = {name: f"{late}; it {trouble}" for name, trouble in self._troubles.items() if trouble}
                raise HostsBehind(root.hex(), {name: why.get(name, late) for name in sorted(lacking)}) from None
            finally:
                if waiter in self._waiting.get(root, []):
                    self._waiting[root].remove(waiter)
