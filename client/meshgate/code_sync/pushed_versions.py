"""The versions that this driver has pushed, and what the gateway has reported of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from meshgate.errors import MeshFailure, StaleCodeError, StepFailedError, SupervisionError
from meshgate_sync.upload.protocol import SyncStatus

SYNC_TIMEOUT = 600.0  # seconds
_REMEMBERED = 64  # versions
_LISTED_HOSTS = 8  # in an error message


@dataclass(frozen=True, slots=True)
class SessionChecks:
    """``error`` returns why the session has ended, or None; ``attach_failure`` why no hosts are attached, or ``""``.
    ``ranks(hosts)`` returns the mesh of these hosts, and the hosts by rank."""

    error: Callable[[], BaseException | None]
    attach_failure: Callable[[], str]
    ranks: Callable[[Iterable[str]], tuple[str, dict[int, str]]]


class PushedVersions:
    """Statuses of pushed versions. Thread-safe."""

    def __init__(self, session: SessionChecks) -> None:
        self._session = session
        self._statuses: dict[str, SyncStatus] = {}
        self._order: list[str] = []  # the newest last
        self._changed = threading.Condition()
        self._closed = False

    def add(self, version: str, *, reset: bool) -> None:
        """Makes ``version`` the newest. ``reset`` discards its earlier status, because it is offered again."""
        with self._changed:
            if reset:
                self._statuses.pop(version, None)
            self._order = [*(known for known in self._order[-_REMEMBERED:] if known != version), version]
            self._statuses = {root: status for root, status in self._statuses.items() if root in self._order}

    def update(self, status: SyncStatus) -> None:
        with self._changed:
            if status.root in self._order:
                self._statuses[status.root] = status
            self._changed.notify_all()

    def failed(self) -> list[str]:
        """The versions that some host could not get."""
        with self._changed:
            return [status.root for status in self._statuses.values() if status.failed]

    def close(self) -> None:
        """Makes pending calls of ``wait`` raise."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, version: str, progress: Callable[[SyncStatus], None] | None = None) -> SyncStatus:
        """Waits until every host has ``version`` or a newer one, or the newest has failed on a host.

        Returns that status. Raises StepFailedError if no host is attached, StaleCodeError on a timeout and after
        ``close``, and the session's error if it has ended.
        """
        deadline = time.monotonic() + SYNC_TIMEOUT
        reported: SyncStatus | None = None
        with self._changed:
            while True:
                for status in self._statuses_since(version):
                    if status.hosts and status.ready >= status.hosts and not status.failed:
                        return status
                newest = self._statuses.get(self._order[-1])
                if newest is not None and newest is not reported:
                    reported = newest
                    if progress is not None:
                        progress(newest)
                    if newest.failed and self._session.error() is None:
                        return newest
                self._raise_if_hopeless(version, newest)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise StaleCodeError(_timeout_message(version, newest))
                self._changed.wait(min(remaining, 0.5))

    def _raise_if_hopeless(self, version: str, newest: SyncStatus | None) -> None:
        if (error := self._session.error()) is not None:
            raise error
        if (newest is None or not newest.hosts) and (reason := self._session.attach_failure()):
            raise StepFailedError(
                f"no host received code version {version[:12]} because an earlier step failed: attaching the hosts\n"
                f"{reason}",
                "attaching the hosts",
            )
        if self._closed:
            raise StaleCodeError(f"the sync was closed before every host had code version {version[:12]}")

    def _statuses_since(self, version: str) -> list[SyncStatus]:
        """The known statuses of ``version`` and later ones, the newest first."""
        start = self._order.index(version) if version in self._order else 0
        return [self._statuses[root] for root in reversed(self._order[start:]) if root in self._statuses]


def raise_if_failed(status: SyncStatus, session: SessionChecks) -> None:
    """Raises an error that names the hosts on which the version failed: SupervisionError if they were all lost, and
    StaleCodeError otherwise."""
    if not status.failed:
        return
    listed = sorted(status.failed.items())[:_LISTED_HOSTS]
    reasons = "; ".join(f"{name}: {reason}" for name, reason in listed)
    failures = max(status.failures, len(status.failed))
    more = f" (and {failures - len(listed)} more)" if failures > len(listed) else ""
    count = f"{failures} host" + ("" if failures == 1 else "s")
    if not set(status.failed) <= set(status.lost):
        message = f"code version {status.root[:12]} did not reach {count}: {reasons}{more}"
        raise StaleCodeError(message, tuple(status.failed))
    were, them = ("was", "it") if failures == 1 else ("were", "them")
    message = f"{count} {were} lost, so code version {status.root[:12]} did not reach {them}: {reasons}{more}"
    mesh, hosts = session.ranks(status.lost)
    raise SupervisionError(message, MeshFailure(mesh, f"{reasons}{more}", tuple(hosts), hosts), endpoint="sync")


def _timeout_message(version: str, status: SyncStatus | None) -> str:
    ready = f"{status.ready} of {status.hosts} hosts have it" if status else "no host has reported"
    return f"code version {version[:12]} did not reach every host within {SYNC_TIMEOUT:.0f} s: {ready}"
