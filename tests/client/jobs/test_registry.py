"""The list of this user's jobs, while others write it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from meshgate.jobs import registry
from meshgate.jobs.processes import process_name


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "meshgate" / "jobs"


def entry(number: int = 0) -> registry.LocalEntry:
    """A job of this process."""
    name = process_name(os.getpid())
    assert name is not None
    return registry.LocalEntry(
        apply_id=f"{number:08x}", kind="ProcessJob", meshes={"workers": 1}, url="ws://127.0.0.1:1", pid=name.pid,
        started=name.started, directory="/", created=float(number),
    )  # fmt: skip


def test_an_entry_is_readable_by_its_owner_alone_and_nothing_lies_beside_it(directory: Path) -> None:
    registry.register(entry())
    assert list(registry.entries()) == [entry()]
    (path,) = directory.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_who_reads_while_an_entry_is_written_does_not_remove_it() -> None:
    over = threading.Event()
    lost = []

    def read() -> None:
        while not over.is_set():
            list(registry.entries())

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(200):
        registry.register(entry(number))
        if entry(number) not in list(registry.entries()):
            lost.append(number)
        registry.unregister(entry(number).apply_id)
    over.set()
    for reader in readers:
        reader.join()
    assert not lost


def test_an_entry_that_cannot_be_written_leaves_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refuse)
    registry.register(entry())
    assert list(directory.iterdir()) == []


def test_what_is_no_entry_is_removed(directory: Path) -> None:
    registry.register(entry())
    (directory / "x.json").write_text("{")
    assert list(registry.entries()) == [entry()]
    assert [path.name for path in directory.iterdir()] == [f"{entry().apply_id}.json"]
