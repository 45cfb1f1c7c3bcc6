"""Modules that a program uses and the sync does not send."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from meshgate.code_sync.missing_modules import directories_outside, ignored_modules, including_rules, modules_beside
from meshgate.code_sync.project import Tree
from meshgate.code_sync.push import CodeSync
from meshgate.proxies.client import Client
from meshgate_sync.tree.scan import Scanner
from tests.sync.trees import paths


def test_directories_outside_of_the_tree_are_found_if_modules_were_loaded_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("project", "elsewhere", "unused"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"outside_of_{name}.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path / name))
    for name in ("project", "elsewhere"):
        importlib.import_module(f"outside_of_{name}")
    found = directories_outside(Tree((tmp_path / "project").resolve()))
    assert [path for path in found if Path(path).is_relative_to(tmp_path)] == [str(tmp_path / "elsewhere")]
    for name in ("project", "elsewhere"):
        del sys.modules[f"outside_of_{name}"]


def test_a_directory_above_the_tree_is_not_outside_because_of_what_is_in_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/inside_a_project.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    importlib.import_module("inside_a_project")
    found = directories_outside(Tree((tmp_path / "project").resolve()))
    del sys.modules["inside_a_project"]
    assert str(tmp_path) not in found


def test_modules_beside_a_program_are_those_of_its_directory_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("beside_a_program", "package_beside", "below/not_beside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "below"))
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("beside_a_program", "package_beside", "not_beside")
    for name in names:
        importlib.import_module(name)
    assert modules_beside(str(tmp_path)) == ["beside_a_program", "package_beside"]
    for name in names:
        del sys.modules[name]


def test_ignored_modules_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    top = tmp_path.resolve()
    (top / "ignored_in_test").mkdir()
    for name in ("__init__", "model", "_version"):
        (top / f"ignored_in_test/{name}.py").write_text("")
    (top / ".gitignore").write_text("_version.py\n")
    monkeypatch.syspath_prepend(str(top))
    names = ["ignored_in_test", "ignored_in_test.model", "ignored_in_test._version"]
    code = CodeSync(client, Tree(top))
    try:
        for name in names:
            importlib.import_module(name)
        code.push(wait=False)
        assert ignored_modules(code.tree, code.ignores) == [("ignored_in_test._version", "ignored_in_test/_version.py")]
        (top / ".meshgateignore").write_text("!/ignored_in_test/_version.py\n")
        code.push(wait=False)
        assert ignored_modules(code.tree, code.ignores) == []
        assert ignored_modules(Tree(top, parts=("other",)), lambda path: True) == []
    finally:
        code.close()
        for name in names:
            sys.modules.pop(name, None)


def test_the_advised_rules_include_the_modules_and_nothing_else_in_their_directories(tmp_path: Path) -> None:
    (tmp_path / "src/out/deep[1]").mkdir(parents=True)
    modules = ["_version.py", "src/out/a.py", "src/out/deep[1]/b.py", "src/out/deep[1]/c .py"]
    for name in [*modules, "src/out/secret", "src/out/deep[1]/secret"]:
        (tmp_path / name).write_text("")
    (tmp_path / ".gitignore").write_text("out/\n_version.py\n")
    scanner = Scanner(tmp_path)
    scanner.scan()
    rules = including_rules(Tree(tmp_path), modules, scanner.ignores)
    (tmp_path / ".meshgateignore").write_text("\n".join(rules))
    files = {path.decode() for path in paths(scanner.scan().tree) if (tmp_path / path.decode()).is_file()}
    assert files == {".gitignore", ".meshgateignore", *modules}
