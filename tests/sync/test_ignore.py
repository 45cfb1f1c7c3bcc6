from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshgate_sync.ignore import Rules
from meshgate_sync.scan import Scanner
from meshgate_sync.tree import File, walk


def ignored(rules: Rules, path: str, *, directory: bool = False) -> bool:
    return rules.ignores(os.fsencode(path), directory=directory)


@pytest.mark.parametrize("path", [".git", "a/.venv", "node_modules", "x/__pycache__", ".monarch", ".mypy_cache"])
def test_defaults_leave_out_what_is_not_code(path: str) -> None:
    assert ignored(Rules.base(), path, directory=True)


@pytest.mark.parametrize("path", ["env", "src", "build", "data.csv", ".github"])
def test_defaults_leave_in_what_may_be_code(path: str) -> None:
    assert not ignored(Rules.base(), path, directory=True)


def test_a_nested_file_overrides_the_one_above() -> None:
    rules = Rules.base().below(b"", {b".gitignore": b"*.log\n/only\n"})
    below = rules.below(b"sub/", {b".gitignore": b"!keep.log\n"})
    assert ignored(rules, "a.log")
    assert ignored(below, "sub/a.log")
    assert not ignored(below, "sub/keep.log")
    assert ignored(rules, "only")
    assert not ignored(rules, "sub/only")


def test_own_rules_stand_above_git_and_defaults() -> None:
    rules = Rules.base().below(b"", {b".meshgateignore": b"!.vscode/\n!*.log\nbig.bin\n", b".gitignore": b"*.log\n"})
    assert not ignored(rules, ".vscode", directory=True)
    assert not ignored(rules, "a.log")
    assert ignored(rules, "big.bin")


def test_git_excludes_count_below_gitignore() -> None:
    rules = Rules.base(b"*.tmp\n*.dat\n").below(b"", {b".gitignore": b"!*.dat\n"})
    assert ignored(rules, "a.tmp")
    assert not ignored(rules, "a.dat")


def test_rules_are_named_by_what_they_say() -> None:
    base = Rules.base()
    assert base.below(b"", {}) is base
    one = base.below(b"", {b".gitignore": b"a\n"})
    assert one.key == Rules.base().below(b"", {b".gitignore": b"a\n"}).key
    assert one.key != base.below(b"", {b".gitignore": b"b\n"}).key
    assert one.key != base.below(b"d/", {b".gitignore": b"a\n"}).key


patterns = st.sampled_from(
    [
        "*.log",
        "!a.log",
        "/b",
        "d/",
        "!d/",
        "d/*",
        "!d/c",
        "**/c",
        "d/**",
        "a?log",
        "[ab].log",
        "# comment",
        "",
        " ",
        "\\!x",
    ]
)
FILES = ["a.log", "b", "c", "d/a.log", "d/b", "d/c", "d/d/c", "e/b", "e/d/x", "!x"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repository")
    subprocess.run(["git", "init", "-q", path], check=True)
    for name in FILES:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    return path


@given(st.lists(patterns, max_size=4), st.lists(patterns, max_size=3))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_git_leaves_out_the_same_files(repository: Path, top: list[str], nested: list[str]) -> None:
    (repository / ".gitignore").write_text("\n".join(top) + "\n")
    (repository / "d" / ".gitignore").write_text("\n".join(nested) + "\n")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=repository, check=True, capture_output=True, env={**os.environ, "HOME": "/nonexistent"},
    ).stdout  # fmt: skip
    tree = Scanner(repository).scan().tree
    assert {path for path, node in walk(tree) if isinstance(node, File)} == set(listed.split(b"\0")) - {b""}
