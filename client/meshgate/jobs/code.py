"""``job.sync()``: the sync of a job's client, and what the terminal shows of it."""

from __future__ import annotations

import hashlib
import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

from meshgate.client import Client
from meshgate.code import CodeSync, SyncReport, Tree, tree_of
from meshgate.errors import JobNotRunning
from meshgate.jobs.import_paths import driver_import_paths
from meshgate.jobs.trait import JobTrait

__all__ = ["JobCode", "sync_of"]

_of_clients: weakref.WeakKeyDictionary[Client, JobCode] = weakref.WeakKeyDictionary()


class JobCode:
    """The sync of one job's session."""

    def __init__(self, client: Client, tree: Tree) -> None:
        self.tree = tree
        self.code = CodeSync(client, tree, cache_file=_cache_file(tree.top))
        self._quiet = False

    def now(self, *, watch: bool, quiet: bool) -> SyncReport:
        self._quiet = quiet
        report = self.code.push()
        self._tell(report)
        if watch:
            self.code.watch(self._tell)
        return report

    def follow(self, *, watch: bool) -> None:
        """Sends what there is and does not wait: what is spawned next waits for it, on its own hosts."""
        self.code.push(wait=False)
        if watch:
            self.code.watch(self._tell)

    def _tell(self, outcome: SyncReport | Exception) -> None:
        if isinstance(outcome, Exception):
            print(f"meshgate: the sync failed: {outcome}", file=sys.stderr)  # noqa: T201 - for the user's terminal
        elif not self._quiet:
            print(outcome, file=sys.stderr)  # noqa: T201 - for the user's terminal


def sync_of(job: JobTrait, sync_dirs: Sequence[str] | None) -> JobCode:
    """The sync of the job's present session; made with the first call. Raises JobNotRunning without a session."""
    client: Client | None = getattr(job, "_client", None)
    if client is None or client.closed:
        raise JobNotRunning(f"{job!r} has no session: call state() before sync()")
    known = _of_clients.get(client)
    if known is None or (sync_dirs is not None and tree_of(sync_dirs, driver_import_paths()) != known.tree):
        if known is not None:
            known.code.close()
        known = _of_clients[client] = JobCode(client, tree_of(sync_dirs, driver_import_paths()))
    return known


def _cache_file(top: Path) -> Path:
    """Where the stat cache of a tree is kept between processes."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.blake2b(os.fsencode(top), digest_size=8).hexdigest()
    return cache / "meshgate" / "scans" / name
