"""Slurm's reports, in the JSON of its releases."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from meshgate_slurm.status import UNKNOWN, JobStatus, expand, last_lines, missing_log, parse_jobs, parse_node, read_end


def status(**facts: Any) -> JobStatus:
    return parse_jobs(json.dumps({"jobs": [{"job_id": 7, **facts}]}))[7]


def number(value: int) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": value}


@pytest.mark.parametrize("new", [True, False], ids=["24.11", "21.08"])
def test_a_running_job(new: bool) -> None:
    wrap = number if new else int
    found = status(
        job_state=["RUNNING"] if new else "RUNNING",
        nodes="n[1-2]",
        time_limit=wrap(60),
        end_time=wrap(2000000000),
        preempt_time=wrap(0),
        partition="gpu",
        account="physics",
    )
    assert (found.partition, found.account, found.qos) == ("gpu", "physics", "")
    assert (found.state, found.nodes, found.time_limit, found.end_time) == ("RUNNING", ("n1", "n2"), 60, 2e9)
    assert found.preempted_at is None
    assert status(preempt_time=wrap(2000000000)).preempted_at == 2e9
    assert not found.pending
    assert not found.ended


@pytest.mark.parametrize("limit", [4294967295, 4294967294, {"set": False, "infinite": True, "number": 0}])
def test_a_job_without_a_time_limit_has_an_end_only_if_it_is_preempted(limit: Any) -> None:
    """Slurm says that it ends in a year."""
    now = int(time.time())
    facts = {"job_state": ["RUNNING"], "end_time": number(now + 365 * 86400)}
    found = status(**facts, time_limit=limit)
    assert (found.time_limit, found.seconds_left()) == (None, None)
    assert status(**facts, time_limit=number(525600)).seconds_left() is not None
    preempted = status(job_state=["RUNNING"], end_time=now + 60, preempt_time=now, time_limit=limit)
    assert 0 < (preempted.seconds_left() or 0) <= 60


def test_a_job_that_waits_says_why_and_when_it_starts() -> None:
    found = status(job_state=["PENDING"], state_reason="Resources", start_time=number(2000000000))
    assert (found.pending, found.ended, found.expected_start) == (True, False, 2e9)
    assert found.why_pending() == "Resources: waits for nodes to become free"
    assert status(job_state=["PENDING"], state_reason="None").why_pending() == "not considered yet"


@pytest.mark.parametrize(
    ("reason", "meaning"),
    [
        ("QOSMaxGRESPerUser", ": a limit of its QOS is reached"),
        ("AssocGrpCpuLimit", ": a limit of its account is reached"),
        ("ReqNodeNotAvail, UnavailableNodes:n4", ": a node that it needs is not available; `sinfo -R` says why"),
        ("QOSNotAllowed", ""),
        ("MadeUp", ""),
    ],
)
def test_a_reason_for_waiting_is_explained_if_it_is_known(reason: str, meaning: str) -> None:
    assert status(job_state=["PENDING"], state_reason=reason).why_pending() == f"{reason}{meaning}"


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"job_state": ["TIMEOUT"], "time_limit": number(5)}, "TIMEOUT: it reached its time limit of 5 min"),
        ({"job_state": ["PREEMPTED", "COMPLETING"]}, "PREEMPTED: a job of another partition or QOS took its nodes"),
        ({"job_state": ["CANCELLED"]}, "CANCELLED: a user or an administrator cancelled it"),
        ({"job_state": ["NODE_FAIL"], "state_reason": "NodeDown"}, "NODE_FAIL: a node failed"),
        ({"job_state": ["MADE_UP"]}, "MADE_UP: Slurm gives no explanation"),
        (
            {"job_state": ["FAILED"], "state_reason": "LaunchFailure", "exit_code": {"return_code": number(3)}},
            "FAILED: its batch script failed (reason LaunchFailure, exit code 3)",
        ),
        (
            {"job_state": "FAILED", "exit_code": {"return_code": 0, "signal": {"signal_id": 9}}},
            "FAILED: its batch script failed (signal 9)",
        ),
    ],
)  # fmt: skip
def test_a_job_that_has_ended_says_why(facts: dict[str, Any], why: str) -> None:
    found = status(**facts)
    assert found.ended
    assert found.why_ended() == why


def test_a_job_that_slurm_has_forgotten_has_ended() -> None:
    found = JobStatus(job_id=7, state=UNKNOWN)
    assert found.ended
    assert found.describe_end() == "Slurm job 7 has ended, and Slurm no longer knows why"
    failed = JobStatus(job_id=7, state="NODE_FAIL", node_problem="n1 (DOWN: Not responding)")
    assert failed.describe_end() == "Slurm ended job 7: NODE_FAIL: a node failed: n1 (DOWN: Not responding)"
    assert "Slurm ended job 7: TIMEOUT" in JobStatus(job_id=7, state="TIMEOUT").describe_end()


def test_nodes_that_boot_are_still_waited_for() -> None:
    assert status(job_state=["RUNNING", "CONFIGURING"]).pending


def test_what_is_no_report_is_refused() -> None:
    with pytest.raises(ValueError, match="no list of jobs"):
        parse_jobs("[]")


def test_the_state_of_a_node_has_its_reason() -> None:
    down = {"nodes": [{"state": ["DOWN", "NOT_RESPONDING"], "reason": "Not responding"}]}
    assert parse_node(json.dumps(down)) == ("DOWN+NOT_RESPONDING", "Not responding")
    assert parse_node('{"nodes": [{"state": "IDLE", "reason": ""}]}') == ("IDLE", "")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10],login", ["n08", "n09", "n10", "login"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("gpu-[1,3-4]-a", ["gpu-1-a", "gpu-3-a", "gpu-4-a"]),
    ],
)
def test_lists_are_expanded_in_order(text: str, names: list[str]) -> None:
    assert list(expand(text)) == names


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]", "n]1", "n[0-99999999]"])
def test_malformed_and_huge_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        expand(text)


def test_the_last_lines_of_a_long_file_are_shown_below_a_title(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(5000)))
    title, *lines = last_lines(read_end(log), "the worker on n1").strip().splitlines()
    assert title == "The last lines of the worker on n1:"
    assert lines == [f"  line {number}" for number in range(4988, 5000)]


def test_the_last_lines_of_a_file_begin_with_a_whole_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"this is line {number} of the log, which is long: {'x' * 400}\n" for number in range(100)))
    lines = last_lines(read_end(log), "the gateway").strip().splitlines()[1:]
    assert [line[:20] for line in lines] == [f"  this is line {number} of" for number in range(96, 100)]
    assert read_end(log).startswith("this is line ")


def test_a_file_that_is_missing_or_empty_adds_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert last_lines(read_end(tmp_path / "missing") + read_end(tmp_path / "empty"), "the gateway") == ""


@pytest.mark.parametrize(
    ("state", "there", "asks"), [("FAILED", False, True), ("FAILED", True, False), ("CANCELLED", False, False)]
)
def test_only_a_job_that_failed_lacks_its_log(tmp_path: Path, state: str, there: bool, asks: bool) -> None:
    log = tmp_path / "batch.log"
    if there:
        log.touch()
    assert (str(log) in missing_log(JobStatus(job_id=7, state=state), str(log))) is asks


def test_a_log_whose_path_is_unknown_is_not_missed() -> None:
    assert missing_log(JobStatus(job_id=7, state="FAILED"), "") == ""
