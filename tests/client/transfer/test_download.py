"""Downloads from a host that replies at once: what is transferred, rejected and left out, and stays inside."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshgate import PullFailed, SupervisionError
from meshgate.session.futures import FutureProxy
from meshgate.transfer.download import (
    CHUNK,
    CONCURRENT_HOSTS,
    RECORD_INTERVAL,
    Destination,
    Download,
    Entry,
    HostFiles,
    PartialFile,
    Pulled,
    StopSignal,
    UnsafePath,
    in_threads,
    part_name,
    read_error,
    result_of,
)
from meshgate.transfer.on_host import FileReader
from tests.client.transfer.fake_host import (
    BIG,
    FakeHost,
    contents,
    directory,
    download,
    interrupt_download,
    link,
)
from tests.programs import forked_child


def test_files_arrive_with_their_content_mode_and_time(tmp_path: Path) -> None:
    host = FakeHost({"a": b"1", "empty": b"", "big": BIG})
    host.entries[0] = Entry("a", "file", 1, 123_456_789, 0o755, "")
    assert download(host, tmp_path) == Pulled(3, len(BIG) + 1, len(BIG) + 1)
    assert contents(tmp_path) == host.files
    found = (tmp_path / "a").stat()
    assert (found.st_mode & 0o777, found.st_mtime_ns) == (0o755, 123_456_789)


def test_a_complete_file_is_not_read_again(tmp_path: Path) -> None:
    host = FakeHost({"a": b"1", "b": b"2"})
    download(host, tmp_path)
    host.reads.clear()
    (tmp_path / "b").unlink()
    assert download(host, tmp_path).travelled == 1
    assert host.reads == [("b", 0)]


def test_a_file_that_changes_while_it_is_read_is_reported_and_leaves_no_part(tmp_path: Path) -> None:
    host = FakeHost({"big": BIG})
    host.reply = lambda name, offset: ("changed", name) if offset == 2 * CHUNK else None
    with pytest.raises(PullFailed, match="/remote/big changed on host-0 while it was being read"):
        download(host, tmp_path)
    assert contents(tmp_path) == {}


def test_a_special_file_pulled_by_itself_is_rejected(tmp_path: Path) -> None:
    host = FakeHost({}, [Entry("", "other", 0, 5, 0o644, "")])
    with pytest.raises(PullFailed, match="/remote on host-0 is neither a file nor a directory"):
        download(host, tmp_path / "local")


class Unsettled(FutureProxy[Any]):
    """A result that never comes. Whoever waits for it is stopped."""

    __slots__ = ("stop",)

    def __init__(self, stop: StopSignal) -> None:
        super().__init__()
        self.stop = stop

    def when_settled(self, wake: Callable[[], object]) -> None:
        super().when_settled(wake)
        self.stop.set("another host failed")


def test_a_download_that_waits_for_a_read_can_be_stopped_and_keeps_the_part(tmp_path: Path) -> None:
    host, stop = FakeHost({"big": BIG}), StopSignal()
    read = host.read
    host.read = lambda entry, offset, length: Unsettled(stop) if offset else read(entry, offset, length)  # type: ignore[method-assign]
    with pytest.raises(PullFailed, match="another host failed"):
        Download(host, "/remote", str(tmp_path), stop=stop).run()
    assert not (tmp_path / "big").exists()
    assert (tmp_path / part_name("big")).stat().st_size == CHUNK


def test_a_download_that_waits_for_the_listing_can_be_stopped(tmp_path: Path) -> None:
    stop = StopSignal()
    reader = SimpleNamespace(listing=SimpleNamespace(call_one=lambda path: Unsettled(stop)))
    with pytest.raises(PullFailed, match="another host failed") as raised:
        Download(HostFiles(reader, "/remote"), "/remote", str(tmp_path), stop=stop).run()
    assert raised.value.path == "/remote"


def test_a_download_that_is_stopped_before_it_begins_asks_nothing(tmp_path: Path) -> None:
    stop = StopSignal()
    stop.set("another host failed")
    with pytest.raises(PullFailed, match="another host failed"):
        Download(HostFiles(None, "/remote"), "/remote", str(tmp_path), stop=stop).run()


def test_the_program_waits_at_its_exit_for_no_thread_of_a_download() -> None:
    (run,) = in_threads([threading.current_thread])
    assert run.result().daemon


def test_each_of_many_tasks_runs_and_raises_its_own_error() -> None:
    runs = in_threads(partial(divmod, 1, number) for number in range(2 * CONCURRENT_HOSTS))
    assert [run.result()[0] for run in runs[1:]] == [1] + [0] * (2 * CONCURRENT_HOSTS - 2)
    assert type(runs[0].exception()) is ZeroDivisionError


def test_a_part_that_cannot_be_deleted_is_a_failed_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeHost({"a": b"1"})
    host.reply = lambda name, offset: ("changed", name)
    error = OSError(errno.EROFS, "Read-only file system")

    def unlink(self: Destination, name: str) -> None:
        raise error

    monkeypatch.setattr(Destination, "unlink", unlink)
    with pytest.raises(PullFailed, match=r"cannot write .*a on this machine: Read-only file system"):
        download(host, tmp_path)


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/out", "a//b", "."])
def test_a_name_that_leads_outside_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(PullFailed, match=r"refusing a name listed by host-0: .* leads outside"):
        download(FakeHost({name: b"x"}), tmp_path / "in")
    assert contents(tmp_path) == {}


def test_nothing_is_written_through_an_existing_link(tmp_path: Path) -> None:
    local = tmp_path / "in"
    (tmp_path / "out").mkdir()
    local.mkdir()
    (local / "a").symlink_to(tmp_path / "out")
    with pytest.raises(PullFailed, match="through the symlink 'a'"):
        download(FakeHost({"a/b": b"x"}), local)
    assert contents(tmp_path / "out") == {}


def test_a_record_is_never_written_through_a_pulled_link(tmp_path: Path) -> None:
    local = tmp_path / "in"
    victim = tmp_path / "victim"
    victim.write_text("mine")
    host = interrupt_download(local)
    host.entries += [directory(name) for name in ("a", "a/b", "a/b/c", "s")]
    host.entries += [link("a/b/c/d", "../../../s"), link(".big.meshgate-part.json.new", "a/b/c/d/../../victim")]
    host.reply = lambda name, offset: ("failed", "no") if offset == 35 * CHUNK else None
    for _ in range(2):
        with pytest.raises(PullFailed, match="no"):
            download(host, local)
    host.reply = None
    download(host, local)
    assert victim.read_text() == "mine"
    assert contents(tmp_path) == {"in/big": BIG, "victim": b"mine"}


@pytest.mark.parametrize("taken", ["big", *(f".big.meshgate-part{end}" for end in ("", ".json", ".json.new"))])
def test_a_link_in_the_place_of_a_file_is_replaced_not_followed(tmp_path: Path, taken: str) -> None:
    local = tmp_path / "in"
    local.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (local / taken).symlink_to(victim)
    download(interrupt_download(local), local)
    assert victim.read_text() == "mine"
    assert (local / "big").read_bytes() == BIG
    assert not (local / "big").is_symlink()


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
def test_a_link_that_might_lead_outside_is_left_out(tmp_path: Path, links: list[tuple[str, str]]) -> None:
    local = tmp_path / "in"
    local.mkdir()
    (local / "theirs").symlink_to(tmp_path)
    (tmp_path / "victim").write_text("mine")
    host = FakeHost({})
    host.entries = [directory(name) for name in ("a", "a/b", "a/b/c", "s")] + [link(*each) for each in links]
    left_out = download(host, local).left_out
    assert [name for name in left_out if name.endswith("x")] == [name for name, _ in links if name.endswith("x")]
    outside = [path for path in local.rglob("*") if not path.resolve().is_relative_to(local)]
    assert outside == [local / "theirs"]


def test_no_order_of_replacing_links_leads_outside(tmp_path: Path) -> None:
    local = tmp_path / "in"
    directories = [directory(name) for name in ("a", "a/b", "s")]
    for target in ("a/b", "s"):
        host = FakeHost({})
        host.entries = [*directories, link("turn", target), link("up", "turn/.."), link("upper", "turn/../../victim")]
        assert download(host, local).left_out == ("up", "upper")


def test_no_directory_is_created_through_a_link(tmp_path: Path) -> None:
    local = tmp_path / "in"
    local.mkdir()
    (tmp_path / "out").mkdir()
    (local / "a").symlink_to(tmp_path / "out")
    host = FakeHost({})
    for name in ("a/b", "a"):
        host.entries = [directory(name)]
        with pytest.raises(PullFailed, match="through the symlink 'a'"):
            download(host, local)
    assert list((tmp_path / "out").iterdir()) == []


def test_links_that_stay_inside_are_kept_and_others_left_out(tmp_path: Path) -> None:
    links = [("latest", "step/1"), ("step/up", "../a"), ("out", "../../x"), ("absolute", "/etc/passwd")]
    host = FakeHost({"a": b"1"})
    host.entries += [directory("step"), Entry("socket", "other", 0, 5, 0o755, "")]
    host.entries += [link(name, target) for name, target in links]
    assert download(host, tmp_path).left_out == ("socket", "out", "absolute")
    assert os.readlink(tmp_path / "latest") == "step/1"
    assert (tmp_path / "step" / "up").read_bytes() == b"1"


def test_a_disk_that_is_too_small_is_reported_before_the_first_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
    host = FakeHost({"a": b"123456"})
    with pytest.raises(PullFailed, match=rf"not enough disk space in {tmp_path}: the pull needs 0\.0 MB"):
        download(host, tmp_path)
    assert host.reads == []


def test_a_file_system_that_does_not_state_its_size_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))  # type: ignore[attr-defined]
    download(FakeHost({"a": b"123456"}), tmp_path)
    assert contents(tmp_path) == {"a": b"123456"}


@pytest.mark.parametrize("kind", ["changed", "absent"])
def test_a_changing_file_can_be_left_for_the_next_download(tmp_path: Path, kind: str) -> None:
    host = FakeHost({"a": b"1", "big": BIG, "z": b"2"})
    host.reply = lambda name, offset: (kind, name) if offset == 2 * CHUNK else None
    Download(host, "/remote", str(tmp_path), skip_changed=True).run()
    assert contents(tmp_path) == {"a": b"1", "z": b"2"}
    host.reply = None
    Download(host, "/remote", str(tmp_path), skip_changed=True).run()
    assert contents(tmp_path) == host.files


def test_a_file_that_is_removed_meanwhile_is_left_out(tmp_path: Path) -> None:
    host = FakeHost({"a": b"1", "big": BIG, "z": b"2"})
    host.reply = lambda name, offset: ("absent", name) if offset == 2 * CHUNK else None
    pulled = download(host, tmp_path)
    assert (pulled.files, pulled.size, pulled.left_out) == (2, 2, ("big",))
    assert contents(tmp_path) == {"a": b"1", "z": b"2"}


def host_files(listing: Any) -> HostFiles:
    call_one = lambda path: FutureProxy.resolved(listing)  # noqa: E731
    return HostFiles(SimpleNamespace(listing=SimpleNamespace(call_one=call_one)), "/remote")


def test_a_listing_names_its_host() -> None:
    files = host_files(("host-1", [("a", "file", 1, 5, 0o644, "")]))
    assert files.listing(StopSignal()) == [Entry("a", "file", 1, 5, 0o644, "")]
    assert files.host == "host-1"


class FilesOfThisMachine(HostFiles):
    """Files that may grow, as a gather mount reads them. ``after_listing`` runs between a listing and the reads."""

    def __init__(self, remote: Path) -> None:
        reader = FileReader()
        endpoints = {
            name: SimpleNamespace(call_one=lambda *given, method=method: FutureProxy.resolved(method(reader, *given)))
            for name, method in (("listing", FileReader.listing._method), ("read", FileReader.read._method))
        }
        super().__init__(SimpleNamespace(**endpoints), str(remote), growing=True)
        self.after_listing: Callable[[], object] = lambda: None

    def listing(self, stop: StopSignal) -> list[Entry]:
        entries = super().listing(stop)
        self.after_listing()
        return entries


def test_a_copy_stays_as_it_was_while_the_host_rewrites_the_file(tmp_path: Path) -> None:
    remote, local = tmp_path / "remote", tmp_path / "local"
    remote.mkdir()

    def write(text: str, time: int) -> None:
        (remote / "status").write_text(text)
        os.utime(remote / "status", (time, time))

    files = FilesOfThisMachine(remote)
    write("step 1", 1)
    Download(files, str(remote), str(local), skip_changed=True).run()
    write("step 2", 2)
    files.after_listing = lambda: write("step 3", 3)
    assert Download(files, str(remote), str(local), skip_changed=True).run().left_out == ("status",)
    assert contents(local) == {"status": b"step 1"}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("absent", "/remote does not exist on host-1"),
        ("forbidden", r"the worker process on host-1 may not read /remote \(text\)"),
        ("changed", "/remote changed on host-1 while it was being read; pull it again once it is complete"),
        ("generated", r"/remote on host-1 does not have the size .* print it with job\.exec\(\['cat', '/remote'\]\)"),
        ("failed", "cannot read /remote on host-1: text"),
    ],
)
def test_an_error_of_a_host_names_host_and_path(kind: str, message: str) -> None:
    with pytest.raises(PullFailed, match=message) as raised:
        host_files(("host-1", (kind, "text"))).listing(StopSignal())
    assert (raised.value.host, raised.value.path) == ("host-1", "/remote")
    assert str(read_error((kind, "text"), "host-1", "/remote")) == str(raised.value)


def test_a_missing_relative_path_is_explained_by_the_path_that_the_host_looked_at() -> None:
    with pytest.raises(PullFailed) as raised:
        raise read_error(("absent", "No such file or directory: /root/out"), "host-1", "out")
    assert str(raised.value) == "out does not exist on host-1 (No such file or directory: /root/out)"


@pytest.mark.parametrize("local", ["taken", "taken/below"])
def test_a_directory_is_not_pulled_onto_a_file(tmp_path: Path, local: str) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(PullFailed, match=r"cannot write .*taken.* on this machine: .*; remove the file that is in the"):
        download(FakeHost({"a": b"1"}), tmp_path / local)
    assert contents(tmp_path) == {"taken": b"mine"}


def test_a_lost_host_is_a_failed_pull() -> None:
    lost = FutureProxy[Any].failed(SupervisionError("workers-1 died"))
    with pytest.raises(PullFailed, match="cannot read /remote: workers-1 died"):
        result_of(lost, "host-1", "/remote", StopSignal())


def test_an_interrupted_file_resumes_where_it_stopped(tmp_path: Path) -> None:
    host = interrupt_download(tmp_path)
    assert not (tmp_path / "big").exists()
    assert download(host, tmp_path).travelled == len(BIG) - 30 * CHUNK
    assert host.reads[0] == ("big", 30 * CHUNK)
    assert contents(tmp_path) == {"big": BIG}


@pytest.mark.parametrize("listed", [True, False])
def test_files_that_are_named_like_parts_are_kept(tmp_path: Path, listed: bool) -> None:
    files = {"big": BIG, "big.part": b"1", "big.part.json": b"2", "big.part.json.new": b"3"}
    host = FakeHost(files)
    if listed:
        download(host, tmp_path)
        (tmp_path / "big").unlink()
    else:
        host.entries = host.entries[:1]
        for name in files.keys() - {"big"}:
            (tmp_path / name).write_bytes(files[name])
    host.reply = lambda name, offset: ("changed", name) if offset == 35 * CHUNK else None
    with pytest.raises(PullFailed, match="changed"):
        download(host, tmp_path)
    assert contents(tmp_path) == {name: data for name, data in files.items() if name != "big"}
    host.reply = None
    download(host, tmp_path)
    assert contents(tmp_path) == files


@pytest.mark.parametrize("name", ["a" * 255, "directory/" + "é" * 127])
def test_a_file_with_the_longest_name_is_pulled_and_resumed(tmp_path: Path, name: str) -> None:
    host = FakeHost({name: BIG})
    host.entries.insert(0, directory("directory"))
    host.reply = lambda name, offset: ("failed", "no") if offset == 30 * CHUNK else None
    with pytest.raises(PullFailed, match="no"):
        download(host, tmp_path)
    host.reply = None
    assert download(host, tmp_path).travelled == len(BIG) - 30 * CHUNK
    assert contents(tmp_path) == {name: BIG}


def test_a_damaged_part_is_read_from_its_start(tmp_path: Path) -> None:
    host = interrupt_download(tmp_path)
    with (tmp_path / ".big.meshgate-part").open("r+b") as part:
        part.seek(1000)
        part.write(b"damage")
    download(host, tmp_path)
    assert host.reads[0] == ("big", 0)
    assert contents(tmp_path) == {"big": BIG}


def test_bytes_after_the_end_of_the_file_are_dropped(tmp_path: Path) -> None:
    host = interrupt_download(tmp_path)
    with (tmp_path / ".big.meshgate-part").open("ab") as part:
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
    (tmp_path / ".big.meshgate-part.json").write_text('{"size": ')
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


@pytest.fixture
def two_pulls(tmp_path: Path) -> Iterator[tuple[PartialFile, PartialFile]]:
    """The same file of two chunks in two pulls to one place."""
    entry = Entry("a", "file", 2 * CHUNK, 5, 0o644, "")
    with Destination(str(tmp_path)) as destination:
        first, second = PartialFile.open(entry, destination, "a"), PartialFile.open(entry, destination, "a")
        assert first is not None
        assert second is not None
        yield first, second
        first.close()
        second.close()


def test_a_second_pull_to_the_same_place_fails_and_leaves_the_part_alone(
    tmp_path: Path, two_pulls: tuple[PartialFile, PartialFile]
) -> None:
    first, second = two_pulls
    first.write(b"1" * CHUNK)
    for _ in range(2):
        with pytest.raises(PullFailed, match=f"another pull is writing {tmp_path}/a"):
            second.write(b"2" * CHUNK)
    second.discard()
    first.write(b"3" * CHUNK)
    assert contents(tmp_path) == {"a": b"1" * CHUNK + b"3" * CHUNK}


def test_a_forked_child_does_not_keep_the_lock_of_a_part(
    tmp_path: Path, two_pulls: tuple[PartialFile, PartialFile]
) -> None:
    first, second = two_pulls
    first.write(b"1" * CHUNK)
    with forked_child():
        first.close()
        second.write(b"2" * CHUNK)
        second.write(b"3" * CHUNK)
    assert contents(tmp_path) == {"a": b"2" * CHUNK + b"3" * CHUNK}


def test_a_part_that_was_replaced_does_not_become_the_file(
    tmp_path: Path, two_pulls: tuple[PartialFile, PartialFile]
) -> None:
    """As on a file system without locks."""
    first, second = two_pulls
    first.write(b"1" * CHUNK)
    (tmp_path / part_name("a")).unlink()
    second.write(b"2" * CHUNK)
    with pytest.raises(PullFailed, match="another pull is writing"):
        first.write(b"1" * CHUNK)
    second.write(b"2" * CHUNK)
    assert (tmp_path / "a").read_bytes() == b"2" * 2 * CHUNK


@pytest.mark.parametrize("complete", [False, True])
def test_a_part_that_another_pull_has_written_since_it_was_read_is_not_used(tmp_path: Path, complete: bool) -> None:
    host = interrupt_download(tmp_path)
    with Destination(str(tmp_path)) as destination:
        late = PartialFile.open(host.entries[0], destination, "big")
        assert late is not None
        host.reply = lambda name, offset: None if complete or offset < 35 * CHUNK else ("failed", "no")
        with contextlib.nullcontext() if complete else pytest.raises(PullFailed, match="no"):
            download(host, tmp_path)
        with pytest.raises(PullFailed, match="another pull is writing"):
            late.write(BIG[30 * CHUNK : 31 * CHUNK])
    host.reply = None
    download(host, tmp_path)
    assert contents(tmp_path) == {"big": BIG}


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


@pytest.mark.parametrize("name", ["../a", "a/../b", "/a", "a//b", ".", "", "a\0b"])
def test_an_unsafe_name_is_rejected_by_every_operation(tmp_path: Path, name: str) -> None:
    with Destination(str(tmp_path)) as destination:
        for operation in (destination.stat, destination.make_directory, destination.create, destination.unlink):
            with pytest.raises(UnsafePath, match="leads outside of"):
                operation(name)


def test_a_missing_name_has_no_status_and_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    with Destination(str(tmp_path)) as destination:
        assert destination.stat("missing") is None
        status = destination.stat("link")
        assert status is not None
        assert status.st_ino == os.lstat(tmp_path / "link").st_ino
        with pytest.raises(FileNotFoundError, match="not a regular file"):
            destination.open("link")


def test_an_error_carries_the_full_path(tmp_path: Path) -> None:
    with Destination(str(tmp_path)) as destination, pytest.raises(FileNotFoundError) as raised:
        destination.create("missing/file")
    assert raised.value.filename == str(tmp_path / "missing/file")


@pytest.mark.parametrize(
    ("name", "target", "made"),
    [
        ("a", "b", True),
        ("d/a", "../b", True),
        ("a", "../b", False),
        ("d/a", "../../b", False),
        ("a", "d/../../b", False),
        ("a", "/b", False),
        ("a", "../destination/b", False),  # leads back inside, but only while the destination has this name
    ],
)
def test_a_link_may_go_up_only_at_its_beginning_and_no_further_than_its_depth(
    tmp_path: Path, name: str, target: str, made: bool
) -> None:
    (tmp_path / "destination/d").mkdir(parents=True)
    with Destination(str(tmp_path / "destination")) as destination:
        assert destination.make_link(name, target) == made
    assert (tmp_path / "destination" / name).is_symlink() == made


def test_no_name_leads_through_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to("d")
    with Destination(str(tmp_path)) as destination:
        for operation in (destination.stat, destination.make_directory, destination.create, destination.unlink):
            with pytest.raises(UnsafePath, match="'link/a' leads through the symlink 'link'"):
                operation("link/a")
        with pytest.raises(UnsafePath, match="'link' leads through the symlink 'link'"):
            destination.make_directory("link")
    assert list((tmp_path / "d").iterdir()) == []
