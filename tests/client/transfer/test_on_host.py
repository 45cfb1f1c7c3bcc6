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
    assert read(reader, tmp_path, "file", 10, 0, 10, mtime) == b""


def test_a_file_that_is_generated_when_it_is_read_is_not_taken_for_an_empty_one(reader: Any, tmp_path: Path) -> None:
    generated = Path("/proc/self/status")
    mtime = generated.stat().st_mtime_ns
    assert read(reader, generated, "", 0, 0, 0, mtime) == ("generated", os.path.realpath(generated))
    (tmp_path / "empty").touch()
    assert read(reader, tmp_path, "empty", 0, 0, 0, (tmp_path / "empty").stat().st_mtime_ns) == b""


def test_a_file_with_less_content_than_its_size_is_reported(reader: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"  # as files of /sys, which have 4,096 bytes
    file.write_bytes(b"0123456789")
    assert read(reader, tmp_path, "file", 8, 3, 10, file.stat().st_mtime_ns) == ("generated", str(file))


def test_a_read_that_fails_gives_the_reason_alone(reader: Any) -> None:
    memory = Path(f"/proc/{os.getpid()}/mem")  # its first page does not exist
    assert read(reader, memory, "", 0, 1, 0, memory.stat().st_mtime_ns) == ("failed", "Input/output error")


def test_a_growing_file_is_read_up_to_its_listed_size(reader: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"0123456789")
    mtime = file.stat().st_mtime_ns
    with file.open("ab") as log:
        log.write(b"and more")
    os.utime(file, ns=(0, mtime + 1))
    assert read(reader, tmp_path, "file", 2, 3, 10, mtime, True) == b"234"
    assert read(reader, tmp_path, "file", 0, 0, 0, mtime, True) == b""
    assert read(reader, tmp_path, "file", 8, 3, 10, mtime) == ("changed", str(file))


@pytest.mark.parametrize("content", [b"rewritten!", b"shorter"])
def test_a_growing_file_that_was_rewritten_is_not_read(reader: Any, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"0123456789")
    mtime = file.stat().st_mtime_ns
    file.write_bytes(content)
    os.utime(file, ns=(0, mtime + 1))
    assert read(reader, tmp_path, "file", 2, 3, 10, mtime, True) == ("changed", str(file))


def test_a_listing_closes_the_file_that_was_read_last(reader: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"123")
    assert read(reader, tmp_path, "file", 0, 3, 3, file.stat().st_mtime_ns) == b"123"
    handle = reader.open[1]
    assert os.path.samestat(os.fstat(handle), file.stat())
    listing(reader, tmp_path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_a_file_that_was_replaced_is_opened_again(reader: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    mtime = file.stat().st_mtime_ns
    assert read(reader, tmp_path, "file", 0, 3, 3, mtime) == b"old"
    (tmp_path / "new").write_bytes(b"new")
    os.utime(tmp_path / "new", ns=(0, mtime))
    (tmp_path / "new").rename(file)
    assert read(reader, tmp_path, "file", 0, 3, 3, mtime) == b"new"


def test_what_is_removed_while_a_directory_is_listed_is_left_out(
    reader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "d/b", "d/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    list_names = os.listdir

    def list_then_remove(path: str) -> list[str]:
        names = list_names(path)
        if path == f"{tmp_path}/":
            (tmp_path / "a").unlink()
        elif "b" in names:
            (tmp_path / "d/b").unlink()
        return names

    monkeypatch.setattr(os, "listdir", list_then_remove)
    assert [row[0] for row in listing(reader, tmp_path)[1]] == ["d", "d/c"]

    def list_of_a_removed_directory(path: str) -> list[str]:
        if path.endswith("/d"):
            raise FileNotFoundError(2, "No such file or directory")
        return list_names(path)

    monkeypatch.setattr(os, "listdir", list_of_a_removed_directory)
    assert [row[0] for row in listing(reader, tmp_path)[1]] == ["d"]
