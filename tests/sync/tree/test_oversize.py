from __future__ import annotations

import pytest

from meshgate_sync.errors import TreeTooLarge
from meshgate_sync.tree.oversize import Limits, Sizes


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
