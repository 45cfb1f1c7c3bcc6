"""The language check finds planted phrases, with the right line, and passes plain text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lint import plain_english
from tests.lint.plain_english import findings

PLANTED = '''
"""Sends messages.

Who posts more is to wait.
"""

LIMIT = 4  # the caller is
# told when the limit
# is reached


def test_nobody_is_left() -> None:
    raise ValueError("a sync message that "
                     f"is none: {LIMIT}")
'''

CLEAN = '''
"""Sends messages.

Blocks while the send queue is over its limit. Returns ``None`` if there is none. Who may call this? Any thread.
"""

LIMIT = None  # x is None; the limit is to be sure


def test_variables_are_not_prose(told: object) -> None:
    """A session goes on stream 0."""
'''


def test_phrases_are_found_in_docstrings_comments_literals_and_test_names() -> None:
    found = [(finding.line, finding.phrase) for finding in findings("a.py", PLANTED)]
    assert found == [(4, "Who"), (8, "told"), (12, "nobody"), (14, "is none")]


def test_clean_python_passes() -> None:
    found = [finding.phrase for finding in findings("a.py", CLEAN)]
    assert found == []


def test_markdown_is_checked_outside_code() -> None:
    text = "# Who may\n\nUse `whoever()`.\n\n```python\n# told\n```\n\n- Who asks is\n  told.\n"
    assert [(finding.line, finding.phrase) for finding in findings("a.md", text)] == [
        (1, "Who"), (9, "Who"), (10, "told"),
    ]  # fmt: skip


def test_comments_of_other_files_are_checked() -> None:
    assert [finding.line for finding in findings("a.yaml", "# made anew\na: anew\n")] == [1]


def test_a_finding_says_where_and_what_to_write() -> None:
    (finding,) = findings("docs/a.md", "The hosts are made anew.")
    assert str(finding) == "docs/a.md:1: 'anew': write again, from scratch, a new ..."


def test_phrases_that_span_lines_are_found_at_their_first_line() -> None:
    assert [(finding.line, finding.phrase) for finding in findings("a.md", "x\nNone\nwhere y")] == [(2, "None where")]


@pytest.mark.parametrize(("phrase", "advice"), plain_english.PHRASES)
def test_every_phrase_compiles_and_has_advice(phrase: str, advice: str) -> None:
    re.compile(phrase)
    assert advice


def test_the_exit_status_is_for_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.md").write_text("All is told.\n")
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    monkeypatch.setattr(plain_english, "tracked", lambda paths: ["a.md"])
    assert plain_english.main([]) == 1
    assert plain_english.main(["--count"]) == 0
    (tmp_path / "a.md").write_text("Everything is reported.\n")
    assert plain_english.main([]) == 0
