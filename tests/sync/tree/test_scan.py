from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshgate_sync.errors import LinkLeavesTree, TreeError, TreeTooLarge, UnstableFile
from meshgate_sync.tree import scan as scan_module
from meshgate_sync.tree.scan import FileRecord, Limits, Scanner, Sizes, StatCache, git_root
from meshgate_sync.tree.tree import EMPTY, Directory, File, Symlink, lookup
from tests.sync.trees import models, on_disk, paths, plain, write

LATER = 10**18 * 9
SECOND = 1_000_000_000


def settled() -> int:
    """A clock that makes every file look old."""
    return LATER


def scanner(path: Path, **options: object) -> Scanner:
    return Scanner(path, clock=settled, **options)  # type: ignore[arg-type]


@given(models)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_scan_matches_what_is_on_disk(tmp_path: Path, model: dict[bytes, object]) -> None:
    write(tmp_path / "tree", model)
    try:
        tree = Scanner(tmp_path / "tree").scan().tree
    except LinkLeavesTree:
        return
    assert as_model(tree, tmp_path / "tree") == plain(model)
    assert as_model(tree, tmp_path / "tree") == on_disk(tmp_path / "tree")


def as_model(tree: Directory, top: Path) -> dict[bytes, object]:
    model: dict[bytes, object] = {}
    for name, node in tree.entries.items():
        path = top / os.fsdecode(name)
        if isinstance(node, Directory):
            model[name] = as_model(node, path)
        elif isinstance(node, Symlink):
            model[name] = os.fsdecode(node.target)
        else:
            content = path.read_bytes()
            assert node.size == len(content)
            model[name] = (content, True) if node.executable else content
    return model


def test_an_unchanged_tree_is_not_read_again(tmp_path: Path) -> None:
    write(tmp_path / "t", {b"a": b"1", b"d": {b"b": b"2"}})
    scan = scanner(tmp_path / "t")
    first = scan.scan()
    second = scan.scan()
    assert sorted(first.read) == [b"a", b"d/b"]
    assert second.read == ()
    assert second.tree is first.tree


def test_only_what_changed_is_read_again(tmp_path: Path) -> None:
    write(tmp_path / "t", {b"a": b"1", b"d": {b"b": b"2"}, b"e": {b"c": b"3"}})
    scan = scanner(tmp_path / "t")
    before = scan.scan().tree
    (tmp_path / "t/d/b").write_bytes(b"changed")
    after = scan.scan()
    assert after.read == (b"d/b",)
    assert after.tree.entries[b"e"] is before.entries[b"e"]
    assert after.tree != before


def test_a_file_written_in_the_clock_tick_of_its_reading_is_read_again(tmp_path: Path) -> None:
    write(tmp_path / "t", {b"a": b"1"})
    now = os.stat(tmp_path / "t/a").st_ctime_ns
    scan = Scanner(tmp_path / "t", clock=lambda: now + 1000)
    scan.scan()
    assert scan.scan().read == (b"a",)
    late = Scanner(tmp_path / "t", clock=lambda: now + 5_000_000_000)
    late.scan()
    assert late.scan().read == ()


# --- with reported changes ----------------------------------------------------------------------------------


def test_only_reported_paths_are_scanned(tmp_path: Path) -> None:
    write(tmp_path / "t", {b"d": {b"a": b"1"}, b"e": {b"f": {b"b": b"2"}}})
    scan = scanner(tmp_path / "t")
    scan.scan()
    (tmp_path / "t/d/a").write_bytes(b"changed, not reported")
    (tmp_path / "t/e/f/b").write_bytes(b"changed")
    assert scan.scan([tmp_path / "t/e/f/b"]).read == (b"e/f/b",)
    assert scan.scan().read == (b"d/a",)


def test_a_reported_directory_is_scanned_to_its_leaves(tmp_path: Path) -> None:
    write(tmp_path / "t", {b"d": {b"x": {b"a": b"1"}}, b"other": {b"y": b"2"}})
    scan = scanner(tmp_path / "t")
    scan.scan()
    (tmp_path / "t/d/x").rename(tmp_path / "t/d/gone")
    write(tmp_path / "t/d/x", {b"deep": {b"b": b"3"}})
    found = scan.scan([tmp_path / "t/d/x", tmp_path / "t/d/gone"])
    assert found.tree == scanner(tmp_path / "t").scan().tree
    assert lookup(found.tree, b"d/x/deep/b") is not None


@pytest.mark.parametrize("report", [".gitignore", ".", "../elsewhere"])
def test_a_report_that_may_affect_every_path_causes_a_full_scan(tmp_path: Path, report: str) -> None:
    write(tmp_path / "t", {b"d": {b"a": b"1"}})
    scan = scanner(tmp_path / "t")
    scan.scan()
    (tmp_path / "t/d/a").write_bytes(b"changed")
    assert scan.scan([tmp_path / "t" / report]).read == (b"d/a",)


def test_the_first_scan_is_full_despite_a_report(tmp_path: Path) -> None:
    write(tmp_path / "t", {b"d": {b"a": b"1"}})
    assert scanner(tmp_path / "t").scan([tmp_path / "t/other"]).read == (b"d/a",)


def test_reported_paths_may_be_relative_to_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t", {b"d": {b"a": b"1"}, b"e": {}})
    scan = scanner(tmp_path / "t")
    scan.scan()
    monkeypatch.chdir(tmp_path / "t/e")
    (tmp_path / "t/d/a").write_bytes(b"changed")
    assert scan.scan(["d/a"]).read == (b"d/a",)


def test_ignores_decides_by_path(tmp_path: Path) -> None:
    files: dict[bytes, object] = {
        b".gitignore": b"*.log\n", b".git": {b"index": b""}, b".meshgateignore": b"!.idea/", b".idea": {b"x": b""},
        b"d": {b"a": b"1", b".gitignore": b"out/", b"out": {b"deep": {b"b": b"1"}}},
        b"env": {b"pyvenv.cfg": b"", b"lib": b""},
    }  # fmt: skip
    write(tmp_path / "t", files)
    scan = scanner(tmp_path / "t")
    assert not scan.ignores(".git/index")  # before the first scan nothing is known
    scan.scan()
    write(tmp_path / "t/new", {b"x": b"", b"y.log": b""})
    (tmp_path / "t/d/a").unlink()
    ignored = [".git", ".git/index", ".git/refs/new", "d/out/deep/b", "env/lib", "b.log", "d/b.log", "../other"]
    seen = ["d", "d/a", ".idea/x", "d/b", ".gitignore", "d/.gitignore", "new", "new/x", "new/y.log", "."]
    assert [path for path in ignored + seen if scan.ignores(path)] == ignored
    assert scan.ignores(tmp_path / "t/.git/index")
    (tmp_path / "t/.gitignore").write_bytes(b"")
    scan.scan([".gitignore"])
    assert [path for path in ("b.log", "new/y.log", ".git/index") if scan.ignores(path)] == [".git/index"]


@given(models, models)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
def test_a_correct_report_gives_the_result_of_a_full_scan(
    tmp_path: Path, old: dict[bytes, object], new: dict[bytes, object]
) -> None:
    top = tmp_path / "t"
    scan = Scanner(top)
    try:
        write(top, {b"in": old, b"same": {b"a": b"1"}})
        scan.scan()
        write(top / "in", new)
        assert scan.scan([top / "in"]).tree == Scanner(top).scan().tree
    except LinkLeavesTree:
        return


# --- what is not synced -------------------------------------------------------------------------------------


def test_ignored_entries_are_not_in_the_tree(tmp_path: Path) -> None:
    write(
        tmp_path / "t",
        {
            b".gitignore": b"*.log\n/out/\n", b"a.log": b"", b"out": {b"x": b""}, b"src": {b"out": {b"y": b""}},
            b"myenv": {b"pyvenv.cfg": b"", b"lib": b""}, b"__pycache__": {b"z.pyc": b""}, b"k.py": b"",
        },
    )  # fmt: skip
    scan = scanner(tmp_path / "t")
    expected = [b".gitignore", b"k.py", b"src", b"src/out", b"src/out/y"]
    assert paths(scan.scan().tree) == expected
    assert paths(scan.scan().tree) == expected


def test_an_added_or_removed_rule_applies_at_once(tmp_path: Path) -> None:
    write(tmp_path / "t", {b"a.log": b"1", b"b.py": b"2"})
    scan = scanner(tmp_path / "t")
    assert paths(scan.scan().tree) == [b"a.log", b"b.py"]
    (tmp_path / "t/.meshgateignore").write_text("*.log\n")
    assert paths(scan.scan().tree) == [b".meshgateignore", b"b.py"]
    (tmp_path / "t/.meshgateignore").unlink()
    assert paths(scan.scan().tree) == [b"a.log", b"b.py"]


def test_git_info_exclude_applies(tmp_path: Path) -> None:
    write(tmp_path / "t", {b".git": {b"info": {b"exclude": b"secret\n"}}, b"secret": b"", b"a": b""})
    assert paths(scanner(tmp_path / "t").scan().tree) == [b"a"]


def test_links_are_kept_and_those_that_leave_the_tree_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "t", {b"a": b"1", b"d": {b"up": "../a"}, b"to": "d"})
    tree = scanner(tmp_path / "t").scan().tree
    assert lookup(tree, b"d/up") == Symlink(b"../a")
    write(tmp_path / "t", {b"abs": "/etc/passwd", b"d": {b"out": "../../x"}, b"dot": ".."})
    with pytest.raises(LinkLeavesTree) as caught:
        scanner(tmp_path / "t").scan()
    assert sorted(caught.value.links) == [("abs", "/etc/passwd"), ("d/out", "../../x"), ("dot", "..")]
    assert "abs -> /etc/passwd" in str(caught.value)


def test_empty_directories_and_odd_names_are_kept_and_sockets_are_not(tmp_path: Path) -> None:
    write(tmp_path / "t", {b"empty": {}, b"\xff\xfe": b"1"})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "t/sock"))
        tree = scanner(tmp_path / "t").scan().tree
    assert tree.entries[b"empty"] == EMPTY
    assert isinstance(tree.entries[b"\xff\xfe"], File)
    assert b"sock" not in tree.entries


def test_a_mode_change_alone_is_a_change(tmp_path: Path) -> None:
    write(tmp_path / "t", {b"a": b"1"})
    scan = scanner(tmp_path / "t")
    before = scan.scan().tree
    (tmp_path / "t/a").chmod(0o755)
    after = scan.scan().tree
    assert before != after
    assert isinstance(after.entries[b"a"], File)
    assert after.entries[b"a"].executable


# --- errors -------------------------------------------------------------------------------------------------


def test_a_tree_over_the_size_limit_is_rejected_with_its_largest_entries(tmp_path: Path) -> None:
    write(tmp_path / "t", {b"data": {b"raw": {b"big.bin": b"x" * 5000}}, b"src": {b"a.py": b"y" * 100}})
    with pytest.raises(TreeTooLarge) as caught:
        scanner(tmp_path / "t", limits=Limits(bytes=1000)).scan()
    assert caught.value.largest[0] == ("data/raw/big.bin", 5000, 1)
    assert ".meshgateignore" in str(caught.value)


def test_a_tree_with_too_many_files_is_rejected_before_any_is_read(tmp_path: Path) -> None:
    write(tmp_path / "t", {b"many": {str(n).encode(): b"x" for n in range(50)}, b"a.py": b"y"})
    scan = scanner(tmp_path / "t", limits=Limits(files=20))
    with pytest.raises(TreeTooLarge) as caught:
        scan.scan()
    assert caught.value.largest[0] == ("many", 50, 50)
    assert scan.cache.directories == {}


def interfering(monkeypatch: pytest.MonkeyPatch, path: Path, times: int, *, rewrite: bool = False) -> Callable[[], int]:
    """Appends to ``path`` during the first ``times`` reads of it, or rewrites it longer than before."""
    count = 0
    original = scan_module.chunks.cut

    def cut(read: Callable[[int], bytes], size: int) -> object:
        nonlocal count
        outcome = original(read, size)
        count += 1
        if count <= times:
            before = path.read_bytes()
            path.write_bytes((b"x%d" % count if rewrite else b"") + before + b"more")
        return outcome

    monkeypatch.setattr(scan_module.chunks, "cut", cut)
    return lambda: count


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t", {b"a": b"1"})
    reads = interfering(monkeypatch, tmp_path / "t/a", 2)
    tree = scanner(tmp_path / "t").scan().tree
    assert reads() == 3
    assert tree.size == len(b"1moremore")


def test_a_file_that_keeps_changing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t", {b"a": b"1"})
    interfering(monkeypatch, tmp_path / "t/a", 100, rewrite=True)
    with pytest.raises(UnstableFile, match="a changed during each of 5 attempts"):
        scanner(tmp_path / "t").scan()


@pytest.mark.parametrize("content", [b"", b"line\n", b"line\n" * 100_000])
def test_of_a_file_that_keeps_growing_the_start_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    write(tmp_path / "t", {b"a.log": content, b"b.py": b"1"})
    with monkeypatch.context() as patch:
        interfering(patch, tmp_path / "t/a.log", 100)
        scan = scanner(tmp_path / "t")
        tree = scan.scan().tree
    taken = content + b"more" * 4
    write(tmp_path / "expected", {b"a.log": taken, b"b.py": b"1"})
    assert tree == scanner(tmp_path / "expected").scan().tree
    assert scan.scan().tree.size == (tmp_path / "t/a.log").stat().st_size + 1


def test_a_file_removed_during_the_walk_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t", {b"a": b"1", b"b": b"2"})
    original = Scanner._read

    def read(self: Scanner, path: bytes) -> object:
        (tmp_path / "t/b").unlink(missing_ok=True)
        return original(self, path)

    scan = scanner(tmp_path / "t")
    scan.scan()
    (tmp_path / "t/a").write_bytes(b"changed")
    (tmp_path / "t/b").write_bytes(b"changed")
    monkeypatch.setattr(Scanner, "_read", read)
    assert paths(scan.scan().tree) == [b"a"]


@pytest.mark.parametrize("replacement", ["directory", "link", "pipe"])
def test_a_file_that_is_replaced_by_something_else_during_the_scan_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replacement: str
) -> None:
    write(tmp_path / "t", {b"kept": b"1", b"replaced": b"2"})
    real_open = os.open

    def replace_and_open(path: Any, *args: Any, **kwargs: Any) -> int:
        target = tmp_path / "t/replaced"
        if os.fsencode(path) == os.fsencode(target) and target.is_file() and not target.is_symlink():
            target.unlink()
            {
                "directory": target.mkdir,
                "link": lambda: target.symlink_to("kept"),
                "pipe": lambda: os.mkfifo(target),
            }[replacement]()
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", replace_and_open)
    assert paths(scanner(tmp_path / "t").scan().tree) == [b"kept"]


class Unreachable:
    """An entry of a directory that can be listed but not entered."""

    def __init__(self, entry: os.DirEntry[bytes], link: bool) -> None:
        self.name, self.path, self.link = entry.name, entry.path, link

    def is_dir(self, *, follow_symlinks: bool) -> bool:
        return False

    def is_symlink(self) -> bool:
        return self.link

    def stat(self, *, follow_symlinks: bool) -> os.stat_result:
        raise PermissionError(13, "Permission denied", self.path)


@pytest.mark.parametrize("link", [False, True])
def test_an_entry_of_a_directory_that_cannot_be_entered_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: bool
) -> None:
    """Root enters any directory, so the error is simulated."""
    write(tmp_path / "t", {b"data": {b"\xff": b"1"}})
    list_entries = os.scandir

    @contextlib.contextmanager
    def scandir(path: bytes) -> Iterator[list[Any]]:
        with list_entries(path) as entries:
            yield [Unreachable(each, link) if path.endswith(b"/data") else each for each in entries]

    def readlink(path: bytes) -> bytes:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(os, "readlink", readlink)
    message = r"^cannot read data/\\xff: Permission denied\. Make it readable, or list it in \.meshgateignore$"
    with pytest.raises(TreeError, match=message):
        scanner(tmp_path / "t").scan()


def test_a_file_that_the_disk_cannot_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t", {b"a": b"1"})

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(scan_module.chunks, "cut", fail)
    with pytest.raises(TreeError, match=r"^cannot read a: Input/output error\. Make it readable"):
        scanner(tmp_path / "t").scan()


def test_a_missing_tree_is_named(tmp_path: Path) -> None:
    with pytest.raises(TreeError, match=r"cannot read directory .*nowhere"):
        scanner(tmp_path / "nowhere").scan()


def test_the_git_root_is_the_nearest_directory_with_dot_git(tmp_path: Path) -> None:
    (tmp_path / "r/.git").mkdir(parents=True)
    (tmp_path / "r/a/b").mkdir(parents=True)
    assert git_root(tmp_path / "r/a/b") == str(tmp_path / "r")
    assert git_root(tmp_path) is None


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
def test_rescans_of_any_edits_find_what_a_fresh_scan_finds(tmp_path: Path, data: st.DataObject) -> None:
    scan = Scanner(tmp_path / "t")
    for model in data.draw(st.lists(models, min_size=2, max_size=4)):
        write(tmp_path / "t", model)
        try:
            expected = Scanner(tmp_path / "t").scan().tree
        except LinkLeavesTree:
            continue
        assert scan.scan().tree == expected


def test_everything_can_be_scanned(tmp_path: Path) -> None:
    write(tmp_path, {b".gitignore": b"*\n", b".git": {b"x": b"1"}, b".venv": {b"pyvenv.cfg": b"", b"x": b"1"}})
    (tmp_path / "out").symlink_to("/etc/hosts")
    everything = scanner(tmp_path, everything=True)
    assert everything.scan().tree.files == 5
    assert everything.scan().read == ()
    assert not everything.ignores(".git/x")


def test_a_saved_cache_serves_another_process(tmp_path: Path) -> None:
    write(tmp_path / "t", {b"a": b"1", b"\xff": (b"2", True), b".gitignore": b"x\n", b"x": b"3"})
    scan = Scanner(tmp_path / "t", clock=lambda: LATER)
    tree = scan.scan().tree
    scan.cache.save(str(tmp_path / "cache/stat"))
    again = Scanner(tmp_path / "t", cache=StatCache.load(str(tmp_path / "cache/stat")), clock=lambda: LATER).scan()
    assert again.read == ()
    assert again.tree == tree


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"meshgate-stat-1\n" + bytes(40)])
def test_a_damaged_or_missing_cache_is_empty(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "cache").write_bytes(damage)
    assert StatCache.load(str(tmp_path / "cache")).directories == {}
    assert StatCache.load(str(tmp_path / "missing")).directories == {}


def test_a_cache_that_cannot_be_saved_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache"
    StatCache().save(str(path))
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        StatCache().save(str(path))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("changed_at", "read_at", "trusted"),
    [
        (5 * SECOND + 1, 5 * SECOND + 2, False),  # in the same clock tick
        (5 * SECOND + 1, 6 * SECOND, True),
        (5 * SECOND, 6 * SECOND, False),  # a file system with a coarse clock
        (5 * SECOND, 8 * SECOND, True),
        (9 * SECOND + 1, 6 * SECOND, False),  # written after it was read
    ],
)
def test_a_file_is_trusted_if_it_was_written_clearly_before_it_was_read(
    changed_at: int, read_at: int, trusted: bool
) -> None:
    stat = (1, 0, changed_at, 7, 0o100644)
    assert FileRecord(stat, read_at, File(())).trusts(stat) is trusted


def test_a_file_whose_stat_differs_is_not_trusted() -> None:
    stat = (1, 0, 1, 7, 0o100644)
    record = FileRecord(stat, LATER, File(()))
    assert record.trusts(stat)
    for place in range(len(stat)):
        assert not record.trusts((*stat[:place], stat[place] + 1, *stat[place + 1 :]))  # type: ignore[arg-type]


def rejected(entries: dict[bytes, int], limits: Limits) -> TreeTooLarge:
    """The error of a tree with these files, path to size."""
    sizes = Sizes("/project", limits)
    for path, size in entries.items():
        sizes.add(path, size, 1)
    with pytest.raises(TreeTooLarge) as caught:
        sizes.check()
    return caught.value


def test_a_tree_within_the_limits_is_accepted() -> None:
    sizes = Sizes("/project", Limits(bytes=10, files=2))
    sizes.add(b"a", 5, 1)
    sizes.add(b"d/b", 5, 1)
    sizes.check()
    assert (sizes.bytes, sizes.files) == (10, 2)


def test_the_error_names_the_tree_the_limit_and_what_to_do() -> None:
    error = rejected({b"a": 5_000_000}, Limits(bytes=1_000_000))
    assert str(error) == (
        "/project is too large to sync: it has 5 MB, the limit is 1 MB. Its largest entries:\n"
        "         5.0 MB        1 files  a\n"
        "List what is not code in .meshgateignore, or pass sync_dirs."
    )


def test_files_count_when_there_are_too_many() -> None:
    error = rejected({b"many/%d" % number: 1 for number in range(30)} | {b"large": 1000}, Limits(files=20))
    assert error.reason == "it has 31 files, the limit is 20"
    assert error.largest[0] == ("many", 30, 30)


def test_a_directory_that_is_large_only_because_of_one_entry_is_not_listed() -> None:
    error = rejected({b"data/raw/big": 5000, b"data/raw/small": 1, b"src/a": 100}, Limits(bytes=1000))
    assert [path for path, _, _ in error.largest] == ["data/raw/big", "src/a", "data/raw/small"]


def test_at_most_ten_entries_are_listed() -> None:
    error = rejected({b"%d" % number: 100 + number for number in range(30)}, Limits(bytes=10))
    assert [path for path, _, _ in error.largest] == [str(number) for number in range(29, 19, -1)]


def test_a_walk_far_beyond_the_limit_ends_early() -> None:
    sizes = Sizes("/project", Limits(files=2))
    for number in range(8):
        sizes.add(b"%d" % number, 1, 1)
    with pytest.raises(TreeTooLarge, match="it has 9 files"):
        sizes.add(b"8", 1, 1)
