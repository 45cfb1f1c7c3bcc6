"""The actor that mounts on a host, used here without a host."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from meshgate.mounts.on_host import Mounter, identity
from tests.small_disk import fill, small_disk


@pytest.fixture
def mounter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("MESHGATE_HOST_NAME", "workers-1")
    return Mounter(str(tmp_path / "home"))


def snapshot(tmp_path: Path, root: str, text: str) -> str:
    directory = tmp_path / "home/snapshots" / root
    (directory / "sub").mkdir(parents=True)
    (directory / "sub/file").write_text(text)
    (directory / "link").symlink_to("/etc/hosts")
    return root


def mount(mounter: Any, root: str, path: Path, source: Any = None) -> str:
    host, problem = Mounter.mount._method(mounter, root, str(path), source)
    assert host == "workers-1"
    return str(problem)


def unmount(mounter: Any, path: Path) -> str:
    return str(Mounter.unmount._method(mounter, str(path))[1])


def test_a_version_appears_and_is_replaced_by_the_next(mounter: Any, tmp_path: Path) -> None:
    path = tmp_path / "new/mount"
    for text in ("1", "2", "3"):
        assert mount(mounter, snapshot(tmp_path, text * 64, text), path) == ""
        assert (path / "sub/file").read_text() == text
        assert os.readlink(path / "link") == "/etc/hosts"
    assert len(os.listdir(path.resolve().parent)) == 2
    assert os.listdir(path.parent) == ["mount"]


def test_copies_of_processes_that_were_killed_are_removed(mounter: Any, tmp_path: Path) -> None:
    mount(mounter, snapshot(tmp_path, "1" * 64, "1"), tmp_path / "mount")
    versions = (tmp_path / "mount").resolve().parent
    for name in (".abandoned", ".another-process"):
        (versions / name / "new").mkdir(parents=True)
    os.utime(versions / ".abandoned", (0, 0))
    mount(mounter, snapshot(tmp_path, "2" * 64, "2"), tmp_path / "mount")
    assert sorted(os.listdir(versions)) == [".another-process", "1" * 64, "2" * 64]


def test_a_mount_does_not_need_the_snapshot_any_more(mounter: Any, tmp_path: Path) -> None:
    mount(mounter, snapshot(tmp_path, "1" * 64, "1"), tmp_path / "mount")
    (tmp_path / "home/snapshots" / ("1" * 64) / "sub/file").unlink()
    assert (tmp_path / "mount/sub/file").read_text() == "1"


def test_mounting_the_same_version_again_changes_nothing(mounter: Any, tmp_path: Path) -> None:
    root = snapshot(tmp_path, "1" * 64, "1")
    mount(mounter, root, tmp_path / "mount")
    before = os.stat(tmp_path / "mount").st_ino
    assert mount(mounter, root, tmp_path / "mount") == ""
    assert os.stat(tmp_path / "mount").st_ino == before


def test_an_empty_directory_is_replaced_and_anything_else_is_kept(mounter: Any, tmp_path: Path) -> None:
    root = snapshot(tmp_path, "1" * 64, "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "full/x").mkdir(parents=True)
    assert mount(mounter, root, tmp_path / "empty") == ""
    for name in ("file", "link", "full"):
        assert f"{name} exists there and is not a mount" in mount(mounter, root, tmp_path / name)
    assert (tmp_path / "full/x").is_dir()


def test_the_directory_of_the_laptop_itself_is_not_copied(mounter: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert mount(mounter, snapshot(tmp_path, "1" * 64, "1"), tmp_path / "data", identity(str(tmp_path / "data"))) == ""
    assert not (tmp_path / "data").is_symlink()
    assert identity(str(tmp_path / "missing")) is None


def test_a_path_that_the_worker_may_not_write_is_named(mounter: Any, tmp_path: Path) -> None:
    root = snapshot(tmp_path, "1" * 64, "1")
    assert "/proc/mount" in mount(mounter, root, Path("/proc/mount"))


def test_unmounting_removes_the_link_and_the_files_and_nothing_else(mounter: Any, tmp_path: Path) -> None:
    mount(mounter, snapshot(tmp_path, "1" * 64, "1"), tmp_path / "mount")
    assert unmount(mounter, tmp_path / "mount") == ""
    assert not (tmp_path / "mount").is_symlink()
    assert os.listdir(tmp_path / "home/mounts") == []
    (tmp_path / "other").symlink_to("home")
    assert unmount(mounter, tmp_path / "other") == ""
    assert (tmp_path / "other").is_symlink()


def test_the_error_of_a_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_HOST_NAME", "workers-1")
    with small_disk(tmp_path / "small") as disk:
        root = "0" * 64
        (disk / "home/snapshots" / root / "sub").mkdir(parents=True)
        (disk / "home/snapshots" / root / "sub/file").write_text("1")
        fill(disk)
        problem = mount(Mounter(str(disk / "home")), root, tmp_path / "mount")
        assert re.match(rf"no (space|inodes) left on the disk that holds {disk}/home/mounts", problem)
        assert problem.endswith("or set MESHGATE_HOME to a directory on another disk")
        assert "Errno" not in problem
        problem = mount(Mounter(str(tmp_path / "none")), root, disk / "new/mount")
    assert "cannot create" in problem  # there is no such version


def test_a_disk_that_is_full_while_files_are_linked_is_no_list_of_errors(
    mounter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, path = snapshot(tmp_path, "1" * 64, "text"), tmp_path / "mount"

    def link(source: str, destination: str, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source, None, destination)

    monkeypatch.setattr(os, "link", link)
    problem = mount(mounter, root, path)
    assert problem.startswith("no space left on the disk that holds ")
    assert "Errno" not in problem
