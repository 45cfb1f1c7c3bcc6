"""Where a host keeps what is meshgate's."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest

from meshgate_sync.store.place import default_home, disk_full, used_up


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of a user without a cache directory; the place in it."""
    monkeypatch.delenv("MESHGATE_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none/cache")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"meshgate-{os.getuid()}"


def test_the_home_is_named_by_the_environment_or_the_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHGATE_HOME", str(tmp_path / "here"))
    assert default_home() == str(tmp_path / "here")
    monkeypatch.delenv("MESHGATE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_home() == str(tmp_path / "cache/meshgate")


def test_a_home_in_the_temporary_directory_is_private_to_its_user(temporary: Path) -> None:
    assert default_home() == str(temporary)
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o700
    assert default_home() == str(temporary)


def test_a_home_that_others_can_write_to_or_made_is_refused(temporary: Path) -> None:
    temporary.mkdir()
    temporary.chmod(0o777)
    with pytest.raises(PermissionError, match="set MESHGATE_HOME"):
        default_home()
    temporary.rmdir()
    temporary.symlink_to(temporary.parent)
    with pytest.raises(PermissionError, match="set MESHGATE_HOME"):
        default_home()


@pytest.mark.parametrize(("number", "what"), [(errno.ENOSPC, "space"), (errno.EDQUOT, "quota"), (errno.EACCES, "")])
@pytest.mark.parametrize("path", ["not/made/yet", "/not/made/yet"])
def test_an_error_says_what_is_used_up_also_where_nothing_was_made_yet(number: int, what: str, path: str) -> None:
    error = OSError(number, os.strerror(number))
    assert used_up(error, path) == what
    text = disk_full(error, path, "/home/of/meshgate")
    assert text.startswith(f"no {what} left on the disk that holds {path}: " if what else "")
    assert bool(text) == bool(what)
