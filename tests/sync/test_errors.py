"""What users read when a sync fails: what failed, why, and what to do."""

from __future__ import annotations

import pytest

from meshgate_sync import errors
from meshgate_sync.errors import (
    BaseUnknown,
    CannotReload,
    HostsBehind,
    LinkLeavesTree,
    ObjectsDamaged,
    StoreFull,
    SyncError,
    UnstableFile,
    VersionUnavailable,
)

ROOT = "3f9c0a41d2e7" + "0" * 52


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (HostsBehind(ROOT, {"h1": "no space left"}), "1 host does not have version 3f9c0a41d2e7: h1: no space left"),
        (
            HostsBehind(ROOT, {"h1": "lost", "h2": "late"}),
            "2 hosts do not have version 3f9c0a41d2e7: h1: lost; h2: late",
        ),
        (
            HostsBehind(ROOT, {}, "no space left"),
            "the gateway cannot distribute version 3f9c0a41d2e7: no space left",
        ),
        (
            LinkLeavesTree([("a", "/etc/passwd")]),
            "1 symbolic link points out of the tree and would be broken on the hosts: a -> /etc/passwd. "
            "List them in .meshgateignore, or use relative links to targets in the tree.",
        ),
        (
            UnstableFile("log.txt", 5),
            "log.txt changed during each of 5 attempts to read it. "
            "If a program keeps writing to it, list it in .meshgateignore.",
        ),
        (BaseUnknown(bytes.fromhex(ROOT)), "version 3f9c0a41d2e7 is not in the store; send the full delta"),
        (
            StoreFull("/home", 1_500_000, 2_000_000_000),
            "no space left on the disk that holds /home: 2,000.0 MB are needed, and 1.5 MB are free. Free some there, "
            "or set MESHGATE_HOME to a directory on another disk",
        ),
        (
            StoreFull("/home", 0, what="inodes"),
            "no inodes left on the disk that holds /home: 0.0 MB are free. Free some there, or set MESHGATE_HOME to a "
            "directory on another disk",
        ),
        (ObjectsDamaged("/x"), "/x changed or vanished after it was fetched; fetch the version again"),
        (
            VersionUnavailable(ROOT, "/home", "it was collected"),
            "version 3f9c0a41d2e7 is not in /home: it was collected",
        ),
        (
            CannotReload(["a", "b"]),
            "a, b are compiled and have changed: a process cannot load that twice. Spawn new processes",
        ),
    ],
)
def test_the_message_says_what_failed_and_why(error: SyncError, message: str) -> None:
    assert str(error) == message


def test_a_long_list_of_hosts_is_shortened() -> None:
    hosts = {f"h{number}": "late" for number in range(30)}
    error = HostsBehind(ROOT, hosts)
    assert error.hosts == hosts
    assert "h9: late" in str(error)
    assert "h10" not in str(error)


def test_every_public_error_is_a_sync_error() -> None:
    assert all(issubclass(getattr(errors, name), SyncError) for name in errors.__all__)
