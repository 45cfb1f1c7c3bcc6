"""What a user does wrong, or has happen: each is told at once, in words that say what to do."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import meshgate as kt
from meshgate import Actor, MeshgateError, ProcessJob, PullFailed, current_client, endpoint
from tests.end_to_end.actors import Worker

GRACE = 60.0
SOON = 5 + 3  # seconds; three of them for a busy machine


class Unmade(Actor):
    def __init__(self) -> None:
        raise ValueError("not like this")

    @endpoint
    def ping(self) -> str:
        return "pong"


def host_pids(job: Any) -> list[int]:
    """The worker hosts of a job on this machine, in rank order."""
    gateway = job._gateway.record.pid
    children = subprocess.run(
        ["ps", "--ppid", str(gateway), "-o", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout
    return sorted(int(line.split()[0]) for line in children.splitlines() if "-m meshgate_worker" in line)


def test_a_spawn_on_a_killed_host_is_refused_soon_and_the_other_host_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kt, "unhandled_fault_hook", lambda failure: None)
    with ProcessJob({"workers": 2}) as job:
        hosts = job.state(cached_path=None).workers
        hosts.spawn_procs().spawn("first", Worker).rank.call().get(timeout=GRACE)
        os.kill(host_pids(job)[1], signal.SIGKILL)
        for _ in range(2):  # while its end is being noticed, and afterwards
            begun = time.monotonic()
            with pytest.raises(MeshgateError, match=r"workers-1: the host .* was killed by SIGKILL"):
                hosts.spawn_procs().spawn("refused", Worker).rank.call().get(timeout=GRACE)
            assert time.monotonic() - begun < SOON
        left = hosts.slice(hosts=slice(0, 1)).spawn_procs().spawn("left", Worker)
        assert list(left.rank.call().get(timeout=GRACE).values()) == [0]


def test_files_of_a_host_that_is_left_can_be_pulled_and_the_job_asked_for_its_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kt, "unhandled_fault_hook", lambda failure: None)
    (tmp_path / "checkpoint").write_text("weights")
    with ProcessJob({"workers": 2}) as job:
        hosts = job.state(cached_path=None).workers
        trainers = hosts.spawn_procs().spawn("trainers", Worker)
        trainers.rank.call().get(timeout=GRACE)
        os.kill(host_pids(job)[1], signal.SIGKILL)
        with pytest.raises(MeshgateError, match="workers-1"):
            trainers.slice(hosts=1).rank.call().get(timeout=GRACE)
        job.pull(str(tmp_path / "checkpoint"), tmp_path / "here", ranks=0)
        assert (tmp_path / "here").read_text() == "weights"
        again = job.state(cached_path=None).workers
        assert again == hosts
        left = again.slice(hosts=slice(0, 1)).spawn_procs().spawn("left", Worker)
        assert list(left.rank.call().get(timeout=GRACE).values()) == [0]
        with pytest.raises(PullFailed, match=r"workers-1: the host .* was killed by SIGKILL"):
            job.pull(str(tmp_path / "checkpoint"), tmp_path / "there", ranks=1)


@pytest.mark.parametrize("shutdown", [False, True])
def test_stopping_hosts_through_one_mesh_stops_what_was_spawned_through_another_without_a_fault(
    monkeypatch: pytest.MonkeyPatch, shutdown: bool
) -> None:
    faults: list[kt.MeshFailure] = []
    monkeypatch.setattr(kt, "unhandled_fault_hook", faults.append)
    with ProcessJob({"workers": 2}) as job:
        hosts = job.state(cached_path=None).workers
        workers = hosts.spawn_procs().spawn("workers", Worker)
        workers.rank.call().get(timeout=GRACE)
        other = current_client().attach_hosts("workers", 2)
        (other.shutdown() if shutdown else other.stop()).get(timeout=GRACE)
        with pytest.raises(MeshgateError, match="was stopped"):
            workers.rank.call().get(timeout=GRACE)
        if not shutdown:
            again = hosts.spawn_procs().spawn("again", Worker)
            assert len(again.rank.call().get(timeout=GRACE)) == 2
            hosts.stop().get(timeout=GRACE)
    assert not faults


def test_a_constructor_that_raises_is_told_with_its_traceback_and_no_stack_of_monarchs_own(hosts: Any) -> None:
    with pytest.raises(MeshgateError, match="ValueError: not like this") as caught:
        hosts.spawn_procs().spawn("unmade", Unmade).ping.call().get(timeout=GRACE)
    assert "Stack backtrace" not in str(caught.value)
    assert "tokio" not in str(caught.value)


@pytest.mark.parametrize("name", [None, 3, "a\udc80"])
def test_a_name_that_is_no_text_is_refused_at_the_spawn(hosts: Any, procs: Any, name: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"a mesh's name is text, not"):
        procs.spawn(name, Worker)
    with pytest.raises((TypeError, ValueError), match=r"a mesh's name is text, not"):
        hosts.spawn_procs(name=name or 3)
