"""``job.sync()``: the sync of a job's client, and what the terminal shows of it."""

from __future__ import annotations

import hashlib
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshgate.client import Client
from meshgate.code import CodeSync, SyncReport
from meshgate.errors import JobNotRunning
from meshgate.jobs.import_paths import driver_import_paths, driver_script, is_installed, loaded_files
from meshgate.jobs.trait import JobTrait
from meshgate.project import Tree, paths_below, tree_of
from meshgate_sync.scan import git_root

__all__ = ["JobCode", "sync_of"]

_OURS = frozenset({"__main__", "meshgate", "meshgate_kubernetes", "meshgate_sync", "meshgate_wire"})
_OUTSIDE = (
    "meshgate: modules from {place} are not synced, for it is outside of {top}: workers have those that are installed "
    "there, if any. Name it in sync_dirs to sync it too"
)
_LEFT_OUT = (
    "meshgate: module {name} is used here and left out of the sync by .gitignore, .meshgateignore or the defaults: "
    "the line !/{path} in .meshgateignore brings it"
)
_BUSY = (
    "meshgate: {path} is saved all the time, and every save is sent to every host. Name it in .gitignore or "
    ".meshgateignore to leave it out; saves of it alone are no longer told"
)

_of_clients: weakref.WeakKeyDictionary[Client, JobCode] = weakref.WeakKeyDictionary()


class JobCode:
    """The sync of one job's session."""

    def __init__(self, client: Client, tree: Tree) -> None:
        self.tree = tree
        self.code = CodeSync(client, tree, cache_file=_cache_file(tree.top))
        self._quiet = False
        self._told_missing = False

    def now(self, *, watch: bool, quiet: bool) -> SyncReport:
        self._quiet = quiet
        report = self.code.push()
        self._tell_missing()
        self._tell(report)
        if watch:
            self.code.watch(self._tell)
        return report

    def follow(self, *, watch: bool) -> None:
        """Sends what there is and does not wait: what is spawned next waits for it, on its own hosts."""
        self.code.push(wait=False)
        self._tell_missing()
        if watch:
            self.code.watch(self._tell)

    def _tell_missing(self) -> None:
        """Once: what the sync does not bring, though this program uses it."""
        if self._quiet or self._told_missing:
            return
        self._told_missing = True
        for place in _places_outside(self.tree):
            print(_OUTSIDE.format(place=place, top=self.tree.top), file=sys.stderr)  # noqa: T201 - for the terminal
        for name, path in _left_out(self.code):
            print(_LEFT_OUT.format(name=name, path=path), file=sys.stderr)  # noqa: T201 - for the terminal

    def _tell(self, outcome: SyncReport | Exception) -> None:
        if isinstance(outcome, Exception):
            print(f"meshgate: the sync failed: {outcome}", file=sys.stderr)  # noqa: T201 - for the user's terminal
        elif not self._quiet:
            if not outcome.routine:
                print(outcome, file=sys.stderr)  # noqa: T201 - for the user's terminal
            for path in outcome.busy:
                print(_BUSY.format(path=path), file=sys.stderr)  # noqa: T201 - for the user's terminal


def sync_of(job: JobTrait, sync_dirs: Sequence[str] | None) -> JobCode:
    """The sync of the job's present session; made with the first call. Raises JobNotRunning without a session."""
    client: Client | None = getattr(job, "_client", None)
    if client is None or client.closed:
        raise JobNotRunning(f"{job!r} has no session: call state() before sync()")
    known = _of_clients.get(client)
    if known is None or (sync_dirs is not None and driver_tree(sync_dirs) != known.tree):
        if known is not None:
            known.code.close()
        known = _of_clients[client] = JobCode(client, driver_tree(sync_dirs))
    elif sync_dirs is None:  # the driver may import from more places by now
        known.code.tree = replace(known.tree, paths=paths_below(known.tree.top, driver_import_paths()))
    return known


def driver_tree(sync_dirs: Sequence[str] | None = None) -> Tree:
    """What this program syncs. Raises ValueError where no tree is meant."""
    return tree_of(sync_dirs, driver_import_paths(), driver_script())


def in_repository() -> bool:
    """Whether what this program syncs by itself is a git repository."""
    try:
        top = driver_tree().top
    except ValueError:
        return False
    return git_root(top) == str(top)


def _places_outside(tree: Tree) -> list[str]:
    """Where modules of the driver's are from that the sync does not bring."""
    outside = [place for place in driver_import_paths() if not Path(place).resolve().is_relative_to(tree.top)]
    files = [
        os.path.dirname(os.path.realpath(file)) for name, file in loaded_files() if name.partition(".")[0] not in _OURS
    ]
    return [place for place in outside if any(Path(file).is_relative_to(os.path.realpath(place)) for file in files)]


def _left_out(code: CodeSync) -> list[tuple[str, str]]:
    """Modules that this program has loaded from the tree and that the sync left out, by their paths below its top."""
    found: list[tuple[str, str]] = []
    if code.tree.parts:
        return found  # what is in none of them was not asked for
    for name, file in loaded_files():
        if name != "__main__":
            path = Path(os.path.realpath(file))
            if path.is_relative_to(code.tree.top) and not is_installed(file) and code.leaves_out(str(path)):
                found.append((name, str(path.relative_to(code.tree.top))))
    return found


def _cache_file(top: Path) -> Path:
    """Where the stat cache of a tree is kept between processes."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.blake2b(os.fsencode(top), digest_size=8).hexdigest()
    return cache / "meshgate" / "scans" / name
