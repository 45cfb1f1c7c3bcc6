"""Single cases; test_ignore.py compares arbitrary ones with git."""

from __future__ import annotations

import pytest

from meshgate_sync.tree.wildmatch import compile_wildmatch


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
