"""Finding a running job by what a person types."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshgate.errors import JobError, JobNotRunning
from meshgate.jobs import find, registry
from meshgate.jobs.find import find_job, find_local
from meshgate.jobs.registry import LocalEntry
from meshgate_processes.identity import identify_process


def entry(apply_id: str, directory: str) -> LocalEntry:
    process = identify_process(os.getpid())
    assert process is not None
    return LocalEntry(
        apply_id=apply_id,
        kind="ProcessJob",
        meshes={"workers": 2},
        url="ws://127.0.0.1:1",
        pid=process.pid,
        started=process.started,
        directory=directory,
        created=1.0,
        token="secret",
    )


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[LocalEntry]:
    """Three jobs, one of them started in the working directory."""
    entries = [entry("aa1", "/elsewhere"), entry("aa2", "/elsewhere"), entry("bb1", str(tmp_path))]
    monkeypatch.setattr(registry, "entries", lambda: iter(entries))
    monkeypatch.chdir(tmp_path)
    return entries


@pytest.mark.usefixtures("running")
def test_a_job_is_found_by_the_beginning_of_its_id() -> None:
    assert find_local("aa2").apply_id == "aa2"
    job = find_job("b")
    assert (job.apply_id, job.active) == ("bb1", True)
    assert str(job._dialer()) == "the gateway at ws://127.0.0.1:1"


def test_without_a_name_it_is_the_one_of_this_directory_or_the_only_one(running: list[LocalEntry]) -> None:
    assert find_local(None).apply_id == "bb1"
    running.pop()
    with pytest.raises(JobError, match="2 jobs run on this machine: name one; run `meshgate ls`"):
        find_local(None)
    running.pop()
    assert find_local(None).apply_id == "aa1"
    running.pop()
    with pytest.raises(JobNotRunning, match="no job runs on this machine"):
        find_local(None)


@pytest.mark.usefixtures("running")
def test_an_ambiguous_or_unknown_name_is_an_error() -> None:
    with pytest.raises(JobError, match="2 job ids begin with 'aa'"):
        find_job("aa")
    with pytest.raises(JobNotRunning, match="no job id begins with 'cc', and there is no such job file"):
        find_job("cc")
    with pytest.raises(JobNotRunning, match=r"there is no job file \./nowhere"):
        find_job("./nowhere")


@pytest.mark.parametrize("namespace", [None, "team"])
def test_an_empty_name_is_not_the_only_job(running: list[LocalEntry], namespace: str | None) -> None:
    del running[1:]
    with pytest.raises(JobError, match="is empty; run `meshgate ls`"):
        find_job("", namespace)
    with pytest.raises(JobError, match="is empty; run `meshgate ls`"):
        find_local("")


def test_a_directory_is_not_a_job_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="is not a regular file"):
        find_job(str(tmp_path))


def test_a_job_in_a_cluster_needs_a_name() -> None:
    with pytest.raises(JobError, match="run `meshgate ls -n team`"):
        find_job(None, "team")


def test_a_job_file_is_found_by_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Loaded:
        active, running, _cache_file = True, True, ""

        def _is_running(self) -> bool:
            return self.running

    loaded = Loaded()
    monkeypatch.setattr(find, "job_load", lambda path: loaded)
    path = tmp_path / "job"
    assert find_job(str(path)) is loaded
    assert loaded._cache_file == str(path)  # kill() removes it
    loaded.running = False
    with pytest.raises(JobNotRunning, match="has ended"):
        find_job(str(path))
