"""What ``job.sync()`` says beside its line."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from meshgate.code import Tree
from meshgate.jobs.code import _places_outside


def test_where_modules_are_from_that_the_sync_does_not_bring_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("project", "elsewhere", "unused"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"outside_of_{name}.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path / name))
    for name in ("project", "elsewhere"):
        importlib.import_module(f"outside_of_{name}")
    outside = _places_outside(Tree((tmp_path / "project").resolve()))
    assert [place for place in outside if Path(place).is_relative_to(tmp_path)] == [str(tmp_path / "elsewhere")]
    for name in ("project", "elsewhere"):
        del sys.modules[f"outside_of_{name}"]
