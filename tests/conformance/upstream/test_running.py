from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest

from tests.conformance.upstream import running
from tests.conformance.upstream.running import Outcome, Results, prepare, read_report, run_file, stamp
from tests.conformance.upstream.tree import Tree, copy_tests, find_tests

ENDED = "the process ended with status 3"


def entry(test: str, when: str, outcome: str = "", error: str = "") -> str:
    identity = f"tests/test_a.py::{test}" if test else ""
    return json.dumps({"id": identity, "when": when, "outcome": outcome, "error": error, "seconds": 1.0})


def outcomes(*entries: str) -> tuple[dict[str, str], dict[str, str]]:
    over, interrupted = read_report(entries, ENDED)
    return {name: each.outcome for name, each in over.items()}, {name: each.error for name, each in interrupted.items()}


def test_a_test_that_was_over_without_a_complaint_passed() -> None:
    assert outcomes(entry("test_a", "start"), entry("test_a", "finish")) == ({"test_a": "passed"}, {})


def test_a_failure_of_one_parameter_or_of_the_teardown_is_one_of_the_test() -> None:
    first, second = "test_a[1]", "test_a[a::b[2]"
    passed = [entry(first, "start"), entry(first, "finish")]
    for when in ("setup", "call", "teardown"):
        failed = [entry(second, "start"), entry(second, when, "failed", "E x"), entry(second, "finish")]
        assert outcomes(*passed, *failed) == outcomes(*failed, *passed) == ({"test_a": "failed"}, {})


def test_a_test_is_skipped_only_if_it_is_with_every_parameter() -> None:
    name = "test_a[1]"
    skipped = [entry(name, "start"), entry(name, "setup", "skipped", "no fuse"), entry(name, "finish")]
    assert outcomes(*skipped) == ({"test_a": "skipped"}, {})


def test_the_test_with_which_the_process_ended_is_the_one_that_ended_it() -> None:
    report = [entry("T::test_a", "start"), entry("T::test_a", "finish"), entry("T::test_b[1]", "start")]
    assert outcomes(*report) == ({"T::test_a": "passed"}, {"T::test_b": f"it ended the program: {ENDED}"})
    done = [entry("T::test_b[0]", "start"), entry("T::test_b[0]", "finish")]
    assert outcomes(*done, *report)[0] == {"T::test_a": "passed"}


def test_the_error_is_the_line_that_says_what_was_raised() -> None:
    text = "tests/test_a.py:3: in test_a\n    assert x\nE   AssertionError: x is 3\nE   assert False"
    over, _ = read_report([entry("test_a", "call", "failed", text), entry("test_a", "finish")], ENDED)
    assert over["test_a"].error == "AssertionError: x is 3"


def test_results_are_kept_and_the_last_of_a_test_counts(tmp_path: Path) -> None:
    (test,) = find_tests(ast.parse("def test_a(): ..."), "test_a.py")
    results = Results(tmp_path / "of" / "results.jsonl")
    assert results.get(test.id, "direct") is None
    for number, outcome in enumerate(("failed", "passed"), 1):
        results.add(stamp(test, "direct", Outcome(outcome), "abc", number))
    for each in (results, Results(tmp_path / "of" / "results.jsonl")):
        found = each.get(test.id, "direct")
        assert found is not None
        assert (found.outcome, found.commit, found.runs) == ("passed", "abc", 2)
        assert each.get(test.id, "gateway") is None


@pytest.mark.parametrize(
    ("status", "ended"), [(None, f"no test began or ended for {running.SILENT_SECONDS} s"), (3, ENDED)]
)
def test_a_process_may_run_as_long_as_its_tests_go_on(tmp_path: Path, status: int | None, ended: str) -> None:
    report = tmp_path / "report"

    class Process:
        """One whose tests go on for three times the limit, and which then ends with ``status`` or hangs."""

        waits = 0

        def wait(self, timeout: float) -> int:
            self.waits += 1
            if self.waits <= 3:
                with report.open("a") as file:
                    file.write("x")
            elif status is not None:
                return status
            raise subprocess.TimeoutExpired("tests", timeout)

    process = Process()
    assert running._wait(process, report) == ended  # type: ignore[arg-type]
    assert process.waits == 4


RUDE = """
import os
import signal
import sys
import pytest
from isolate_in_subprocess import isolate_in_subprocess

ran = []

def test_first():
    ran.append("first")

def test_that_exits():
    os._exit(3)

def test_that_interrupts():
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()

def test_that_leaves_pytest():
    pytest.exit("enough")

def test_that_needs_a_process_of_its_own():
    assert ran == []

@isolate_in_subprocess
def test_that_is_not_isolated():
    assert False

def test_that_fails():
    assert 1 == 2

@pytest.mark.skip(reason="not here")
def test_that_is_skipped(): ...

@pytest.mark.timeout(0.001)
def test_last():
    for _ in range(100_000):
        pass
"""
ISOLATE = "def isolate_in_subprocess(test):\n    return lambda: None\n"


def test_a_test_that_interrupts_the_program_does_not_end_the_run_of_the_others(tmp_path: Path) -> None:
    """Takes seconds: each of seven tests starts a pytest."""
    tests = tmp_path / "source" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_a.py").write_text(RUDE)
    (tests / "isolate_in_subprocess.py").write_text(ISOLATE)
    copy = copy_tests(Tree(tests, ""), tmp_path / "direct", through_gateway=False)
    prepare(copy)
    listed = list(find_tests(ast.parse(RUDE), "test_a.py"))
    found = {test.name.removeprefix("test_"): outcome for test, outcome in run_file(listed, copy)}
    assert {name: outcome.outcome for name, outcome in found.items()} == {
        "first": "passed",
        "that_exits": "failed",
        "that_interrupts": "failed",
        "that_leaves_pytest": "failed",
        "that_needs_a_process_of_its_own": "passed",
        "that_is_not_isolated": "passed",
        "that_fails": "failed",
        "that_is_skipped": "skipped",
        "last": "passed",
    }
    assert found["that_exits"].error == "it ended the program: the process ended with status 3"
    assert found["that_interrupts"].error == "it ended the program: the process ended with status 2"
    assert found["that_fails"].error == "assert 1 == 2"
    assert found["that_is_skipped"].error == "Skipped: not here"
    assert "assert 1 == 2" in next((copy.parent / "output").glob("*that_fails.txt")).read_text()
