"""Mistakes and lost hosts raise at once, with an error that says what happened."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import meshgate as kt
from meshgate import MeshgateError, ProcessJob, PullFailed, SupervisionError, current_client
from tests.end_to_end.actors import FailingInit, Worker
from tests.end_to_end.conftest import FaultsOf
from tests.end_to_end.test_code_recovery import host_processes

TIMEOUT = 120.0
PROMPT = 20.0  # seconds: it takes 3 on an idle machine, and Monarch's own timeouts are 30 or more


def test_a_spawn_on_a_killed_host_fails_promptly_and_the_other_host_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kt, "unhandled_fault_hook", lambda failure: None)
    with ProcessJob({"workers": 2}) as job:
        hosts = job.state(cached_path=None).workers
        hosts.spawn_procs().spawn("first", Worker).rank.call().get(timeout=TIMEOUT)
        os.kill(host_processes(job)[1], signal.SIGKILL)
        for _ in range(2):  # before and after the gateway notices the end of the host
            start = time.monotonic()
            procs = hosts.spawn_procs()
            with pytest.raises(SupervisionError, match=r"workers-1: the host .* was killed by SIGKILL"):
                procs.spawn("failing", Worker).rank.call().get(timeout=TIMEOUT)
            procs.stop().get(timeout=TIMEOUT)  # as a loop does that goes on after a loss
            assert time.monotonic() - start < PROMPT
        remaining = hosts.slice(hosts=slice(0, 1)).spawn_procs().spawn("remaining", Worker)
        assert list(remaining.rank.call().get(timeout=TIMEOUT).values()) == [0]


def test_after_a_host_died_files_of_the_other_can_be_pulled_and_state_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kt, "unhandled_fault_hook", lambda failure: None)
    (tmp_path / "checkpoint").write_text("weights")
    with ProcessJob({"workers": 2}) as job:
        hosts = job.state(cached_path=None).workers
        trainers = hosts.spawn_procs().spawn("trainers", Worker)
        trainers.rank.call().get(timeout=TIMEOUT)
        os.kill(host_processes(job)[1], signal.SIGKILL)
        with pytest.raises(MeshgateError, match="workers-1"):
            trainers.slice(hosts=1).rank.call().get(timeout=TIMEOUT)
        job.pull(str(tmp_path / "checkpoint"), tmp_path / "pulled", ranks=0)
        assert (tmp_path / "pulled").read_text() == "weights"
        again = job.state(cached_path=None).workers
        assert again == hosts
        remaining = again.slice(hosts=slice(0, 1)).spawn_procs().spawn("remaining", Worker)
        assert list(remaining.rank.call().get(timeout=TIMEOUT).values()) == [0]
        with pytest.raises(PullFailed, match=r"workers-1: the host .* was killed by SIGKILL"):
            job.pull(str(tmp_path / "checkpoint"), tmp_path / "there", ranks=1)


@pytest.mark.parametrize("shutdown", [False, True])
def test_stopping_hosts_stops_processes_of_every_mesh_on_them_without_a_fault(
    faults_of: FaultsOf, shutdown: bool
) -> None:
    faults = faults_of("stopping", "after")
    with ProcessJob({"workers": 2}) as job:
        hosts = job.state(cached_path=None).workers
        workers = hosts.spawn_procs().spawn("stopping", Worker)
        workers.rank.call().get(timeout=TIMEOUT)
        other = current_client().attach_hosts("workers", 2)
        (other.shutdown() if shutdown else other.stop()).get(timeout=TIMEOUT)
        with pytest.raises(MeshgateError, match="was stopped"):
            workers.rank.call().get(timeout=TIMEOUT)
        if not shutdown:
            again = hosts.spawn_procs().spawn("after", Worker)
            assert len(again.rank.call().get(timeout=TIMEOUT)) == 2
            hosts.stop().get(timeout=TIMEOUT)
    assert not faults


def test_the_error_of_a_constructor_has_no_native_stack_of_monarch(hosts: Any) -> None:
    with pytest.raises(MeshgateError, match="UserError: not today") as caught:
        hosts.spawn_procs().spawn("failing", FailingInit).ping.call().get(timeout=TIMEOUT)
    assert "Stack backtrace" not in str(caught.value)
    assert "tokio" not in str(caught.value)


@pytest.mark.parametrize("name", [None, 3, "a\udc80"])
def test_an_invalid_name_is_rejected_at_the_spawn(hosts: Any, procs: Any, name: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"the name of a mesh must be"):
        procs.spawn(name, Worker)
    with pytest.raises((TypeError, ValueError), match=r"the name of a mesh must be"):
        hosts.spawn_procs(name=name or 3)
