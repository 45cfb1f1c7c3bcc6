"""No name leads out of a destination."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshgate.transfer.destination import Destination, UnsafePath


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
