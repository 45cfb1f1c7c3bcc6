"""A driver on a laptop that has ssh and nothing else of the cluster."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import DEADLINE, DISTURBED, connection_pids, kit, laptop, pids, queue, run
from tests.waiting import wait_for

PROGRAM = """
import os, sys, time
from meshgate import Actor, SlurmJob, endpoint

class Trainer(Actor):
    @endpoint
    def where(self):
        return os.uname().nodename, os.environ.get("CUDA_VISIBLE_DEVICES")

    @endpoint
    def slow(self, seconds):
        time.sleep(seconds)
        return "done"

def make(name, **options):
    return SlurmJob(
        options.pop("meshes", {{"trainers": 1}}), login="login", job_name=name, python_exe={python!r}, exclusive=False,
        time_limit="10", sync_dirs=[os.path.dirname(os.path.abspath(__file__))], log_dir=os.path.dirname(__file__),
        slurm_args=["--exclude={disturbed}"], **options,
    )

if __name__ == "__main__":
"""


def program(directory: Path, body: str) -> Path:
    """A program with ``make``, ``Trainer`` and ``body``; its first argument is the name of its jobs."""
    file = directory / "program.py"
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    file.write_text(PROGRAM.format(python=sys.executable, disturbed=DISTURBED) + lines)
    return file


def output(file: Path, *arguments: str) -> str:
    with laptop(file, *arguments) as process:
        out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
    assert "Traceback" not in err
    return out


def test_a_program_on_the_laptop_runs_on_two_meshes(name: str, tmp_path: Path) -> None:
    body = """
with make(sys.argv[1], meshes={"trainers": 2, "data": 1}, gpus_per_node=1) as job:
    state = job.state()
    for hosts in (state.trainers, state.data):
        trainers = hosts.spawn_procs(per_host={"gpus": 1}).spawn("trainers", Trainer)
        print(sorted(value for _, value in trainers.where.call().get()))
"""
    trainers, data = map(eval, output(program(tmp_path, body), name).splitlines())
    assert [gpu for _, gpu in trainers + data] == ["0"] * 3
    assert len({node for node, _ in trainers + data}) == 3


def test_values_pass_from_node_to_node(name: str, tmp_path: Path) -> None:
    body = """
with make(sys.argv[1], meshes={"trainers": 2}) as job:
    makers, takers = [job.state().trainers.spawn_procs(name=name).spawn(name, Trainer) for name in ("make", "take")]
    made = makers.where.keep()
    kept = made.get().values()
    print(takers.same.call(made.slice(hosts=1)).get().values() == [kept[1]] * 2, kept[0] != kept[1])
    print(makers.put(7).get().values())
"""
    file = program(tmp_path, body)
    same = "\n    @endpoint\n    def same(self, value):\n        return value\n\ndef make("
    file.write_text(file.read_text().replace("\ndef make(", same))
    assert output(file, name) == "True True\n[7, 7]\n"


def test_a_call_on_nodes_is_cancelled_and_output_is_kept_in_files(name: str, tmp_path: Path) -> None:
    body = """
os.environ["MESHGATE_LOG_DIR"] = directory = os.path.join(os.path.dirname(os.path.abspath(__file__)), "printed")
with make(sys.argv[1], meshes={"trainers": 2}) as job:
    waiters = job.state().trainers.spawn_procs().spawn("waiters", Waiter)
    waits = waiters.wait.call()
    files = [os.path.join(directory, "waiters", f"{rank}.log") for rank in range(2)]
    def until(text):
        while not all(os.path.exists(file) and text in open(file).read() for file in files):
            time.sleep(0.05)
    until("begins")
    print(waits.cancel(), type(waits.exception(60)).__name__)
    until("ends")
    print(waiters.free.call().get().values())
"""
    waiter = """
import asyncio

class Waiter(Actor):
    @endpoint
    async def wait(self):
        print("begins", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            print("ends", flush=True)

    @endpoint
    async def free(self):
        return "free"

def make("""
    file = program(tmp_path, body)
    file.write_text(file.read_text().replace("\ndef make(", waiter))
    assert {"True CallCancelledError", "['free', 'free']"} <= set(output(file, name).splitlines())


def test_a_program_of_two_files_without_git_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def answer():\n    return 42\n")
    file = program(
        tmp_path,
        """
with make(sys.argv[1]) as job:
    print(job.state().trainers.spawn_procs().spawn("helped", Helped).answer.call_one().get())
""",
    )
    helped = "import helper\nclass Helped(Actor):\n    @endpoint\n    def answer(self): return helper.answer()\n"
    text = file.read_text().replace("sync_dirs=[os.path.dirname(os.path.abspath(__file__))], ", "")
    file.write_text(text.replace("def make", helped + "def make"))
    assert output(file, name) == "42\n"


@pytest.mark.parametrize("gateway_on", ["login", "node"])
def test_a_saved_job_is_found_by_another_program_and_ended(name: str, tmp_path: Path, gateway_on: str) -> None:
    body = """
job = make(sys.argv[1], gateway_on=sys.argv[3])
trainers = job.state().trainers.spawn_procs().spawn("trainers", Trainer)
print(job.job_id, trainers.where.call_one().get()[0])
if sys.argv[2] == "end":
    job.kill()
"""
    file = program(tmp_path, body)
    first = output(file, name, "leave", gateway_on)
    connection = connection_pids()
    assert queue(name) == ["RUNNING"]
    assert output(file, name, "end", gateway_on) == first
    assert connection_pids() == connection  # both used it
    assert not queue(name)
    assert not (tmp_path / ".monarch" / "job_state.pkl").exists()


def test_a_call_survives_the_ends_of_the_ssh_connection_and_of_the_server(name: str, tmp_path: Path) -> None:
    body = """
with make(sys.argv[1]) as job:
    trainers = job.state().trainers.spawn_procs().spawn("trainers", Trainer)
    call = trainers.slow.call_one(3)
    print(job._job.directory, flush=True)
    print(call.get(), trainers.where.call_one().get()[0], job._report().ready)
"""
    with laptop(program(tmp_path, body), name) as process:
        assert process.stdout is not None
        directory = process.stdout.readline().strip()
        (connection,) = connection_pids()
        os.kill(connection, signal.SIGKILL)
        _, server, *_ = pids(b"meshgate_gateway\0--slurm-job", directory.encode())  # the first is its supervisor
        os.kill(server, signal.SIGKILL)
        out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    done, node, ready = out.split()
    assert (done, node[0], ready) == ("done", "n", "1")


def test_a_gateway_on_a_node_is_reached_again_after_the_end_of_the_ssh_connection(name: str, tmp_path: Path) -> None:
    body = """
with make(sys.argv[1], gateway_on="node", meshes={"trainers": 2}) as job:
    trainers = job.state().trainers.spawn_procs().spawn("trainers", Trainer)
    call = trainers.slice(hosts=0).slow.call_one(3)
    print(job._job.directory, *job._access._addresses.values(), flush=True)
    print(call.get(), job._report().ready)
"""
    with laptop(program(tmp_path, body), name) as process:
        assert process.stdout is not None
        directory, address = process.stdout.readline().split()
        (connection,) = connection_pids()
        os.kill(connection, signal.SIGKILL)
        out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert out.split() == ["done", "2"]
    assert address.rpartition(":")[0] in run("getent", "hosts", "n1", "n2", "n3")  # the login node only leads there
    wait_for(lambda: not Path(directory).exists(), "the files of the gateway to be removed")


def test_the_job_of_a_driver_that_is_killed_ends(name: str, tmp_path: Path) -> None:
    body = """
with make(sys.argv[1]) as job:
    job.state()
    print(os.getpid(), flush=True)
    time.sleep(600)
"""
    with laptop(program(tmp_path, body), name) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        assert queue(name) == ["RUNNING"]
        driver, *_ = pids(str(tmp_path / "program.py").encode(), name.encode())  # what it starts is a copy at first
        os.kill(driver, signal.SIGKILL)
        process.communicate(timeout=DEADLINE)
    wait_for(lambda: not queue(name), "the job to be cancelled")


@pytest.mark.parametrize("what", ["gateway", "idle"])
def test_an_allocation_without_a_user_ends(name: str, tmp_path: Path, what: str) -> None:
    body = """
job = make(sys.argv[1], idle_timeout=1 if sys.argv[2] == "idle" else 600)
job.state()
print(job._job.pid, job._job.directory)
"""
    pid, directory = output(program(tmp_path, body), name, what).split()
    if what == "gateway":
        kit("on", "login", "kill", "-KILL", pid)
    wait_for(lambda: not queue(name), "the job to end")
    run("rm", "-rf", directory)
