"""After one of two hosts is lost, new sessions and the commands that look at a job can use the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meshgate as kt
from meshgate import ProcessJob, SupervisionError, job_loads
from meshgate.ranks.debug import debugging
from meshgate_processes.identity import identify_process
from tests.end_to_end.actors import Worker
from tests.waiting import wait_for

LOST = r"mesh 'workers' has lost hosts \(workers-1: the host \(pid \d+\) was killed by SIGKILL\)"
PROMPT = 20.0  # seconds; it takes one on an idle machine, and Monarch would wait for a minute


@pytest.fixture(scope="module")
def halved() -> Iterator[ProcessJob]:
    """A job that has lost host 1, and whose call hangs on host 0."""
    with pytest.MonkeyPatch.context() as patch, ProcessJob({"workers": 2}) as job:
        patch.setattr(kt, "unhandled_fault_hook", lambda failure: None)
        workers = job.state(cached_path=None).workers.spawn_procs(name="halved").spawn("halved_workers", Worker)
        pids = list(workers.pid.call().get().values())
        hanging = workers.slice(hosts=0).hang.call()
        host = int(Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(host, signal.SIGKILL)
        wait_for(lambda: [each.rank for each in job.status().hosts] == [0], "the host to be lost")
        yield job
        assert not hanging.done()


@pytest.fixture
def other(halved: ProcessJob) -> Iterator[Any]:
    """The job as another program finds it."""
    job = job_loads(halved.dumps())
    yield job
    if job._client is not None:
        job._client.close()


def test_a_new_session_has_the_lost_host_as_missing(other: Any, tmp_path: Path) -> None:
    hosts = other.state(cached_path=None).workers
    started = time.monotonic()
    with pytest.raises(SupervisionError, match=LOST):
        hosts.spawn_procs(name="whole").initialized.get(timeout=60)
    with pytest.raises(SupervisionError, match=LOST):
        other.state(cached_path=None, wait=True)
    assert time.monotonic() - started < PROMPT
    (tmp_path / "synced.py").touch()
    with pytest.raises(SupervisionError, match="1 host was lost, so code version"):
        other.sync(sync_dirs=[str(tmp_path)], quiet=True)
    rest = hosts.slice(hosts=slice(0, 1))
    workers = rest.spawn_procs(per_host={"gpus": 2}, name="rest").spawn("rest_workers", Worker)
    assert list(workers.rank.call().get(timeout=60).values()) == [0, 1]
    alone = hosts.slice(hosts=0).spawn_procs(name="alone").spawn("alone_worker", Worker)
    assert alone.rank.call_one().get(timeout=60) == 0
    rest.flatten("hosts").spawn_procs(name="flat").initialized.get(timeout=60)


def test_stopping_the_hosts_stops_what_runs_on_those_that_are_left(other: Any) -> None:
    hosts = other.state(cached_path=None).workers
    workers = hosts.slice(hosts=0).spawn_procs(name="stopped").spawn("stopped_workers", Worker)
    process = identify_process(workers.pid.call_one().get(timeout=60))
    assert process is not None
    hosts.stop().get(timeout=60)
    wait_for(lambda: not process.alive, "the process to end")
    again = hosts.slice(hosts=0).spawn_procs(name="again").spawn("again_worker", Worker)
    assert again.rank.call_one().get(timeout=60) == 0


def run(job: ProcessJob, command: str, *arguments: str) -> tuple[int, Any]:
    """The exit code of a command, and the JSON that it prints."""
    program = "from meshgate.cli.app import app; app()"
    arguments = (sys.executable, "-c", program, command, str(job.apply_id), "--json", *arguments)
    found = subprocess.run(arguments, capture_output=True, text=True, check=False, env=os.environ)
    return found.returncode, json.loads(found.stdout)


def test_why_and_stacks_show_what_the_other_host_runs_and_name_the_lost_one(halved: ProcessJob) -> None:
    code, why = run(halved, "why")
    (call,) = why["calls"]
    assert [(each["rank"], each["host"]) for each in call["processes"]] == [(0, "workers-0")]
    assert "in Worker.hang" in call["processes"][0]["stack"]
    assert (code, list(why["problems"])) == (0, ["workers-1"])
    code, stacks = run(halved, "stacks")
    assert [(each["mesh"], each["rank"]) for each in stacks["processes"]] == [("halved", 0)]
    assert (code, stacks["problems"]) == (0, why["problems"])
    assert why["problems"]["workers-1"].startswith("mesh 'workers' has lost hosts (workers-1: the host (pid ")


def test_a_command_runs_on_the_other_host(halved: ProcessJob) -> None:
    code, executed = run(halved, "exec", "--", "echo", "here")
    here, lost = executed["results"]
    assert (here["returncode"], here["stdout"]) == (0, "here\n")
    assert (code, lost["returncode"]) == (255, 255)
    assert "has lost hosts (workers-1" in lost["error"]


def test_top_and_doctor_look_at_the_other_host(halved: ProcessJob) -> None:
    code, top = run(halved, "top", "--once")
    assert code == 0
    assert {(each["mesh"], each["host"]) for each in top["ranks"]} == {("halved", "workers-0")}
    assert "has lost hosts (workers-1" in top["problems"]["workers-1"]
    findings = run(halved, "doctor", "--watch", "0")[1]["findings"]
    assert "round trip" in [each["check"] for each in findings if each["outcome"] == "ok"]


def test_a_debugger_names_the_lost_host(other: Any) -> None:
    with debugging(other.state(cached_path=None).workers) as debugger:
        assert debugger.stopped() == []
        assert list(debugger.problems) == ["host 1"]
        assert "has lost hosts (workers-1" in debugger.problems["host 1"]
