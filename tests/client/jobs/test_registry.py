"""The list of this user's jobs, with concurrent readers and writers."""

from __future__ import annotations

import errno
import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from meshgate.jobs import registry
from meshgate_processes.identity import identify_process


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "meshgate" / "jobs"


def entry(number: int = 0) -> registry.LocalEntry:
    """A job of this process."""
    process = identify_process(os.getpid())
    assert process is not None
    return registry.LocalEntry(
        apply_id=f"{number:08x}", kind="ProcessJob", meshes={"workers": 1}, url="ws://127.0.0.1:1", pid=process.pid,
        started=process.started, directory="/", created=float(number),
    )  # fmt: skip


def test_an_entry_is_one_file_that_only_its_owner_can_read(directory: Path) -> None:
    registry.register(entry())
    assert list(registry.entries()) == [entry()]
    (path,) = directory.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_concurrent_readers_do_not_remove_an_entry_being_written() -> None:
    finished = threading.Event()
    lost = []

    def read() -> None:
        while not finished.is_set():
            list(registry.entries())

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(200):
        registry.register(entry(number))
        if entry(number) not in list(registry.entries()):
            lost.append(number)
        registry.unregister(entry(number).apply_id)
    finished.set()
    for reader in readers:
        reader.join()
    assert not lost


def test_an_entry_that_cannot_be_written_leaves_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(os, "replace", fail)
    registry.register(entry())
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "\0\0"])
def test_an_entry_that_is_not_json_is_removed(directory: Path, text: str) -> None:
    registry.register(entry())
    (directory / "x.json").write_text(text)
    assert list(registry.entries()) == [entry()]
    assert [path.name for path in directory.iterdir()] == [f"{entry().apply_id}.json"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_an_entry_that_cannot_be_read_for_a_moment_is_kept_with_its_log(code: int) -> None:
    registry.register(entry())
    log = registry.log_file(entry().apply_id)
    os.utime(log, (0, 0))

    def fail(path: Path) -> bytes:
        raise OSError(code, os.strerror(code), str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        assert list(registry.entries()) == []
        registry.prune()
    assert list(registry.entries()) == [entry()]
    assert log.exists()


def of_another_version(**changes: object) -> str:
    """An entry that this version cannot read."""
    facts = asdict(entry())
    del facts["url"]
    return json.dumps({**facts, "address": "elsewhere", **changes})


@pytest.mark.parametrize("changes", [{}, {"pid": None}, {"started": "another/form"}])
def test_an_entry_of_another_version_is_kept_with_its_log(directory: Path, changes: dict[str, object]) -> None:
    other = registry.log_file("0000000a").with_suffix(".json")
    os.utime(other.with_suffix(".log"), (0, 0))
    other.write_text(of_another_version(**changes))
    registry.prune()
    assert list(registry.entries()) == []
    assert sorted(path.name for path in directory.iterdir()) == ["0000000a.json", "0000000a.log"]


def test_an_entry_of_another_version_is_removed_once_its_process_has_ended(directory: Path) -> None:
    started = entry().started.rpartition("/")[0] + "/1"
    registry.log_file("0000000a").with_suffix(".json").write_text(of_another_version(started=started))
    assert list(registry.entries()) == []
    assert [path.name for path in directory.iterdir()] == ["0000000a.log"]


def test_an_entry_never_removes_a_file_outside_of_the_directory(directory: Path) -> None:
    registry.register(entry())
    outside = directory.parent / "mine.json"
    outside.write_text("{}")
    facts = {**asdict(entry()), "apply_id": "../mine", "started": entry().started.rpartition("/")[0] + "/1"}
    (directory / "x.json").write_text(json.dumps(facts))
    assert list(registry.entries()) == [entry()]
    assert outside.exists()


def test_an_entry_whose_pid_was_reused_is_removed(directory: Path) -> None:
    log = registry.log_file(entry(1).apply_id)
    registry.register(replace(entry(1), started="before"))
    registry.register(entry(2))
    assert list(registry.entries()) == [entry(2)]
    assert not log.exists()


def test_what_killed_gateways_left_is_pruned(directory: Path) -> None:
    registry.register(replace(entry(1), started="before"))
    registry.log_file(entry(1).apply_id)
    registry.register(entry(2))
    registry.log_file(entry(2).apply_id)
    registry.log_file(entry(3).apply_id)  # of a job that is starting
    old = registry.log_file(entry(4).apply_id)
    os.utime(old, (0, 0))
    registry.prune()
    left = sorted(path.name for path in directory.iterdir())
    assert left == ["00000002.json", "00000002.log", "00000003.log"]
