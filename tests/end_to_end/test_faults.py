"""What happens when something dies: told soon, with where and why, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import meshgate as kt
from meshgate import EngineDiedError, MeshFailure, MeshgateError, ProcessJob, SupervisionError
from meshgate.jobs.gateway_process import JOB_VARIABLE
from meshgate.jobs.processes import marked
from tests.end_to_end.actors import Worker

GRACE = 30.0


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    told: list[MeshFailure] = []
    monkeypatch.setattr(kt, "unhandled_fault_hook", told.append)
    return told


def wait_until(true: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + GRACE
    pause = threading.Event()
    while not true():
        assert time.monotonic() < deadline, f"not within {GRACE} s: {what}"
        pause.wait(0.02)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def engine_of(job: Any) -> int:
    """The one engine of the job that serves a session: the one whose hosts it holds connections to."""
    gateway = job._gateway.record.pid
    children = subprocess.run(
        ["ps", "--ppid", str(gateway), "-o", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout
    engines = [int(line.split()[0]) for line in children.splitlines() if "meshgate_gateway.engine" in line]
    return min(engines)


def test_a_killed_process_is_told_within_three_seconds_and_the_rest_goes_on(
    hosts: Any, faults: list[MeshFailure]
) -> None:
    procs = hosts.spawn_procs(per_host={"gpus": 2})
    workers = procs.spawn("mortal", Worker)
    victim = workers.pid.call().get().item(hosts=1, gpus=0)
    hanging = workers.hang.call()
    begun = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(SupervisionError, match=r"workers-1|rank 2") as caught:
        hanging.get(timeout=GRACE)
    assert time.monotonic() - begun < 3 + 2  # two more for a busy machine
    assert "sig=9" in str(caught.value)
    with pytest.raises(SupervisionError):
        workers.slice(hosts=1, gpus=0).rank.call_one().get(timeout=GRACE)
    again = hosts.spawn_procs(per_host={"gpus": 1}).spawn("again", Worker)
    assert list(again.rank.call().get(timeout=GRACE).values()) == [0, 1]
    wait_until(lambda: faults, "the fault hook is called")
    assert faults[0].ranks == (2,)


def test_a_healthy_slice_of_a_mesh_with_a_dead_rank_answers(hosts: Any, faults: list[MeshFailure]) -> None:
    workers = hosts.spawn_procs(per_host={"gpus": 2}).spawn("partly", Worker)
    workers.slice(hosts=0, gpus=1).die.broadcast()
    wait_until(lambda: faults, "the fault hook is called")
    assert list(workers.slice(hosts=1).rank.call().get(timeout=GRACE).values()) == [0, 1]


def test_a_stopped_mesh_ends_its_calls_and_refuses_new_ones(hosts: Any) -> None:
    procs = hosts.spawn_procs(per_host={"gpus": 1})
    workers = procs.spawn("stopped", Worker)
    pids = list(workers.pid.call().get().values())
    hanging = workers.hang.call()
    procs.stop().get(timeout=GRACE)
    with pytest.raises(SupervisionError, match="stopped"):
        hanging.get(timeout=GRACE)
    with pytest.raises(kt.MeshgateError):
        workers.rank.call().get(timeout=GRACE)
    wait_until(lambda: not any(map(alive, pids)), "the processes of a stopped mesh are gone")


def test_a_dead_engine_is_told_with_its_last_words_and_the_job_goes_on() -> None:
    with ProcessJob({"workers": 1}) as job:
        workers = job.state(cached_path=None).workers.spawn_procs().spawn("workers", Worker)
        pids = list(workers.pid.call().get().values())
        hanging = workers.hang.call()
        begun = time.monotonic()
        os.kill(engine_of(job), signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            hanging.get(timeout=GRACE)
        assert time.monotonic() - begun < 5 + 2
        wait_until(lambda: not any(map(alive, pids)), "the processes of a dead engine are gone")
        again = job.state(cached_path=None).workers.spawn_procs().spawn("again", Worker)
        assert list(again.rank.call().get(timeout=GRACE).values()) == [0]


def test_hosts_outlive_the_messages_that_a_dead_engine_has_left_with_them() -> None:
    """By default Monarch tries for 30 s to deliver a message, for as long to return it, and then ends the host."""
    with ProcessJob({"workers": 1}) as job:
        workers = job.state(cached_path=None).workers.spawn_procs().spawn("workers", Worker)
        hanging = [workers.hang.call() for _ in range(20)]
        workers.initialized.get(timeout=GRACE)
        os.kill(engine_of(job), signal.SIGKILL)
        with pytest.raises(EngineDiedError):
            hanging[0].get(timeout=GRACE)
        again = job.state(cached_path=None).workers.spawn_procs().spawn("again", Worker)
        with pytest.raises(TimeoutError):  # and no SupervisionError
            again.hang.call().get(timeout=65)


def test_a_session_that_ends_takes_its_processes_along(job: Any) -> None:
    with kt.Client(kt.UrlDialer(job.gateway_url, job._gateway.record.token)) as client:
        workers = client.attach_hosts("workers", 2).spawn_procs().spawn("short", Worker)
        pids = list(workers.pid.call().get().values())
        assert all(map(alive, pids))
    wait_until(lambda: not any(map(alive, pids)), "the processes of an ended session are gone")


DRIVER = """
    import sys
    from meshgate import ProcessJob
    from tests.end_to_end.actors import Worker

    with ProcessJob({"workers": 1}) as job:
        hosts = job.state(cached_path=None).workers
        print("applied", flush=True)
        workers = hosts.spawn_procs(per_host={"gpus": 2}).spawn("workers", Worker)
        workers.rank.call().get()
        print("called", flush=True)
        workers.hang.call().get()
"""


def test_a_job_whose_engine_is_frozen_ends_within_fifteen_seconds_and_leaves_nothing() -> None:
    with ProcessJob({"workers": 1}) as job:
        job.state(cached_path=None).workers.spawn_procs().initialized.get(timeout=60)
        apply_id = job.apply_id
        os.kill(engine_of(job), signal.SIGSTOP)
        begun = time.monotonic()
    assert time.monotonic() - begun < 15
    assert not marked(JOB_VARIABLE, apply_id or "")


@pytest.mark.parametrize("moment", ["applied", "called"])
def test_a_killed_driver_leaves_nothing_behind(moment: str) -> None:
    mark = f"{moment}-{os.getpid()}-{time.monotonic_ns()}"
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER)],
        env={**os.environ, "MESHGATE_END_TO_END": mark, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    with driver, driver.stdout:
        for line in driver.stdout:
            if line.strip() == moment:
                break
        driver.kill()
    wait_until(lambda: not marked("MESHGATE_END_TO_END", mark), "everything of a killed driver is gone")


def test_what_came_up_of_a_spawn_that_failed_ends_with_it_and_what_it_printed_arrives(
    job: Any, hosts: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = f"half-{os.getpid()}-{time.monotonic_ns()}"

    def half() -> None:
        import sys

        from monarch.actor import current_rank

        os.environ["MESHGATE_HALF"] = mark
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # carries the mark
        print("half of them comes up", flush=True)
        if current_rank().rank == 1:
            raise ValueError("the other half does not")

    procs = hosts.spawn_procs(bootstrap=half)
    with pytest.raises(MeshgateError):
        procs.initialized.get(timeout=60)
    wait_until(lambda: not marked("MESHGATE_HALF", mark), "the processes of the failed spawn are gone")
    printed = ""

    def told() -> bool:
        nonlocal printed
        printed += capfd.readouterr().out
        return "half of them comes up" in printed

    wait_until(told, "what it printed is here")
