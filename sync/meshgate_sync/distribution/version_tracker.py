"""Which host is ready to run which version, as the engine knows it, and waiting for it.

The tracker is notified of every acknowledgement and of every version that is retired. Waiters belong to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import HostsBehind


@dataclass(slots=True)
class VersionStatus:
    """Of one version: the hosts that are ready, why others cannot get it, and why the gateway cannot distribute it."""

    ready: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    gateway: str | None = None


class VersionTracker:
    def __init__(self) -> None:
        self._statuses: dict[bytes, VersionStatus] = {}
        self._waiters: dict[bytes, list[asyncio.Future[None]]] = {}
        self._lost: dict[str, str] = {}
        self._unreachable: dict[str, str] = {}

    def status(self, root: bytes) -> VersionStatus:
        return self._statuses.get(root) or VersionStatus()

    def is_awaited(self, root: bytes) -> bool:
        """Whether anyone is waiting for this version now."""
        return bool(self._waiters.get(root))

    def add(self, root: bytes, ready: Iterable[str], failed: Mapping[str, str]) -> None:
        """Hosts are ready for a version, or cannot get it."""
        status = self._statuses.setdefault(root, VersionStatus())
        for name in ready:
            status.ready.add(name)
            status.failed.pop(name, None)
        for name, reason in failed.items():
            status.ready.discard(name)
            status.failed[name] = reason
        self._wake(root)

    def set_gateway(self, root: bytes, problem: str | None) -> None:
        """Why the gateway cannot distribute the version; None if it can."""
        self._statuses.setdefault(root, VersionStatus()).gateway = problem
        self._wake(root)

    def _wake(self, root: bytes) -> None:
        for waiter in self._waiters.pop(root, []):
            if not waiter.done():
                waiter.set_result(None)

    def retire(self, root: bytes) -> None:
        """Forgets which hosts are ready for this version: they may collect it unnoticed."""
        self._statuses.pop(root, None)

    @property
    def lost_hosts(self) -> Mapping[str, str]:
        """The hosts that were lost, and why."""
        return self._lost

    def set_unreachable(self, host: str, problem: str) -> None:
        """What the host cannot reach and why, for the error if it is late. "" if it can again."""
        self._unreachable[host] = problem

    def host_lost(self, host: str, reason: str) -> None:
        """A host was lost with all it has. Fails the waits for it."""
        self._lost[host] = reason
        self._clear(host)
        for root in list(self._waiters):
            self._wake(root)

    def host_started(self, host: str) -> None:
        """A host is there, new or restarted: it has nothing yet."""
        self._lost.pop(host, None)
        self._unreachable.pop(host, None)
        self._clear(host)

    def _clear(self, host: str) -> None:
        for status in self._statuses.values():
            status.ready.discard(host)
            status.failed.pop(host, None)

    async def wait(self, root: bytes, hosts: Iterable[str], timeout: float) -> None:
        """Until all ``hosts`` are ready for ``root``. Raises HostsBehind, naming those that are not: as soon as one
        cannot be or the gateway cannot distribute the version, and after ``timeout`` seconds."""
        wanted = set(hosts)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            behind = self._behind(root, wanted)
            if not behind:
                return
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.setdefault(root, []).append(waiter)
            try:
                await asyncio.wait_for(waiter, max(0.0, deadline - loop.time()))
            except asyncio.TimeoutError:
                late = f"did not acknowledge it within {timeout:.0f} s"
                reasons = {name: f"{late}; it {problem}" for name, problem in self._unreachable.items() if problem}
                raise HostsBehind(root.hex(), {name: reasons.get(name, late) for name in sorted(behind)}) from None
            finally:
                if waiter in self._waiters.get(root, []):
                    self._waiters[root].remove(waiter)

    def _behind(self, root: bytes, hosts: set[str]) -> set[str]:
        """The hosts that are not ready yet. Raises HostsBehind if one of them cannot be."""
        status = self.status(root)
        behind = hosts - status.ready
        if not behind:
            return behind
        if status.gateway is not None:
            raise HostsBehind(root.hex(), {}, status.gateway)
        reasons = {**status.failed, **self._lost}
        failed = {name: reasons[name] for name in sorted(behind) if name in reasons}
        if failed:
            raise HostsBehind(root.hex(), failed)
        return behind
