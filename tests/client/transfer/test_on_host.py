"""The actor that reads files on a host, used here without a host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from meshgate.transfer.on_host import FileReader


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MESHGATE_HOST_NAME", "workers-1")
    return FileReader()


def listing(reader: Any, path: Path) -> Any:
    return FileReader.listing._method(reader, str(path))


def read(reader: Any, path: Path, *arguments: Any) -> Any:
    return FileReader.read._method(reader, str(path), *arguments)


def test_a_listing_has_a_row_for_everything_below_a_directory(reader: Any, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/file").write_bytes(b"123")
    (tmp_path / "link").symlink_to("d")
    os.mkfifo(tmp_path / "pipe")
    host, rows = listing(reader, tmp_path)
    assert host == "workers-1"
    assert {(name, kind, size, target) for name, kind, size, _, _, target in rows} == {
        ("d", "directory", 0, ""),
        ("d/file", "file", 3, ""),
        ("link", "link", 0, "d"),
        ("pipe", "other", 0, ""),
    }


def test_a_file_is_one_row_without_a_name(reader: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123")
    _, [row] = listing(reader, tmp_path / "file")
    assert row[:3] == ("", "file", 3)


def test_a_missing_path_is_absent(reader: Any, tmp_path: Path) -> None:
    assert listing(reader, tmp_path / "missing")[1][0] == "absent"


def test_a_read_returns_bytes_unless_the_file_has_changed(reader: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"0123456789")
    mtime = file.stat().st_mtime_ns
    assert read(reader, tmp_path, "file", 2, 3, 10, mtime) == b"234"
    assert read(reader, tmp_path, "file", 2, 3, 10, mtime + 1) == ("changed", str(file))
    assert read(reader, tmp_path, "file", 8, 3, 10, mtime) == ("changed", str(file))


def test_a_growing_file_is_read_up_to_its_listed_size(reader: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"0123456789")
    assert read(reader, tmp_path, "file", 2, 3, -1, 0) == b"234"
    assert read(reader, tmp_path, "file", 8, 3, -1, 0) == ("changed", str(file))


def test_a_file_that_was_replaced_is_opened_again(reader: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    assert read(reader, tmp_path, "file", 0, 3, -1, 0) == b"old"
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").rename(file)
    assert read(reader, tmp_path, "file", 0, 3, -1, 0) == b"new"
