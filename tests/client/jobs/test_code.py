"""What ``job.sync()`` says beside its line."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from meshgate.client import Client
from meshgate.code import CodeSync
from meshgate.jobs.code import _left_out, _places_outside
from meshgate.project import Tree


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


def test_modules_that_the_sync_left_out_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    top = tmp_path.resolve()
    (top / "left_out_of_test").mkdir()
    for name in ("__init__", "model", "_version"):
        (top / f"left_out_of_test/{name}.py").write_text("")
    (top / ".gitignore").write_text("_version.py\n")
    monkeypatch.syspath_prepend(str(top))
    names = ["left_out_of_test", "left_out_of_test.model", "left_out_of_test._version"]
    code = CodeSync(client, Tree(top))
    try:
        for name in names:
            importlib.import_module(name)
        code.push(wait=False)
        assert _left_out(code) == [("left_out_of_test._version", "left_out_of_test/_version.py")]
        (top / ".meshgateignore").write_text("!/left_out_of_test/_version.py\n")
        code.push(wait=False)
        assert _left_out(code) == []
    finally:
        code.close()
        for name in names:
            sys.modules.pop(name, None)
