"""Watching a real directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshgate.code_sync.watcher import MAX_BURST, SAVES, WINDOW, BusyFiles, watch
from meshgate_sync.errors import TreeError
from meshgate_sync.tree.scan import Scanner

Saves = Iterator["list[str] | None"]


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[Saves]:
    """What a watch of ``tmp_path/tree`` yields, once it has begun."""
    (tmp_path / "tree").mkdir()
    scanner = Scanner(tmp_path / "tree")
    scanner.scan()
    stop = threading.Event()
    watching = watch([scanner], stop)
    assert next(watching) is None
    yield watching
    stop.set()
    deque(watching, maxlen=0)


def test_a_save_is_yielded_with_its_absolute_path(saves: Saves, tmp_path: Path) -> None:
    (tmp_path / "tree/model.py").write_text("1")
    assert set(next(saves) or ()) == {str(tmp_path / "tree/model.py")}


def test_an_ignored_file_is_not_yielded(saves: Saves, tmp_path: Path) -> None:
    (tmp_path / "tree/.git").mkdir()
    (tmp_path / "tree/.git/index").write_text("1")
    (tmp_path / "tree/model.py").write_text("1")
    assert set(next(saves) or ()) == {str(tmp_path / "tree/model.py")}


@pytest.mark.parametrize("name", ["events.out.tfevents.1732.host", "step-100.ckpt", "model.pt", "model.safetensors"])
def test_event_files_and_checkpoints_are_not_yielded(name: str, saves: Saves, tmp_path: Path) -> None:
    for saved in (name, "model.py"):
        (tmp_path / "tree" / saved).write_text("1")
    yielded: set[str] = set()
    while not yielded:
        yielded.update(next(saves) or ())
    assert yielded == {str(tmp_path / "tree/model.py")}


def test_the_file_that_the_output_is_redirected_to_is_not_yielded(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    program = f"""
import os, sys, threading
from pathlib import Path
from meshgate.code_sync.watcher import watch
from meshgate_sync.tree.scan import Scanner

tree = Path({str(tree)!r})
scanner = Scanner(tree)
scanner.scan()
saves = watch([scanner], threading.Event())
next(saves)
print("one line", flush=True)
(tree / "model.py").write_text("1")
print(sorted(set(next(saves))), file=sys.stderr, flush=True)
os._exit(0)
"""
    with open(tree / "out.log", "wb") as output:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=output, stderr=subprocess.PIPE, text=True, timeout=60, check=True
        )
    assert done.stderr.strip() == str([str(tree / "model.py")])


def test_small_bursts_are_not_taken_for_a_large_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that writes ignored files causes no scans of the whole tree."""

    def changes(*_: str, watch_filter: Callable[[str, str], bool], stop_event: Any, **__: object) -> Iterator[set[Any]]:
        for _ in range(MAX_BURST + 1):
            assert not stop_event.is_set()
            assert not watch_filter("modified", str(tmp_path / ".git/index"))
            yield set()

    monkeypatch.setattr("watchfiles.watch", changes)
    scanner = Scanner(tmp_path)
    scanner.scan()
    assert list(watch([scanner], threading.Event())) == [None]


def test_a_removed_directory_ends_the_watch(saves: Saves, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "tree")
    message = rf"cannot watch {tmp_path}/tree: directory {tmp_path}/tree was removed.*job\.sync\(watch=True\) to resume"
    with pytest.raises(TreeError, match=message):
        deque(saves, maxlen=0)


def test_a_watch_that_cannot_start_raises(tmp_path: Path) -> None:
    with pytest.raises(TreeError, match=r"cannot watch .*missing"):
        next(watch([Scanner(tmp_path / "missing")], threading.Event()))


def test_a_name_that_is_not_utf_8_ends_the_watch_with_the_remedy(saves: Saves, tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/tree/a\xff.py", "wb"):
        pass
    with pytest.raises(TreeError, match=r"a\\xFF\.py.*rename that file.*job\.sync\(watch=True\) to resume"):
        deque(saves, maxlen=0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def record(files: BusyFiles, clock: Clock, path: str, *, saves: int, interval: float) -> list[str]:
    found = []
    for _ in range(saves):
        clock.now += interval
        found += files.record_saves([path])
    return found


def test_a_file_becomes_busy_once_after_many_saves_within_the_window() -> None:
    clock = Clock()
    files = BusyFiles(clock)
    interval = WINDOW / (2 * SAVES)
    assert record(files, clock, "train.log", saves=SAVES - 1, interval=interval) == []
    assert record(files, clock, "train.log", saves=1, interval=interval) == ["train.log"]
    assert record(files, clock, "train.log", saves=2 * SAVES, interval=interval) == []
    assert files.contains_all(["train.log"])
    assert not files.contains_all(["train.log", "model.py"])
    assert not files.contains_all([])


def test_the_window_slides() -> None:
    clock = Clock()
    files = BusyFiles(clock)
    interval = WINDOW / (SAVES - 1)  # the first of SAVES saves is just outside the window of the last
    assert record(files, clock, "train.log", saves=10 * SAVES, interval=interval) == []
    assert record(files, clock, "other.log", saves=SAVES, interval=interval * 0.99) == ["other.log"]


def test_a_pause_starts_the_count_again() -> None:
    clock = Clock()
    files = BusyFiles(clock)
    assert record(files, clock, "train.log", saves=SAVES - 1, interval=0.1) == []
    clock.now += WINDOW
    assert record(files, clock, "train.log", saves=SAVES - 1, interval=0.1) == []
    assert record(files, clock, "train.log", saves=1, interval=0.1) == ["train.log"]


def test_a_file_that_is_edited_for_hours_is_not_busy() -> None:
    clock = Clock()
    assert record(BusyFiles(clock), clock, "model.py", saves=10 * SAVES, interval=1.0) == []


def test_a_directory_that_cannot_be_read_ends_the_watch_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError('Permission denied (os error 13) about ["/x/pgdata"]')

    monkeypatch.setattr("watchfiles.watch", fail)
    with pytest.raises(TreeError, match="make that directory readable or move it elsewhere"):
        next(watch([Scanner(tmp_path)], threading.Event()))
