"""The first rank that failed is reported, with its exception and its last output."""

from __future__ import annotations

import pytest

from meshgate.jobs.spmd.failures import RankReport, exception_of, failure_of

TRACEBACK = """some output
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
    raise ValueError("bad batch")
ValueError: bad batch
"""


def report(rank: int, code: int | None = 0, *, stopped: bool = False, tail: str = "", error: str = "") -> RankReport:
    return RankReport(rank, f"workers-{rank // 2}", code, stopped, tail, error, "")


def test_a_run_whose_ranks_all_succeed_has_no_failure() -> None:
    assert failure_of([report(0), report(1)]) is None


def test_a_rank_that_was_asked_to_end_and_succeeded_is_no_failure_of_its_own() -> None:
    failure = failure_of([report(0, 0, stopped=True), report(1, 2)])
    assert failure is not None
    assert "ended by this failure" not in str(failure)


def test_the_first_to_fail_is_reported_and_the_others_are_summarised() -> None:
    failure = failure_of(
        [report(2, -15, stopped=True), report(3, 1, tail=TRACEBACK), report(0, 1), report(1, None, stopped=True)]
    )
    assert failure is not None
    assert (failure.rank, failure.host, failure.exit_code) == (3, "workers-1", 1)
    assert failure.exception == "ValueError: bad batch"
    assert failure.log_tail.endswith("ValueError: bad batch")
    assert failure.exit_codes == {0: 1, 1: None, 2: -15, 3: 1}
    first_line = str(failure).splitlines()[0]
    assert first_line == (
        "rank 3 on workers-1 failed with exit code 1: ValueError: bad batch. rank 0 failed too; ranks 1-2 ended by "
        "this failure. Last output of rank 3:"
    )


def test_the_first_to_fail_did_not_end_by_its_own_failure() -> None:
    failure = failure_of([report(0, -15, stopped=True), report(1, 1, stopped=True, tail=TRACEBACK)])
    assert failure is not None
    assert failure.rank == 1
    assert ". rank 0 ended by this failure" in str(failure)


def test_the_message_of_torchs_error_file_comes_before_the_output() -> None:
    failure = failure_of([report(0, 1, tail=TRACEBACK, error="RuntimeError: CUDA out of memory\nmore")])
    assert failure is not None
    assert failure.exception == "RuntimeError: CUDA out of memory"


LOST = "Traceback (most recent call last):\nRuntimeError: [gloo] Connection closed by peer [127.0.0.1]:9393\n"


@pytest.mark.parametrize(
    "cause", [report(1, 1, tail=TRACEBACK), report(1, -9), report(1, -15, stopped=True, tail=TRACEBACK)]
)
def test_a_rank_that_only_lost_its_connection_is_not_the_cause(cause: RankReport) -> None:
    failure = failure_of([report(0, 1, tail=LOST), cause, report(2, -15, stopped=True)])
    assert failure is not None
    assert failure.rank == 1


def test_a_rank_that_only_lost_its_connection_is_reported_if_no_other_failed() -> None:
    failure = failure_of([report(1, -15, stopped=True), report(0, 1, tail=LOST)])
    assert failure is not None
    assert failure.rank == 0


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "was killed by SIGKILL, which is how the kernel ends a process if the host or job is out of memory"),
        (-11, "was killed by SIGSEGV"),
        (-60, "was killed by signal 60"),
        (None, "was not started"),
    ],
)
def test_a_signal_is_named(code: int | None, text: str) -> None:
    assert text in str(failure_of([report(0, code)]))


def test_only_the_end_of_long_output_is_quoted() -> None:
    failure = failure_of([report(0, 1, tail="\n".join(f"line {n}" for n in range(500)))])
    assert failure is not None
    assert failure.log_tail.splitlines()[0] == "line 470"


def test_log_files_are_named() -> None:
    logs = RankReport(1, "workers-0", 1, False, "", "", "/logs/run_1/attempt_0/1")
    assert "log files on workers-0: /logs/run_1/attempt_0/1" in str(failure_of([logs]))


@pytest.mark.parametrize(
    ("output", "exception"),
    [
        (TRACEBACK, "ValueError: bad batch"),
        ("ValueError: not raised\n", ""),
        ("[rank1]: Traceback (most recent call last):\n[rank1]:   File 'x'\n[rank1]: ValueError: x\n", "ValueError: x"),
        ("Traceback (most recent call last):\n  File 'x'\nmodule.Error\n", "module.Error"),
        ("Traceback (most recent call last):\n  File 'x'\n", ""),
    ],
)
def test_the_exception_is_the_last_line_of_the_last_traceback(output: str, exception: str) -> None:
    assert exception_of(output) == exception
