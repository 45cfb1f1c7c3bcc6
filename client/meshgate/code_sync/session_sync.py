"""``job.sync()``: one sync for each session, with its reports and warnings on stderr."""

from __future__ import annotations

import hashlib
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshgate.code_sync.project import (
    RUN_PROJECT,
    Tree,
    directories_outside,
    driver_import_paths,
    driver_script,
    driver_tree,
    ignored_modules,
    including_rules,
    modules_beside,
    paths_below,
)
from meshgate.code_sync.push import CodeSync, SyncReport
from meshgate.progress import Block, Waiting, report_stream
from meshgate_sync.errors import TreeError
from meshgate_sync.tree.scan import git_root

if TYPE_CHECKING:
    from meshgate.session.session import ClientSession

_OUTSIDE = (
    "meshgate: modules in {directory} are not synced because it is outside {tree}; workers use their installed copies, "
    "if any. Add it to sync_dirs to sync it"
)
_IGNORED = (
    "meshgate: this program imports {name}, but .gitignore, .meshgateignore or the default rules exclude it from the "
    "sync"
)
_INCLUDE = "meshgate: to sync what is excluded, add to {file}:\n  {rules}"
_BUSY = (
    "meshgate: {path} is saved continuously, and each save is sent to every host. Add it to .gitignore or "
    ".meshgateignore to exclude it. Syncs of this file alone are no longer reported"
)

_without_code: weakref.WeakSet[ClientSession] = weakref.WeakSet()  # sessions whose program cannot be synced


class SessionSync:
    """The sync of one session."""

    def __init__(self, client: ClientSession, tree: Tree, *, watching: bool = False) -> None:
        """``watching``: the sync that this one replaces pushed every save; this one does too, from its first push."""
        self._continue_watch = watching
        self.code = CodeSync(client, tree, cache_file=_cache_file(tree.top))
        self._quiet = False
        self._show: Callable[[SyncReport], object] = _print_report
        self._warned_of_missing = False

    @property
    def tree(self) -> Tree:
        return self.code.tree

    @property
    def watching(self) -> bool:
        """Whether every save is pushed, or will be from the next push on."""
        return self.code.watching or self._continue_watch

    def push_and_wait(
        self, *, watch: bool, quiet: bool, show: Callable[[SyncReport], object] | None = None
    ) -> SyncReport:
        """Pushes and waits until every host has the version; with ``watch``, also pushes on every later save. ``show``
        gets the reports that would be printed, later ones on another thread."""
        self._quiet, self._show = quiet, show or _print_report
        with Block() if quiet else Waiting(self.code.follow()):
            report = self.code.push()
        self._warn_of_missing_modules()
        self._report(report)
        self._watch(asked=watch)
        return report

    def push_in_background(self, *, watch: bool) -> None:
        """Pushes without waiting: a later spawn waits for the version on its own hosts."""
        self.code.push(wait=False)
        self._warn_of_missing_modules()
        self._watch(asked=watch)

    def _watch(self, *, asked: bool) -> None:
        if asked or self._continue_watch:
            self._continue_watch = False  # once: if watching fails, the report says how to resume it
            self.code.watch(self._report)

    def _warn_of_missing_modules(self) -> None:
        """Warns, once, of modules that this program uses and the sync does not send."""
        if self._quiet or self._warned_of_missing:
            return
        self._warned_of_missing = True
        for directory in directories_outside(self.tree):
            _print(_OUTSIDE.format(directory=directory, tree=self.tree))
        ignored = ignored_modules(self.tree, self.code.ignores)
        for name, _ in ignored:
            _print(_IGNORED.format(name=name))
        if ignored:
            rules = including_rules(self.tree, (path for _, path in ignored), self.code.ignores)
            _print(_INCLUDE.format(file=self.tree.top / ".meshgateignore", rules="\n  ".join(rules)))

    def _report(self, outcome: SyncReport | Exception) -> None:
        if isinstance(outcome, Exception):
            _print(f"meshgate: sync failed: {outcome}")
        elif not self._quiet:
            if not outcome.routine:
                self._show(outcome)
            for path in outcome.busy:
                _print(_BUSY.format(path=path))


def sync_for(client: ClientSession, sync_dirs: Sequence[str] | None) -> SessionSync:
    """The sync of ``client``'s session, created by the first call and replaced if ``sync_dirs`` names another tree."""
    current: SessionSync | None = client.attached.get(SessionSync)
    if current is not None and sync_dirs is None:
        tree = replace(current.tree, paths=paths_below(current.tree.top, driver_import_paths()))
    else:
        tree = driver_tree(sync_dirs)
    if current is None or replace(tree, paths=current.tree.paths) != current.tree:
        watching = current is not None and current.watching
        if current is not None:
            current.code.close()
        current = client.attached[SessionSync] = SessionSync(client, tree, watching=watching)
    current.code.tree = tree  # the driver may have added import paths since
    return current


def push_automatically(client: ClientSession, sync_dirs: Sequence[str] | None, *, watch: bool) -> None:
    """Pushes the driver's tree without waiting: ``sync_dirs``, or the project of the program."""
    chosen = SessionSync in client.attached  # here or by job.sync(): keep the tree
    if chosen or sync_dirs is not None or _is_in_repository():
        sync_for(client, None if chosen else sync_dirs).push_in_background(watch=watch)
    elif client not in _without_code:
        _push_directory(client, watch=watch)


def _push_directory(client: ClientSession, *, watch: bool) -> None:
    """Pushes the directory of a program that is not in a repository.

    A program that needs nothing of its directory may be in one that cannot be synced, such as the home directory,
    and gets one line that says so. If it has loaded modules from there, raises TreeError.
    """
    directory = next(iter(driver_import_paths()), os.getcwd())
    beside = modules_beside(directory)
    if driver_script() is None and not beside:
        return  # a prompt, or a command such as ``meshgate exec``, which may run anywhere
    try:
        sync_for(client, None).push_in_background(watch=watch)
    except (ValueError, TreeError) as error:
        client.attached.pop(SessionSync, None)  # it was not chosen
        if beside:
            raise TreeError(f"{error}\nThis program imports {', '.join(beside)} from {directory}") from error
        _without_code.add(client)
        _print(f"meshgate: workers cannot import modules of this program's directory: {error}")


def _is_in_repository() -> bool:
    try:
        top = driver_tree().top
    except ValueError:
        return False
    return git_root(top) == str(top) or os.environ.get(RUN_PROJECT) == str(top)


def _print_report(report: SyncReport) -> None:
    print(report, file=report_stream())


def _print(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201 - for the user's terminal


def _cache_file(top: Path) -> Path:
    """The file that keeps the stat cache of a tree between processes."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.blake2b(os.fsencode(top), digest_size=8).hexdigest()
    return cache / "meshgate" / "scans" / name
