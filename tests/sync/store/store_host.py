"""A host's store under test, and ways to damage it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from meshgate_sync.store.store import Store
from meshgate_sync.tree.delta import decode, diff, encode
from meshgate_sync.tree.tree import EMPTY, Directory
from tests.sync.trees import Content


class Host:
    """A store, and what a relay would do with it."""

    def __init__(self, home: Path, content: Content, **options: object) -> None:
        self.home = home
        self.content = content
        self.options = options
        self.fetched = 0
        self.store = Store(str(home), **options)  # type: ignore[arg-type]

    def sync(
        self, tree: Directory, base: Directory = EMPTY, *, owner: str = "me", replaces: bytes | None = None
    ) -> str:
        delta = decode(encode(diff(base, tree)))
        fetch = self.store.prepare(delta)
        for digest in list(fetch.missing):
            self.fetched += 1
            self.store.add(digest, self.content.pieces[digest])
        assert fetch.complete
        path = self.store.finish(tree.digest, base=delta.base, owner=owner, replaces=replaces)
        self.store.check(tree.digest)
        return path

    def prepare_spares(self, tree: Directory) -> int:
        """Makes all spares that are missing; returns how many pieces of work that took."""
        for count in range(10):
            steps = self.store.prepare_spare(tree.digest)
            if steps is None:
                return count
            for _ in steps:
                pass
        raise AssertionError("there is always more to prepare")

    def reopen(self) -> None:
        self.store.close()
        self._open()

    def reopen_as(self, boot: str) -> None:
        """Opens the store as the first process after a reboot."""
        self.options = {"boot": boot}
        self._open()

    def _open(self) -> None:
        self.store = Store(str(self.home), **self.options)  # type: ignore[arg-type]


def raising(number: int) -> Callable[..., object]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "refused")

    return refuse


def partials(host: Host) -> list[Path]:
    return list((host.home / "work").glob("*/partial-*"))


def damage(path: Path, *, keep_time: bool) -> None:
    status = path.stat()
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    path.chmod(status.st_mode & 0o777)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def objects(host: Host) -> list[Path]:
    return sorted(path for path in (host.home / "objects").glob("*/*"))


class Crash(BaseException):
    pass


STEPS = ("rename", "link", "mkdir", "unlink", "symlink", "truncate", "pwrite", "fchmod", "utime")


def crashing(monkeypatch: pytest.MonkeyPatch, after: int, problem: Callable[[], BaseException]) -> Callable[[], bool]:
    """Makes file operations fail after the first ``after``; the result says whether any has failed."""
    count = 0

    def wrap(original: Callable[..., object]) -> Callable[..., object]:
        def step(*arguments: object, **options: object) -> object:
            nonlocal count
            count += 1
            if count > after:
                raise problem()
            return original(*arguments, **options)

        return step

    for name in STEPS:
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    return lambda: count > after


MODEL: dict[bytes, object] = {
    b"a.py": b"one", b"empty": b"", b"run": (b"#!", True), b"d": {b"b": b"two", b"l": "../a.py", b"e": {}},
    b"large": bytes(range(100)),
}  # fmt: skip


ANY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
