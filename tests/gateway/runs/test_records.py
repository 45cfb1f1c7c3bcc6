"""The output of a run on disk, within its limit, and the status that its files add up to."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from meshgate_gateway.runs.records import OutputWriter, RunDirectory, RunRecord, Submitted, read_output
from meshgate_wire.status import JoinableJob, Submission


@pytest.fixture
def writer(tmp_path: Path) -> OutputWriter:
    return OutputWriter(tmp_path, segment=10, limit=30)


def read_all(directory: Path, after: int = 0, limit: int = 7) -> tuple[int, bytes]:
    """What a reader gets that reads in parts, and at which byte the first of them began."""
    start, data = read_output(directory, after, limit)
    whole = data
    while data:
        after, data = read_output(directory, start + len(whole), limit)
        assert after == start + len(whole)
        whole += data
    return start, whole


def test_output_is_read_as_it_was_written(writer: OutputWriter, tmp_path: Path) -> None:
    for part in (b"one", b"", b" and two", b" three and more"):
        writer.write(part)
    assert read_all(tmp_path) == (0, b"one and two three and more")
    assert read_all(tmp_path, after=10) == (10, b"o three and more")
    assert read_output(tmp_path, 1000) == (1000, b"")


def test_without_output_there_is_nothing_to_read(tmp_path: Path) -> None:
    assert read_output(tmp_path, 5) == (5, b"")


def test_only_the_newest_output_is_kept(writer: OutputWriter, tmp_path: Path) -> None:
    written = b"".join(b"%09d\n" % number for number in range(100))
    for byte in range(0, len(written), 3):
        writer.write(written[byte : byte + 3])
    start, kept = read_all(tmp_path)
    assert written[start:] == kept
    assert 20 <= len(kept) <= 30
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 30


def test_output_that_cannot_be_written_is_counted(tmp_path: Path) -> None:
    writer = OutputWriter(tmp_path)
    writer.write(b"before")
    hidden = tmp_path.rename(tmp_path.with_name("hidden"))
    writer.write(b"lost")
    writer.write(b" too")
    hidden.rename(tmp_path)
    writer.write(b"after")
    writer.write(b", later")
    noted = b"before\n[meshgate: 8 bytes of output could not be written]\nafter, later"
    assert read_all(tmp_path)[1] == noted


def test_a_run_is_described_by_its_files(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "night")
    submission = Submission(name="night", command=("a", "b"), version="0" * 64, restarts=2, job=JoinableJob(kind="K"))
    run.create(Submitted(submission=submission, owner="ann", time=time.time() - 60, variables={"TOKEN": "secret"}))
    status = run.status(has_runner=True)
    assert (status.name, status.state, status.live, status.news) == ("night", "starting", True, False)
    assert (status.command, status.owner, status.max_restarts) == (("a", "b"), "ann", 2)
    assert 60 <= status.age < 120

    ended = RunRecord(state="failed", started=100.0, ended=130.0, exit_code=3, reason="exited with code 3", pid=7)
    run.write_record(ended)
    status = run.status(has_runner=True)
    assert (status.live, status.seconds, status.exit_code, status.pid, status.news) == (False, 30.0, 3, None, True)
    run.note_reported()
    assert not run.status(has_runner=True).news


def test_a_run_that_has_not_ended_is_lost_without_its_runner(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "night")
    submission = Submission(name="night", command=("a",), version="0" * 64, job=JoinableJob(kind="K"))
    run.create(Submitted(submission=submission, owner="ann", time=time.time(), variables={}))
    run.write_record(RunRecord(state="running", started=100.0, pid=7))
    status = run.status(has_runner=False)
    assert (status.state, status.live, status.pid, status.news) == ("lost", False, None, True)
    assert "its runner is gone" in status.reason


def test_the_token_of_the_gateway_is_for_the_owner_only(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "night")
    submission = Submission(name="night", command=("a",), version="0" * 64, job=JoinableJob(kind="K"))
    run.create(Submitted(submission=submission, owner="ann", time=0, variables={"TOKEN": "secret"}))
    assert run.path.stat().st_mode & 0o077 == 0
    assert (run.path / "submission").stat().st_mode & 0o077 == 0


def test_a_request_to_stop_has_a_time(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.stop_grace() is None
    run.request_stop(2.5)
    assert run.stop_grace() == 2.5
