"""Interrupted files: what a later pull resumes and what it reads again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from meshgate import PullFailed
from meshgate.transfer.destination import Destination
from meshgate.transfer.host_files import Entry
from meshgate.transfer.partial_file import CHUNK, RECORD_INTERVAL, PartialFile
from tests.client.transfer.fake_host import BIG, FakeHost, contents, download, interrupt_download


def test_an_interrupted_file_resumes_where_it_stopped(tmp_path: Path) -> None:
    host = interrupt_download(tmp_path)
    assert not (tmp_path / "big").exists()
    assert download(host, tmp_path).travelled == len(BIG) - 30 * CHUNK
    assert host.reads[0] == ("big", 30 * CHUNK)
    assert contents(tmp_path) == {"big": BIG}


def test_a_damaged_part_is_read_from_its_start(tmp_path: Path) -> None:
    host = interrupt_download(tmp_path)
    with (tmp_path / "big.part").open("r+b") as part:
        part.seek(1000)
        part.write(b"damage")
    download(host, tmp_path)
    assert host.reads[0] == ("big", 0)
    assert contents(tmp_path) == {"big": BIG}


def test_bytes_after_the_end_of_the_file_are_dropped(tmp_path: Path) -> None:
    host = interrupt_download(tmp_path)
    with (tmp_path / "big.part").open("ab") as part:
        part.write(bytes(len(BIG)))
    download(host, tmp_path)
    assert host.reads[0] == ("big", 30 * CHUNK)
    assert contents(tmp_path) == {"big": BIG}


def test_a_part_of_another_version_of_the_file_is_read_from_its_start(tmp_path: Path) -> None:
    host = interrupt_download(tmp_path)
    host.entries = [Entry("big", "file", len(BIG), 6, 0o644, "")]
    download(host, tmp_path)
    assert host.reads[0] == ("big", 0)


def test_a_damaged_record_is_ignored(tmp_path: Path) -> None:
    host = interrupt_download(tmp_path)
    (tmp_path / "big.part.json").write_text('{"size": ')
    download(host, tmp_path)
    assert host.reads[0] == ("big", 0)


def test_a_killed_pull_resumes_at_the_last_record(tmp_path: Path) -> None:
    size = RECORD_INTERVAL + 3 * CHUNK
    entry = Entry("a", "file", size, 5, 0o644, "")
    with Destination(str(tmp_path)) as destination:
        killed = PartialFile.open(entry, destination, "a")
        assert killed is not None
        for _ in range(RECORD_INTERVAL // CHUNK + 1):
            killed.write(bytes(CHUNK))
        resumed = PartialFile.open(entry, destination, "a")  # without close(), as after a kill
        assert resumed is not None
        assert resumed.have == RECORD_INTERVAL
        assert next(resumed.missing_ranges()) == (RECORD_INTERVAL, CHUNK)
        killed.close()


def test_a_full_disk_leaves_a_part_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeHost({"big": BIG})
    write, remaining = os.write, [33]

    def fill_up(handle: int, data: Any) -> int:
        remaining[0] -= 1
        if remaining[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fill_up)
        with pytest.raises(PullFailed, match=r"no space left .* pull again to resume"):
            download(host, tmp_path)
    assert download(host, tmp_path).travelled == len(BIG) - 33 * CHUNK
    assert contents(tmp_path) == {"big": BIG}
