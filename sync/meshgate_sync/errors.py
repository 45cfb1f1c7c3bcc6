"""Everything that can go wrong while code is synced, named by whose fault it is.

::

    SyncError
    ├── TreeError                the tree on the laptop
    │   ├── TreeTooLarge         over the limit; names the largest entries
    │   ├── LinkLeavesTree       symbolic links that point outside
    │   └── UnstableFile         changed under every attempt to read it
    ├── MalformedMessage         bytes from the network that no version of this protocol sends
    ├── DeltaMismatch            a delta that does not lead from its base to its root
    ├── BaseUnknown              a delta against a version that this store does not hold
    ├── StoreError               the disk of one host
    │   ├── StoreFull            no space left
    │   └── ObjectsDamaged       files were written to, or have vanished, since they were fetched
    ├── VersionUnavailable       this host has not got the version that a process needs
    ├── CannotReload             a module of a running process changed that cannot be loaded twice
    ├── HostsBehind              hosts have not got the version that a spawn needs; names them
    └── PeerRefused              the other relay does not know this job's secret
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = [
    "BaseUnknown",
    "CannotReload",
    "DeltaMismatch",
    "HostsBehind",
    "LinkLeavesTree",
    "MalformedMessage",
    "ObjectsDamaged",
    "PeerRefused",
    "StoreError",
    "StoreFull",
    "SyncError",
    "TreeError",
    "TreeTooLarge",
    "UnstableFile",
    "VersionUnavailable",
]


class SyncError(Exception):
    """The base of all errors of this package."""


class TreeError(SyncError):
    """The tree to sync cannot be synced as it is."""


class TreeTooLarge(TreeError):
    """``largest`` holds the ten largest entries directly worth excluding, as (path, bytes, files)."""

    def __init__(self, root: str, reason: str, largest: Sequence[tuple[str, int, int]]) -> None:
        self.root = root
        self.reason = reason
        self.largest = tuple(largest)
        lines = [f"  {size / 1e6:10.1f} MB {files:8d} files  {path}" for path, size, files in largest]
        super().__init__(
            f"{root} is too large to sync: {reason}. Its largest entries:\n"
            + "\n".join(lines)
            + "\nName what is not code in .meshgateignore, or pass sync_dirs."
        )


class LinkLeavesTree(TreeError):
    def __init__(self, links: Sequence[tuple[str, str]]) -> None:
        self.links = tuple(links)
        shown = ", ".join(f"{path} -> {target}" for path, target in self.links[:10])
        super().__init__(
            f"{len(self.links)} symbolic link(s) leave the tree and would dangle on the hosts: {shown}. "
            "Name them in .meshgateignore, or make them relative and inside."
        )


class UnstableFile(TreeError):
    def __init__(self, path: str, attempts: int) -> None:
        self.path = path
        super().__init__(
            f"{path} changed during each of {attempts} attempts to read it. "
            "Name it in .meshgateignore if something keeps writing to it."
        )


class MalformedMessage(SyncError):
    """The message names what was wrong with the bytes; the connection they came from is of no more use."""


class DeltaMismatch(SyncError):
    """A delta names paths its base has not, or leads to another root than it says."""


class BaseUnknown(SyncError):
    def __init__(self, base: bytes) -> None:
        self.base = base
        super().__init__(f"version {base.hex()[:12]} is not held here; send the whole tree")


class StoreError(SyncError):
    """A host's disk refused."""


class StoreFull(StoreError):
    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"no space left on the disk that holds {path}: free some, or move MESHGATE_HOME")


class ObjectsDamaged(StoreError):
    """Begun again, the version lacks what was damaged."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"{path} was written to, or has vanished, since it was fetched: begin the version again")


class VersionUnavailable(SyncError):
    def __init__(self, root: str, home: str, reason: str) -> None:
        self.root = root
        self.home = home
        super().__init__(f"version {root[:12]} is not in {home}: {reason}")


class CannotReload(SyncError):
    """``modules`` changed, and are compiled."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = tuple(modules)
        changed = "is compiled and has" if len(self.modules) == 1 else "are compiled and have"
        super().__init__(
            f"{', '.join(self.modules)} {changed} changed: a process cannot load that twice. Spawn new processes"
        )


class HostsBehind(SyncError):
    """``hosts``: why, by name, for each host that has not got version ``root`` (hex). ``gateway``: why the gateway
    cannot hand it on; then no host is to blame, and ``hosts`` is empty."""

    def __init__(self, root: str, hosts: Mapping[str, str], gateway: str | None = None) -> None:
        self.root = root
        self.hosts = dict(hosts)
        self.gateway = gateway
        shown = "; ".join(f"{name}: {reason}" for name, reason in list(self.hosts.items())[:10])
        super().__init__(
            f"{len(self.hosts)} host(s) have not got version {root[:12]}: {shown}"
            if gateway is None
            else f"the gateway cannot hand on version {root[:12]}: {gateway}"
        )


class PeerRefused(SyncError):
    """A relay that answers, but not with this job's secret."""
