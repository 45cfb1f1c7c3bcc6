"""A host's files in memory, which replies to reads at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshgate import PullFailed
from meshgate.session.futures import FutureProxy
from meshgate.transfer.download import CHUNK, Download, Entry, Pulled, StopSignal

BIG = os.urandom(CHUNK * 40 + 17)


class FakeHost:
    """``files`` by their names below the pulled directory. ``reply`` may replace the result of a read."""

    def __init__(self, files: dict[str, bytes], entries: list[Entry] | None = None) -> None:
        self.host = "host-0"
        self.files = files
        self.entries = entries or [Entry(name, "file", len(data), 5, 0o644, "") for name, data in files.items()]
        self.reads: list[tuple[str, int]] = []
        self.reply: Callable[[str, int], Any] | None = None

    def listing(self, stop: StopSignal) -> list[Entry]:
        return self.entries

    def read(self, entry: Entry, offset: int, length: int) -> FutureProxy[Any]:
        self.reads.append((entry.name, offset))
        special = self.reply(entry.name, offset) if self.reply else None
        return FutureProxy.resolved(special or self.files[entry.name][offset : offset + length])


def download(host: FakeHost, local: Path) -> Pulled:
    return Download(host, "/remote", str(local)).run()


def contents(local: Path) -> dict[str, bytes]:
    return {str(path.relative_to(local)): path.read_bytes() for path in local.rglob("*") if path.is_file()}


def interrupt_download(local: Path) -> FakeHost:
    """A host from which 30 chunks of ``big`` have been pulled before an error."""
    host = FakeHost({"big": BIG})
    host.reply = lambda name, offset: ("failed", "input/output error") if offset == 30 * CHUNK else None
    with pytest.raises(PullFailed, match="input/output error"):
        download(host, local)
    host.reply = None
    host.reads.clear()
    return host


def link(name: str, target: str) -> Entry:
    return Entry(name, "link", 0, 5, 0o777, target)


def directory(name: str) -> Entry:
    return Entry(name, "directory", 0, 5, 0o755, "")
