from __future__ import annotations

import ast
from pathlib import Path

from tests.conformance.upstream import table
from tests.conformance.upstream.applicability import Verdict
from tests.conformance.upstream.running import Outcome, Results, stamp
from tests.conformance.upstream.table import File, Row, full_table, rows_of, share, summary
from tests.conformance.upstream.tree import find_tests

SOURCE = "".join(f"def test_{name}(): ...\n" for name in ("both", "here", "direct", "rust", "later"))


def rows(tmp_path: Path) -> list[Row]:
    tests = {test.name: test for test in find_tests(ast.parse(SOURCE), "test_a.py")}
    results = Results(tmp_path / "results.jsonl")
    for name, side, outcome in (
        ("both", "direct", Outcome("passed")),
        ("both", "gateway", Outcome("passed")),
        ("here", "direct", Outcome("passed")),
        ("here", "gateway", Outcome("failed", "assert a | b")),
        ("direct", "direct", Outcome("skipped", "no fuse")),
    ):
        results.add(stamp(tests[f"test_{name}"], side, outcome, "abc1234", 1))
    verdicts = {test: Verdict("rust", "a.PythonTask") if "rust" in name else Verdict() for name, test in tests.items()}
    return rows_of([File("test_a.py", verdicts), File("test_empty.py", {})], results)


def test_each_test_and_each_file_has_a_row_with_its_reason(tmp_path: Path) -> None:
    found = {row["test"]: (row["state"], row["reason"]) for row in rows(tmp_path)}
    assert found == {
        "test_both": ("passed on both", ""),
        "test_here": ("failed here", "assert a | b"),
        "test_direct": ("does not pass on direct Monarch", "skipped: no fuse"),
        "test_rust": ("not applicable", "tests Monarch's Rust bindings: a.PythonTask"),
        "test_later": ("not run", ""),
        "": ("not applicable", "holds no tests"),
    }


def test_the_share_counts_what_passes_directly(tmp_path: Path) -> None:
    assert share(rows(tmp_path)) == (1, 2)


def test_the_summary_has_the_numbers_of_each_file_and_names_the_failures(tmp_path: Path) -> None:
    text = summary("0.7.0", rows(tmp_path))
    assert "of 5 tests, 1 does not apply" in text
    assert "1 passes through a gateway, 50.0 %. 1 was not run." in text
    assert "on commit abc1234." in text
    assert "| `test_a.py` | 5 | 1 | 1 | 1 | 1 |" in text
    assert "| `test_empty.py` | 0 | 0 | 0 | 0 | 0 |" in text
    assert "| tests Monarch's Rust bindings | 1 |" in text
    assert "| `test_a.py::test_here` | assert a \\| b |" in text


def test_a_failure_by_design_is_a_failure_with_its_reason(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(table.BY_DESIGN, "test_here", "the program runs no actors")
    found = rows(tmp_path)
    assert share(found) == (1, 2)
    assert "| `test_a.py::test_here` | the program runs no actors |" in summary("0.7.0", found)


def test_the_full_table_lists_every_test(tmp_path: Path) -> None:
    text = full_table("0.7.0", rows(tmp_path))
    for name in ("both", "here", "direct", "rust", "later"):
        assert f"| `test_{name}` |" in text
