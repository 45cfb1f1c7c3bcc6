from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshgate_sync.tree.scan import Scanner
from meshgate_sync.tree.stat_cache import FileRecord, StatCache
from meshgate_sync.tree.tree import File
from tests.sync.trees import write

LATER = 10**18 * 9
SECOND = 1_000_000_000


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
