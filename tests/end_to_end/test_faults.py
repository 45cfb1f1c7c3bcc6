"""Whatever dies, the driver soon gets an error with place and reason, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import meshgate as kt
from meshgate import EngineDiedError, ProcessJob, SupervisionError
from meshgate.jobs.local_gateway import JOB_VARIABLE
from meshgate_processes.marks import find_processes
from tests.end_to_end.actors import Owner, StopsItself, Worker
from tests.end_to_end.conftest import FaultsOf
from tests.programs import child_process
from tests.waiting import DEADLINE, Printed, wait_for

PROMPT = 20.0  # seconds: it takes 2 on an idle machine (docs/reliability.md), and Monarch's own timeouts are 30 or more
TIMEOUT = 60.0


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def engine_of(job: Any) -> int:
    """The process of the engine of the job's one session."""
    (session,) = job.status().sessions
    return int(session.pid)


def test_a_killed_process_is_reported_promptly_and_the_rest_works(hosts: Any, faults_of: FaultsOf) -> None:
    faults = faults_of("mortal")
    procs = hosts.spawn_procs(per_host={"gpus": 2})
    workers = procs.spawn("mortal", Worker)
    victim = workers.pid.call().get().item(hosts=1, gpus=0)
    hanging = workers.hang.call()
    start = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(SupervisionError, match=r"workers-1|rank 2") as caught:
        hanging.get(timeout=TIMEOUT)
    assert time.monotonic() - start < PROMPT
    assert re.search(r"sig=9|process \d+ of rank 2 on workers-1 ended", str(caught.value))
    with pytest.raises(SupervisionError):
        workers.slice(hosts=1, gpus=0).rank.call_one().get(timeout=TIMEOUT)
    again = hosts.spawn_procs(per_host={"gpus": 1}).spawn("again", Worker)
    assert list(again.rank.call().get(timeout=TIMEOUT).values()) == [0, 1]
    wait_for(lambda: faults, "the fault hook")
    assert faults[0].ranks == (2,)


def test_a_healthy_slice_of_a_mesh_with_a_dead_rank_works(hosts: Any, faults_of: FaultsOf) -> None:
    faults = faults_of("partly")
    workers = hosts.spawn_procs(per_host={"gpus": 2}).spawn("partly", Worker)
    workers.slice(hosts=0, gpus=1).die.broadcast()
    wait_for(lambda: faults, "the fault hook")
    assert list(workers.slice(hosts=1).rank.call().get(timeout=TIMEOUT).values()) == [0, 1]


def test_choose_calls_the_living_and_fails_if_the_chosen_actor_dies(hosts: Any, faults_of: FaultsOf) -> None:
    faults = faults_of("chosen")
    workers = hosts.spawn_procs(per_host={"gpus": 1}).spawn("chosen", Worker)
    with pytest.raises(SupervisionError, match="chosen"):
        workers.die.choose().get(timeout=TIMEOUT)
    wait_for(lambda: faults, "the fault hook")
    living = 1 - faults[0].ranks[0]
    for _ in range(8):
        assert workers.coordinates.choose().get(timeout=TIMEOUT) == {"hosts": living, "gpus": 0}
    workers.slice(hosts=living).die.broadcast()
    wait_for(lambda: len(faults) == 2, "the second call of the fault hook")
    with pytest.raises(SupervisionError):
        workers.rank.choose().get(timeout=TIMEOUT)


def test_calls_on_a_mesh_that_an_endpoint_returned_fail_when_a_process_of_it_dies(hosts: Any) -> None:
    owner = hosts.slice(hosts=0).spawn_procs().spawn("owner", Owner)

    def watched() -> Any:
        """The mesh, unless its process was killed before the engine watched it, which no call waits for."""
        inner = owner.spawn.call_one(3).get(timeout=60)
        assert list(inner.rank.call().get(timeout=TIMEOUT).values()) == [0, 1, 2]
        victim = inner.slice(inner=1).pid.call_one().get(timeout=TIMEOUT)
        hanging = inner.slice(inner=slice(0, 2)).hang.call()
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(SupervisionError, match=r"inner.hang.*rank 1 .*(ended|does not answer)") as caught:
            hanging.get(timeout=TIMEOUT)
        return None if "does not answer" in str(caught.value) else inner

    inner = wait_for(watched, "a death of a process that is watched", timeout=TIMEOUT)
    with pytest.raises(SupervisionError, match="ended"):
        inner.rank.call().get(timeout=TIMEOUT)
    again = owner.spawned.call_one().get(timeout=TIMEOUT)
    with pytest.raises(SupervisionError, match="ended"):
        again.slice(inner=1).rank.call_one().get(timeout=TIMEOUT)
    assert again.slice(inner=2).rank.call_one().get(timeout=TIMEOUT) == 0


def test_calls_on_a_mesh_in_its_owners_process_fail_if_it_dies_at_once(hosts: Any, faults_of: FaultsOf) -> None:
    faults = faults_of("owner")
    owner = hosts.slice(hosts=0).spawn_procs().spawn("owner", Owner)
    inner = owner.spawn_here.call_one().get(timeout=60)
    with pytest.raises(SupervisionError, match="of a mesh that an endpoint returned ended"):
        inner.die.call_one().get(timeout=TIMEOUT)
    wait_for(lambda: faults, "the fault hook")


def test_calls_on_a_mesh_that_an_endpoint_returned_fail_once_its_owner_has_stopped_it(hosts: Any) -> None:
    owner = hosts.slice(hosts=0).spawn_procs().spawn("owner", Owner)
    inner = owner.spawn_on.call_one(hosts.spawn_procs()).get(timeout=60)
    hanging = inner.slice(hosts=1).hang.call()
    assert inner.slice(hosts=0).add.call_one(3).get(timeout=TIMEOUT) == 3
    owner.stop_spawned.call_one().get(timeout=TIMEOUT)
    with pytest.raises(SupervisionError, match=r"(?s)inner\.hang\(\) failed.*stopped"):
        hanging.get(timeout=TIMEOUT)
    with pytest.raises(SupervisionError, match="stopped"):
        inner.rank.call().get(timeout=TIMEOUT)


def test_calls_on_a_mesh_that_an_endpoint_returned_fail_when_an_actor_of_it_does(hosts: Any) -> None:
    owner = hosts.slice(hosts=0).spawn_procs().spawn("owner", Owner)
    inner = owner.spawn_on.call_one(hosts.spawn_procs()).get(timeout=60)
    inner.slice(hosts=1).fail.broadcast("no more")
    with pytest.raises(SupervisionError, match="UserError: no more"):
        inner.slice(hosts=1).rank.call().get(timeout=TIMEOUT)
    assert inner.slice(hosts=0).rank.call_one().get(timeout=TIMEOUT) == 0


def test_calls_to_an_actor_that_stopped_itself_fail_and_others_are_usable(hosts: Any, faults_of: FaultsOf) -> None:
    faults = faults_of("stops itself")
    actors = hosts.spawn_procs().spawn("stops itself", StopsItself)
    actors.stop_on.broadcast(1)  # a call's reply and the report of the stop would race

    def failure() -> SupervisionError | None:
        try:
            actors.step.call().get(timeout=TIMEOUT)
        except SupervisionError as error:
            return error
        return None  # it arrived before the actor had stopped

    for _ in range(2):
        told = str(wait_for(failure, "calls to fail"))
        assert "step() failed" in told
        assert "stopped: done with it" in told
    with pytest.raises(SupervisionError, match="stopped: done with it"):
        next(actors.slice(hosts=1).step.stream()).get(timeout=TIMEOUT)
    assert actors.slice(hosts=0).step.call_one().get(timeout=TIMEOUT) == 0
    actors.stop().get(timeout=TIMEOUT)
    assert not faults


def test_a_call_on_stopped_actors_whose_owner_has_died_fails(hosts: Any, faults_of: FaultsOf) -> None:
    faults = faults_of("owner")
    owner = hosts.slice(hosts=0).spawn_procs().spawn("owner", Owner)
    inner = owner.spawn_on.call_one(hosts.spawn_procs()).get(timeout=60)
    owner.stop_spawned.call_one().get(timeout=TIMEOUT)
    owner.die.broadcast()
    wait_for(lambda: faults, "the fault hook")
    with (
        kt.config.configured(supervision_watchdog_timeout="5s"),  # Monarch's default is 2 minutes
        pytest.raises(SupervisionError, match=r"(?s)inner\.rank\(\) failed.*timed out reaching controller"),
    ):
        inner.rank.call().get(timeout=TIMEOUT)


def test_stopping_a_mesh_fails_its_calls_and_later_ones(hosts: Any) -> None:
    procs = hosts.spawn_procs(per_host={"gpus": 1})
    workers = procs.spawn("stopped", Worker)
    pids = list(workers.pid.call().get().values())
    hanging = workers.hang.call()
    procs.stop().get(timeout=TIMEOUT)
    with pytest.raises(SupervisionError, match="stopped"):
        hanging.get(timeout=TIMEOUT)
    with pytest.raises(kt.MeshgateError):
        workers.rank.call().get(timeout=TIMEOUT)
    wait_for(lambda: not any(map(alive, pids)), "the processes of a stopped mesh to end")


def test_a_mesh_that_has_lost_a_host_can_be_stopped(faults_of: FaultsOf) -> None:
    """It takes as long as Monarch gives a ``__cleanup__`` on the other hosts."""
    faults = faults_of("half")
    with ProcessJob({"workers": 2}) as job:
        procs = job.state(cached_path=None).workers.spawn_procs()
        pids = list(procs.spawn("half", Worker).pid.call().get().values())
        host = int(Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(host, signal.SIGKILL)
        wait_for(lambda: faults, "the loss to be reported")
        procs.stop().get(timeout=DEADLINE)
        wait_for(lambda: not any(map(alive, pids)), "the processes on the other host to end")


def test_a_dead_engine_is_reported_and_the_job_goes_on() -> None:
    with ProcessJob({"workers": 1}) as job:
        workers = job.state(cached_path=None).workers.spawn_procs().spawn("workers", Worker)
        pids = list(workers.pid.call().get().values())
        hanging = workers.hang.call()
        start = time.monotonic()
        os.kill(engine_of(job), signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            hanging.get(timeout=TIMEOUT)
        assert time.monotonic() - start < PROMPT
        wait_for(lambda: not any(map(alive, pids)), "the processes of a dead engine to end")
        again = job.state(cached_path=None).workers.spawn_procs().spawn("again", Worker)
        assert list(again.rank.call().get(timeout=TIMEOUT).values()) == [0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hosts_survive_undeliverable_messages_to_a_dead_engine() -> None:
    """By default Monarch tries to deliver a message for 30 s, to return it for 30 s, and then ends the host."""
    with ProcessJob({"workers": 1}) as job:
        workers = job.state(cached_path=None).workers.spawn_procs().spawn("workers", Worker)
        hanging = [workers.hang.call() for _ in range(20)]
        workers.initialized.get(timeout=TIMEOUT)
        os.kill(engine_of(job), signal.SIGKILL)
        with pytest.raises(EngineDiedError):
            hanging[0].get(timeout=TIMEOUT)
        again = job.state(cached_path=None).workers.spawn_procs().spawn("again", Worker)
        with pytest.raises(TimeoutError):  # not a SupervisionError
            again.hang.call().get(timeout=65)


def test_closing_a_session_ends_its_processes(job: Any) -> None:
    with kt.Client(kt.UrlDialer(job.gateway_url, job._gateway.record.token)) as client:
        workers = client.attach_hosts("workers", 2).spawn_procs().spawn("short", Worker)
        pids = list(workers.pid.call().get().values())
        assert all(map(alive, pids))
    wait_for(lambda: not any(map(alive, pids)), "the processes of a closed session to end")


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


UNHANDLED = """
    import sys
    import meshgate
    from meshgate import ProcessJob, SupervisionError
    from meshgate.session.errors import faults
    from tests.end_to_end.actors import Worker

    if "hook" in sys.argv:
        meshgate.unhandled_fault_hook = lambda failure: sys.stderr.write(f"hook: {failure.mesh_name}\\n")
    with ProcessJob({"workers": 1}) as job:
        hosts = job.state(cached_path=None).workers
        waiting = hosts.spawn_procs().spawn("waiting", Worker)
        waiting.pid.call().get()
        mortal = hosts.spawn_procs().spawn("mortal", Worker)
        if "call" in sys.argv:
            faults.LEAVE_TIMEOUT = 60  # seconds in which a program may begin to end by itself
            mortal.die.call().get()
        mortal.die.broadcast()
        if "hook" in sys.argv:
            try:
                mortal.pid.call().get()
            except SupervisionError:
                print("goes on")
        else:
            waiting.hang.call().get()
"""


def run_unhandled(*arguments: str) -> subprocess.CompletedProcess[str]:
    mark = f"{arguments}-{os.getpid()}-{time.monotonic_ns()}"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(UNHANDLED), *arguments],
        env={**os.environ, "MESHGATE_END_TO_END": mark, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=False,
        text=True,
        timeout=180,
    )
    assert not find_processes(f"MESHGATE_END_TO_END={mark}")
    return done


def test_an_unhandled_fault_ends_the_program_and_its_job() -> None:
    done = run_unhandled()
    assert done.returncode == -signal.SIGINT  # 130 in a shell
    assert "meshgate: rank 0 of mesh 'mortal' on workers-0 failed" in done.stderr
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


def test_a_call_that_fails_with_the_fault_ends_the_program_with_its_own_error() -> None:
    done = run_unhandled("call")
    assert done.returncode == 1
    assert "SupervisionError: " in done.stderr.rpartition("Traceback")[2]


def test_a_program_with_a_fault_hook_goes_on() -> None:
    done = run_unhandled("hook")
    assert done.returncode == 0, done.stderr
    assert "goes on" in done.stdout
    assert "hook: mortal" in done.stderr


def test_a_job_with_a_frozen_engine_ends_and_leaves_nothing() -> None:
    with ProcessJob({"workers": 1}) as job:
        job.state(cached_path=None).workers.spawn_procs().initialized.get(timeout=60)
        apply_id = job.apply_id
        os.kill(engine_of(job), signal.SIGSTOP)
    assert not find_processes(f"{JOB_VARIABLE}={apply_id or ''}")


@pytest.mark.parametrize("moment", ["applied", "called"])
def test_a_killed_driver_leaves_nothing_behind(moment: str) -> None:
    mark = f"{moment}-{os.getpid()}-{time.monotonic_ns()}"
    environment = {**os.environ, "MESHGATE_END_TO_END": mark, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(DRIVER)]
    with child_process(command, env=environment, stdout=subprocess.PIPE, text=True) as driver:
        assert any(line.strip() == moment for line in driver.stdout)
    wait_for(lambda: not find_processes(f"MESHGATE_END_TO_END={mark}"), "all processes of a killed driver to end")


def test_a_failed_spawn_ends_the_processes_that_came_up_and_their_output_arrives(
    job: Any, hosts: Any, printed: Printed
) -> None:
    mark = f"partial-{os.getpid()}-{time.monotonic_ns()}"

    def fail_on_one_rank() -> None:
        import sys

        from monarch.actor import current_rank

        os.environ["MESHGATE_PARTIAL_SPAWN"] = mark
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # inherits the mark
        print("starting", flush=True)
        if current_rank().rank == 1:
            raise ValueError("this rank does not start")

    procs = hosts.spawn_procs(bootstrap=fail_on_one_rank)
    with pytest.raises(kt.ActorError, match="ValueError: this rank does not start"):
        procs.initialized.get(timeout=60)
    with pytest.raises(kt.StepFailedError, match="this rank does not start") as caught:
        procs.spawn("workers", Worker).pid.call().get(timeout=60)
    assert caught.value.step.startswith("spawn_procs(")
    wait_for(lambda: not find_processes(f"MESHGATE_PARTIAL_SPAWN={mark}"), "the processes of the failed spawn to end")
    wait_for(lambda: "starting" in printed.out, "the output")
