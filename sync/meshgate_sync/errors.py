"""Everything that can go wrong while code is synced, named by whose fault it is.

::

    SyncError
    ├── TreeError                the tree on the client
    │   ├── TreeTooLarge         over the limit; lists the largest entries
    │   ├── LinkLeavesTree       symbolic links that point outside
    │   └── UnstableFile         changed during every attempt to read it
    ├── MalformedMessage         bytes from the network that no version of this protocol sends
    ├── DeltaMismatch            a delta that does not lead from its base to its root
    ├── BaseUnknown              a delta whose base this store does not have
    ├── StoreError               the disk of one host
    │   ├── StoreFull            no space left
    │   └── ObjectsDamaged       files changed, or vanished, after they were fetched
    ├── VersionUnavailable       this host does not have the version that a process needs
    ├── CannotReload             a changed module of a running process cannot be loaded twice
    ├── HostsBehind              hosts do not have the version that a spawn needs; names them
    └── PeerRefused              the other relay does not have this session's secret
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = [
    "BaseUnknown", "CannotReload", "DeltaMismatch", "HostsBehind", "LinkLeavesTree", "MalformedMessage",
    "ObjectsDamaged", "PeerRefused", "StoreError", "StoreFull", "SyncError", "TreeError", "TreeTooLarge",
    "UnstableFile", "VersionUnavailable",
]  # fmt: skip


def readable(path: bytes) -> str:
    """A path for messages, which are UTF-8, as names of files need not be."""
    return path.decode("utf-8", "backslashreplace")


class SyncError(Exception):
    """The base of all errors of this package."""


class TreeError(SyncError):
    """The tree cannot be synced as it is."""


class TreeTooLarge(TreeError):
    """``largest``: the ten largest entries worth excluding, as (path, bytes, files)."""

    def __init__(self, root: str, reason: str, largest: Sequence[tuple[str, int, int]]) -> None:
        self.root = root
        self.reason = reason
        self.largest = tuple(largest)
        lines = [f"  {size / 1e6:10.1f} MB {files:8d} files  {path}" for path, size, files in largest]
        super().__init__(
            f"{root} is too large to sync: {reason}. Its largest entries:\n"
            + "\n".join(lines)
            + "\nList what is not code in .meshgateignore, or pass sync_dirs."
        )


class LinkLeavesTree(TreeError):
    def __init__(self, links: Sequence[tuple[str, str]]) -> None:
        self.links = tuple(links)
        shown = ", ".join(f"{path} -> {target}" for path, target in self.links[:10])
        count = f"{len(self.links)} symbolic link" + (" points" if len(self.links) == 1 else "s point")
        super().__init__(
            f"{count} out of the tree and would be broken on the hosts: {shown}. "
            "List them in .meshgateignore, or use relative links to targets in the tree."
        )


class UnstableFile(TreeError):
    def __init__(self, path: str, attempts: int) -> None:
        self.path = path
        super().__init__(
            f"{path} changed during each of {attempts} attempts to read it. "
            "If a program keeps writing to it, list it in .meshgateignore."
        )


class MalformedMessage(SyncError):
    """The message says what is wrong with the bytes. The connection they came from is closed."""


class DeltaMismatch(SyncError):
    """A delta names paths that its base does not have, or leads to another root than it announces."""


class BaseUnknown(SyncError):
    def __init__(self, base: bytes) -> None:
        self.base = base
        super().__init__(f"version {base.hex()[:12]} is not in the store; send the full delta")


class StoreError(SyncError):
    """An operation on a host's disk failed."""


class StoreFull(StoreError):
    """``what`` is used up: space, a quota, or inodes. ``free`` bytes of the disk are free; ``need``: the bytes of the
    version that are still to be written there, 0 if that is not known."""

    def __init__(self, path: str, free: int, need: int = 0, what: str = "space") -> None:
        self.path, self.free, self.need, self.what = path, free, need, what
        needed = f"{need / 1e6:,.1f} MB are needed, and " if need else ""
        super().__init__(
            f"no {what} left on the disk that holds {path}: {needed}{free / 1e6:,.1f} MB are free. Free some there, or "
            "set MESHGATE_HOME to a directory on another disk"
        )


class ObjectsDamaged(StoreError):
    """If the version is begun again, it lacks what was damaged."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"{path} changed or vanished after it was fetched; fetch the version again")


class VersionUnavailable(SyncError):
    def __init__(self, root: str, home: str, reason: str) -> None:
        self.root = root
        self.home = home
        super().__init__(f"version {root[:12]} is not in {home}: {reason}")


class CannotReload(SyncError):
    """``modules``: the compiled modules that changed."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = tuple(modules)
        changed = "is compiled and has" if len(self.modules) == 1 else "are compiled and have"
        super().__init__(
            f"{', '.join(self.modules)} {changed} changed: a process cannot load that twice. Spawn new processes"
        )


class HostsBehind(SyncError):
    """``hosts``: for each host that does not have version ``root`` (hex), why. ``gateway``: why the gateway cannot
    distribute it; then no host is at fault, and ``hosts`` is empty."""

    def __init__(self, root: str, hosts: Mapping[str, str], gateway: str | None = None) -> None:
        self.root = root
        self.hosts = dict(hosts)
        self.gateway = gateway
        shown = "; ".join(f"{name}: {reason}" for name, reason in list(self.hosts.items())[:10])
        behind = "1 host does" if len(self.hosts) == 1 else f"{len(self.hosts)} hosts do"
        super().__init__(
            f"{behind} not have version {root[:12]}: {shown}"
            if gateway is None
            else f"the gateway cannot distribute version {root[:12]}: {gateway}"
        )


class PeerRefused(SyncError):
    """The other relay does not have this session's secret, or did not prove it in time."""
