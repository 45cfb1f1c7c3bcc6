"""Files on their way from a host that answers at once: what is resumed, what is refused, what is never written."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshgate import PullFailed
from meshgate.future import FutureProxy
from meshgate.pull import CHUNK, Entry, Landing, Pulled, pull


class FakeHost:
    """Files by their names below the directory that is pulled."""

    def __init__(self, files: dict[str, bytes], entries: list[Entry] | None = None) -> None:
        self.host = "host-0"
        self.files = files
        self.entries = entries or [Entry(name, "file", len(data), 5, 0o644, "") for name, data in files.items()]
        self.reads: list[tuple[str, int]] = []
        self.answer: Callable[[str, int], Any] | None = None

    def listing(self) -> list[Entry]:
        return self.entries

    def read(self, entry: Entry, offset: int, length: int) -> FutureProxy[Any]:
        self.reads.append((entry.name, offset))
        special = self.answer(entry.name, offset) if self.answer else None
        return FutureProxy.resolved(special or self.files[entry.name][offset : offset + length])


def land(host: FakeHost, place: Path) -> Pulled:
    return Landing(host, "/there", str(place)).run()


def content(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


BIG = os.urandom(CHUNK * 40 + 17)


def test_files_arrive_with_their_content_mode_and_time(tmp_path: Path) -> None:
    host = FakeHost({"a": b"1", "empty": b"", "big": BIG})
    host.entries[0] = Entry("a", "file", 1, 123_456_789, 0o755, "")
    assert land(host, tmp_path) == Pulled(3, len(BIG) + 1, len(BIG) + 1)
    assert content(tmp_path) == host.files
    found = (tmp_path / "a").stat()
    assert (found.st_mode & 0o777, found.st_mtime_ns) == (0o755, 123_456_789)


def test_what_is_there_already_is_not_read_again(tmp_path: Path) -> None:
    host = FakeHost({"a": b"1", "b": b"2"})
    land(host, tmp_path)
    host.reads.clear()
    (tmp_path / "b").unlink()
    assert land(host, tmp_path).travelled == 1
    assert host.reads == [("b", 0)]


def test_an_interrupted_file_goes_on_where_it_stopped(tmp_path: Path) -> None:
    host = FakeHost({"big": BIG})

    def fail(name: str, offset: int) -> Any:
        return ("failed", "input/output error") if offset == 30 * CHUNK else None

    host.answer = fail
    with pytest.raises(PullFailed, match="input/output error"):
        land(host, tmp_path)
    assert not (tmp_path / "big").exists()
    host.answer = None
    host.reads.clear()
    assert land(host, tmp_path).travelled == len(BIG) - 30 * CHUNK
    assert host.reads[0] == ("big", 30 * CHUNK)
    assert content(tmp_path) == {"big": BIG}


def interrupted(place: Path) -> FakeHost:
    host = FakeHost({"big": BIG})
    host.answer = lambda name, offset: ("failed", "no") if offset == 30 * CHUNK else None
    with pytest.raises(PullFailed):
        land(host, place)
    host.answer = None
    host.reads.clear()
    return host


def test_a_damaged_part_is_read_from_its_start(tmp_path: Path) -> None:
    host = interrupted(tmp_path)
    with (tmp_path / "big.part").open("r+b") as part:
        part.seek(1000)
        part.write(b"damage")
    land(host, tmp_path)
    assert host.reads[0] == ("big", 0)
    assert content(tmp_path) == {"big": BIG}


def test_a_part_of_another_file_is_read_from_its_start(tmp_path: Path) -> None:
    host = interrupted(tmp_path)
    host.entries = [Entry("big", "file", len(BIG), 6, 0o644, "")]
    land(host, tmp_path)
    assert host.reads[0] == ("big", 0)


def test_a_file_that_changes_while_it_is_read_is_told_and_no_part_stays(tmp_path: Path) -> None:
    host = FakeHost({"big": BIG})
    host.answer = lambda name, offset: ("changed", name) if offset == 2 * CHUNK else None
    with pytest.raises(PullFailed, match="/there/big on host-0 changed while it was read"):
        land(host, tmp_path)
    assert content(tmp_path) == {}


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/out", "a//b", "."])
def test_nothing_is_written_outside_whatever_a_host_says(tmp_path: Path, name: str) -> None:
    place = tmp_path / "in"
    with pytest.raises(PullFailed, match="outside"):
        land(FakeHost({name: b"x"}), place)
    assert content(tmp_path) == {}


def test_nothing_is_written_through_a_link_that_leads_outside(tmp_path: Path) -> None:
    place = tmp_path / "in"
    (tmp_path / "out").mkdir()
    place.mkdir()
    (place / "a").symlink_to(tmp_path / "out")
    with pytest.raises(PullFailed, match="outside"):
        land(FakeHost({"a/b": b"x"}), place)
    assert content(tmp_path / "out") == {}


def link(name: str, target: str) -> Entry:
    return Entry(name, "link", 0, 5, 0o777, target)


def directory(name: str) -> Entry:
    return Entry(name, "directory", 0, 5, 0o755, "")


def test_a_note_is_never_written_through_a_link_that_a_host_made(tmp_path: Path) -> None:
    place = tmp_path / "in"
    victim = tmp_path / "victim"
    victim.write_text("mine")
    host = interrupted(place)
    host.entries += [directory(name) for name in ("a", "a/b", "a/b/c", "s")]
    host.entries += [link("a/b/c/d", "../../../s"), link("big.part.json.new", "a/b/c/d/../../victim")]
    host.answer = lambda name, offset: ("failed", "no") if offset == 35 * CHUNK else None
    for _ in range(2):
        with pytest.raises(PullFailed, match="no"):
            land(host, place)
    host.answer = None
    land(host, place)
    assert victim.read_text() == "mine"
    assert content(tmp_path) == {"in/big": BIG, "victim": b"mine"}


@pytest.mark.parametrize("taken", ["big", "big.part", "big.part.json", "big.part.json.new"])
def test_a_link_that_is_in_the_way_of_a_file_is_replaced_and_not_followed(tmp_path: Path, taken: str) -> None:
    place = tmp_path / "in"
    place.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (place / taken).symlink_to(victim)
    land(interrupted(place), place)
    assert victim.read_text() == "mine"
    assert (place / "big").read_bytes() == BIG
    assert not (place / "big").is_symlink()


@pytest.mark.parametrize(
    "links",
    [
        [("a/b/c/d", "../../../s"), ("x", "a/b/c/d/../../victim")],
        [("x", "a/b/c/d/../../victim"), ("a/b/c/d", "../../../s")],
        [("x", "a/../../victim")],
        [("s/x", "../../victim")],
        [("x", "theirs/victim")],
    ],
)
def test_a_link_through_which_one_could_leave_is_left_out(tmp_path: Path, links: list[tuple[str, str]]) -> None:
    place = tmp_path / "in"
    place.mkdir()
    (place / "theirs").symlink_to(tmp_path)
    (tmp_path / "victim").write_text("mine")
    host = FakeHost({})
    host.entries = [directory(name) for name in ("a", "a/b", "a/b/c", "s")] + [link(*each) for each in links]
    left_out = land(host, place).left_out
    assert [name for name in left_out if name.endswith("x")] == [name for name, _ in links if name.endswith("x")]
    outside = [path for path in place.rglob("*") if not path.resolve().is_relative_to(place)]
    assert outside == [place / "theirs"]


def test_no_order_of_replacing_links_leads_one_of_them_outside(tmp_path: Path) -> None:
    place = tmp_path / "in"
    deep = [directory(name) for name in ("a", "a/b", "s")]
    for target in ("a/b", "s"):
        host = FakeHost({})
        host.entries = [*deep, link("turn", target), link("up", "turn/.."), link("upper", "turn/../../victim")]
        assert land(host, place).left_out == ("up", "upper")


def test_no_directory_is_made_through_a_link(tmp_path: Path) -> None:
    place = tmp_path / "in"
    place.mkdir()
    (tmp_path / "out").mkdir()
    (place / "a").symlink_to(tmp_path / "out")
    host = FakeHost({})
    host.entries = [directory("a/b")]
    with pytest.raises(PullFailed, match="outside"):
        land(host, place)
    host.entries = [directory("a")]
    with pytest.raises(PullFailed, match="outside"):
        land(host, place)
    assert list((tmp_path / "out").iterdir()) == []


def test_links_that_stay_inside_are_kept_and_others_left_out(tmp_path: Path) -> None:
    links = [("latest", "step/1"), ("step/up", "../a"), ("out", "../../x"), ("absolute", "/etc/passwd")]
    host = FakeHost({"a": b"1"})
    host.entries += [Entry("step", "directory", 0, 5, 0o755, ""), Entry("socket", "other", 0, 5, 0o755, "")]
    host.entries += [Entry(name, "link", 0, 5, 0o777, target) for name, target in links]
    assert land(host, tmp_path).left_out == ("socket", "out", "absolute")
    assert os.readlink(tmp_path / "latest") == "step/1"
    assert (tmp_path / "step" / "up").read_bytes() == b"1"


def test_a_disk_that_is_too_small_is_told_before_anything_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
    host = FakeHost({"a": b"123456"})
    with pytest.raises(PullFailed, match=r"0\.0 MB are to be pulled"):
        land(host, tmp_path)
    assert host.reads == []


def test_a_disk_that_fills_up_leaves_a_part_to_go_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeHost({"big": BIG})
    real, left = os.write, [33]

    def full(handle: int, data: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(PullFailed, match=r"no space left .* goes on where it stopped"):
            land(host, tmp_path)
    assert land(host, tmp_path).travelled == len(BIG) - 33 * CHUNK
    assert content(tmp_path) == {"big": BIG}


def test_a_pull_that_names_nothing_does_not_bring_the_working_directory(tmp_path: Path) -> None:
    hosts: Any = [0]
    with pytest.raises(ValueError, match="name a file or a directory"):
        pull(hosts, "", tmp_path)
