from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from meshgate_sync.tree.ignore import Patterns, Rules, compile_wildmatch
from meshgate_sync.tree.scan import Scanner
from tests.sync.trees import paths


def ignored(rules: Rules, path: str, *, directory: bool = False) -> bool:
    return rules.ignores(os.fsencode(path), directory=directory)


@pytest.mark.parametrize("path", [".git", "a/.venv", "node_modules", "x/__pycache__", ".monarch", ".mypy_cache"])
def test_defaults_exclude_what_is_not_code(path: str) -> None:
    assert ignored(Rules.base(), path, directory=True)


@pytest.mark.parametrize("path", [".venv", "a/venv", "node_modules"])
def test_defaults_exclude_links_to_shared_environments(path: str) -> None:
    assert ignored(Rules.base(), path, directory=False)


@pytest.mark.parametrize("path", ["env", "src", "build", "data.csv", ".github"])
def test_defaults_include_what_may_be_code(path: str) -> None:
    assert not ignored(Rules.base(), path, directory=True)


def test_a_nested_file_overrides_the_one_above() -> None:
    rules = Rules.base().below(b"", {b".gitignore": b"*.log\n/only\n"})
    below = rules.below(b"sub/", {b".gitignore": b"!keep.log\n"})
    assert ignored(rules, "a.log")
    assert ignored(below, "sub/a.log")
    assert not ignored(below, "sub/keep.log")
    assert ignored(rules, "only")
    assert not ignored(rules, "sub/only")


def test_own_rules_override_git_and_defaults() -> None:
    rules = Rules.base().below(b"", {b".meshgateignore": b"!.vscode/\n!*.log\nbig.bin\n", b".gitignore": b"*.log\n"})
    assert not ignored(rules, ".vscode", directory=True)
    assert not ignored(rules, "a.log")
    assert ignored(rules, "big.bin")


def test_gitignore_overrides_info_exclude() -> None:
    rules = Rules.base(b"*.tmp\n*.dat\n").below(b"", {b".gitignore": b"!*.dat\n"})
    assert ignored(rules, "a.tmp")
    assert not ignored(rules, "a.dat")


def test_equal_rules_have_equal_keys() -> None:
    base = Rules.base()
    assert base.below(b"", {}) is base
    one = base.below(b"", {b".gitignore": b"a\n"})
    assert one.key == Rules.base().below(b"", {b".gitignore": b"a\n"}).key
    assert one.key != base.below(b"", {b".gitignore": b"b\n"}).key
    assert one.key != base.below(b"d/", {b".gitignore": b"a\n"}).key


# --- git, for comparison --------------------------------------------------------------------------------------

FILES = [
    f"{above}{name}"
    for above in ("", "a/", "b/", "a/b/", "a/a/", "b/.c/", "a/b/c1/")
    for name in ("x", "x.py", ".x", "b.py", "1", "-x", "#x", "!x", "[x]", "x ", "\\x", "X", "\xe9")
]
DIRECTORIES = ["", "a", "a/b", "b"]
tokens = st.sampled_from(
    [
        *"abx1X.-#! \t", *"//", *"**??", "**", "**/", "/**", "\\", "[", "]", "[!", "[^", "[ax]", "[!x]", "[a-z]",
        "[]x]", "[x-]", "[[:digit:]]", "[![:alpha:]]", "[[:nothing:]]", "[[:punct:]x]", "x.py", ".py", "*.py",
        "\u00e9", "\r",
    ]
)  # fmt: skip
random_lines = st.builds(
    lambda mark, parts: mark + "".join(parts), st.sampled_from(["", "!"]), st.lists(tokens, max_size=5)
)
common_lines = st.sampled_from(
    [
        "*", "!*/", "!*.py", "/*", "!/a", "!a/", "a/", "!a/b/", "a/*", "!a/b", "**/x", "a/**", "!a/**/", "/b", "x*",
        "*x", "", " ", "# x", "!", "/", "*/", "!/a/b/x.py", "b/.c", "**", "a/**/c1",
    ]
)  # fmt: skip
GIT_2_52 = re.compile(r"!?[^*?\[\\]*[^!/*?\[\\]\*\*")  # where older releases differ from the documentation: a**/b
lines = st.one_of(common_lines, random_lines).filter(lambda line: not GIT_2_52.match(line))
texts = st.builds(
    lambda bom, end, given: bom + end.join(line.encode() for line in given),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.sampled_from([b"\n", b"\r\n"]),
    st.lists(lines, max_size=5),
)
ignore_files = st.dictionaries(st.sampled_from([*DIRECTORIES, ".git/info/exclude"]), texts, max_size=3)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repository")
    subprocess.run(["git", "init", "-q", path], check=True)
    for name in FILES:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    return path


def write_ignore_files(repository: Path, contents: dict[str, bytes]) -> None:
    for place in DIRECTORIES:
        (repository / place / ".gitignore").write_bytes(contents.get(place, b""))
    (repository / ".git/info/exclude").write_bytes(contents.get(".git/info/exclude", b""))


def all_paths(repository: Path) -> set[bytes]:
    top = os.fsencode(repository)
    return {
        os.path.relpath(os.path.join(above, name), top)
        for above, directories, files in os.walk(top)
        for name in directories + files
        if b".git" not in os.path.relpath(os.path.join(above, name), top).split(b"/")
    }


def not_ignored_by_git(repository: Path) -> set[bytes]:
    everything = all_paths(repository)
    found = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin", "-z"],
        cwd=repository, input=b"\0".join(everything), check=False, capture_output=True,
        env={**os.environ, "HOME": "/nonexistent"},
    )  # fmt: skip
    assert found.returncode in {0, 1}, found.stderr
    return everything - set(found.stdout.split(b"\0"))


@given(ignore_files)
@example({"": b"*\n!*/\n!*.py\n"})
@example({"": b"\xef\xbb\xbfx\n"})
@example({"": b"[[:digit:]]\n"})
@example({"": b"[\nx\\\nb/\n"})
@example({"": b"!\n/\n**/\n!a/\n", "a": b"x\n!x.py\n"})
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_git_ignores_the_same_paths(repository: Path, contents: dict[str, bytes]) -> None:
    write_ignore_files(repository, contents)
    assert set(paths(Scanner(repository).scan().tree)) == not_ignored_by_git(repository)


def test_no_gitignore_includes_the_directory_of_git() -> None:
    rules = Rules.base().below(b"", {b".gitignore": b"!*\n"})
    assert ignored(rules, ".git", directory=True)
    assert ignored(rules, "sub/.git")


def test_info_exclude_of_a_worktree_is_that_of_its_repository(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", *identity, "-C", tmp_path / "main", *arguments], check=True, capture_output=True)

    (tmp_path / "main").mkdir()
    git("init", "-q")
    git("commit", "--allow-empty", "-m", "first")
    git("worktree", "add", "../other")
    (tmp_path / "main/.git/info/exclude").write_text("secret\n")
    for name in ("secret", "a"):
        (tmp_path / "other" / name).write_text("")
    assert paths(Scanner(tmp_path / "other").scan().tree) == [b"a"]


def test_info_exclude_of_a_submodule_applies(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "modules/sub/info").mkdir(parents=True)
    (tmp_path / "modules/sub/info/exclude").write_text("secret\n")
    (tmp_path / "sub/.git").write_text("gitdir: ../modules/sub\n")
    for name in ("secret", "a"):
        (tmp_path / "sub" / name).write_text("")
    assert paths(Scanner(tmp_path / "sub").scan().tree) == [b"a"]


def matches(pattern: bytes, path: bytes) -> bool:
    regex = compile_wildmatch(pattern)
    return regex is not None and regex.fullmatch(path) is not None


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        (b"*.py", b"a.py"),
        (b"a/*/b", b"a/x/b"),
        (b"**/b", b"b"),
        (b"**/b", b"x/y/b"),
        (b"a/**", b"a/x/y"),
        (b"a/**/b", b"a/b"),
        (b"a/***/b", b"a/x/y/b"),
        (b"[[:digit:][:upper:]]", b"7"),
        (b"[]-]", b"]"),
        (b"[a-c-e]", b"-"),
        (b"[^a]", b"b"),
        (b"[\\]]", b"]"),
        (b"[[:x]", b":"),
        (b"\\*", b"*"),
        (b"?", b"\n"),
    ],
)
def test_pattern_matches(pattern: bytes, path: bytes) -> None:
    assert matches(pattern, path)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        (b"a*b", b"a/b"),
        (b"a**/b", b"ab"),
        (b"a/**", b"a"),
        (b"?", b"/"),
        (b"[!a]", b"/"),
        (b"[[:digit:]]", b"x"),
        (b"[a-c]", b"-"),
        (b"\\*", b"x"),
    ],
)
def test_pattern_does_not_match(pattern: bytes, path: bytes) -> None:
    assert not matches(pattern, path)


@pytest.mark.parametrize("pattern", [b"[", b"[a", b"[]", b"[[:nothing:]]", b"[/]", b"a\\", b"[a\\"])
def test_a_malformed_pattern_matches_nothing(pattern: bytes) -> None:
    assert compile_wildmatch(pattern) is None


@pytest.mark.parametrize(
    ("lines", "path", "covered"),
    [
        ((b"/a",), b"a/b/c", True),  # a copy may begin inside an ignored directory
        ((b"/a", b"!/a/b"), b"a/b/c", False),
        ((b"!/a/b", b"/a"), b"a/b/c", True),
        ((b"/*", b"!/keep"), b"keep/x", False),
        ((b"a/",), b"a", False),
        ((b"a/",), b"a/b", True),
        ((b"# a", b"b "), b"a", False),
        ((b"**/secret",), b"sub/secret", True),
    ],
)
def test_the_last_line_about_a_path_or_a_directory_above_it_decides(
    lines: tuple[bytes, ...], path: bytes, covered: bool
) -> None:
    assert Patterns.of(lines).cover(path, directory=False) is covered
