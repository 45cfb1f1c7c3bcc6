"""Watching a real directory."""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshgate.code_sync.watcher import watch
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


def test_a_removed_directory_ends_the_watch(saves: Saves, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "tree")
    message = rf"cannot watch {tmp_path}/tree: directory {tmp_path}/tree was removed.*job\.sync\(watch=True\) to resume"
    with pytest.raises(TreeError, match=message):
        deque(saves, maxlen=0)


def test_a_watch_that_cannot_start_raises(tmp_path: Path) -> None:
    with pytest.raises(TreeError, match=r"cannot watch .*missing"):
        next(watch([Scanner(tmp_path / "missing")], threading.Event()))
