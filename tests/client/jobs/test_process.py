"""ProcessJob with a real gateway: what it starts, which processes find it, when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshgate.errors import JobCacheWarning, JobError, JobFileError, JobNotRunning, JobStartFailed
from meshgate.jobs import registry
from meshgate.jobs.local_gateway import JOB_VARIABLE
from meshgate.jobs.process import LocalJob, ProcessJob
from meshgate.jobs.saved import SavedJob
from meshgate.jobs.trait import job_load, job_loads
from meshgate_processes.identity import ProcessIdentity
from meshgate_processes.marks import find_processes
from tests.end_to_end.actors import Worker
from tests.end_to_end.probes import Process

ROOT = Path(__file__).parents[3]
TIMEOUT = 60.0  # seconds; a wait takes a fraction of it on an idle machine


def processes_of(apply_id: str | None) -> list[ProcessIdentity]:
    return find_processes(f"{JOB_VARIABLE}={apply_id}")


def read_variable(job: ProcessJob) -> list[str | None]:
    """Reads the variable that names the job in an actor on each host."""
    procs = job.state(cached_path=None).workers.spawn_procs(per_host={"gpus": 1})
    return list(procs.spawn("process", Process).environment.call(JOB_VARIABLE).get().values())


def gateway_of(job: ProcessJob) -> ProcessIdentity:
    gateway = job._running._gateway  # type: ignore[union-attr]
    return gateway._process


Driver = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Driver]:
    """Starts a driver program in another process."""
    started = []

    def start(program: str, *arguments: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        script = tmp_path / "driver" / "program.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text("import os, sys\nfrom meshgate import ProcessJob\n" + textwrap.dedent(program))
        driver = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd or tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
        started.append(driver)
        return driver

    yield start
    for driver in started:
        driver.kill()
        driver.communicate()


def read_line(driver: subprocess.Popen[str]) -> str:
    assert driver.stdout is not None
    return driver.stdout.readline().strip()


def require_ended(processes: list[ProcessIdentity]) -> None:
    assert processes
    assert [process for process in processes if not process.wait_ended(TIMEOUT)] == []


@pytest.mark.usefixtures("no_jobs_of_other_tests")
def test_a_job_runs_actors_on_its_hosts_and_leaves_nothing_behind() -> None:
    with ProcessJob({"workers": 2}) as job:
        assert read_variable(job) == [job.apply_id] * 2
        assert len(processes_of(apply_id := job.apply_id)) >= 6  # gateway, engine, two hosts, two processes
    assert processes_of(apply_id) == []
    assert list(registry.entries()) == []


def test_meshes_have_their_hosts_and_environment_and_the_token_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver in a gateway's environment starts its own gateway."""
    monkeypatch.setenv("MESHGATE_TOKEN_FILE", "/nowhere")
    monkeypatch.setenv("MESHGATE_MESH", "others=tcp://127.0.0.1:1")
    with ProcessJob({"trainers": 2, "dataloaders": 1}, env={"COLOUR": "green"}) as job:
        state = job.state()
        assert dict(state.trainers.sizes) == {"hosts": 2}
        assert dict(state.dataloaders.sizes) == {"hosts": 1}
        reader = state.dataloaders.spawn_procs(per_host={"gpus": 1}).spawn("reader", Process)
        read = [reader.environment.call_one(name).get() for name in (JOB_VARIABLE, "COLOUR", "MESHGATE_TOKEN")]
        assert read == [job.apply_id, "green", None]
        gateway = job._gateway
        assert gateway is not None
        token = gateway.record.token.encode()
        gateway_command = Path(f"/proc/{gateway.record.pid}/cmdline").read_bytes()
        for process in processes_of(job.apply_id):
            try:
                command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError):  # one of a second that has ended
                continue
            assert token not in command
            if command != gateway_command:  # the supervisor and the server, which is a copy of it
                assert token not in environment
        assert "token" not in repr(gateway.record)


@pytest.mark.usefixtures("no_jobs_of_other_tests")
def test_a_gateway_that_cannot_start_reports_the_reason_and_leaves_nothing() -> None:
    job = ProcessJob({"workers": 1}, env={"MESHGATE_LOG_LEVEL": "loud"})
    with pytest.raises(JobStartFailed, match=r"it exited with code 2\n.*log-level"):
        job.apply()
    assert not job.active
    assert list(registry.entries()) == []


def test_batch_scripts_are_rejected() -> None:
    with pytest.raises(JobError, match="batch-mode"):
        ProcessJob({"workers": 1}).apply(client_script="train.py")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"meshes": {"a": 1}, "env": {"A=B": "c"}},
            r"env\['A=B'\]='A=B': expected the name of a variable, without '=' and null bytes",
        ),
        (
            {"meshes": {"a": 1}, "env": {"A": "\0"}},
            r"env\['A'\]='\\x00': expected a string without null bytes",
        ),
        ({"meshes": {}}, r"meshes=\{\}: expected the number of hosts of each mesh, such as \{'workers': 2\}$"),
        (
            {"meshes": {"two words": 1}},
            r"'two words': expected a name that begins with a letter or '_'; letters, digits",
        ),
        ({"meshes": {"workers": 0}}, r"meshes\['workers'\]=0: expected a whole number of hosts, from 1 to 1024"),
        ({"meshes": {"workers": 1025}}, "expected a whole number of hosts, from 1 to 1024"),
        ({"meshes": {"workers": 1.5}}, "expected a whole number of hosts, from 1 to 1024"),
        ({"meshes": {"workers": "2"}}, "expected a whole number of hosts, from 1 to 1024"),
        ({"meshes": {"workers": 1}, "env": {"A": 1}}, r"env\['A'\]=1: expected a string without null bytes"),
        ({"meshes": {"workers": 1}, "env": "A=1"}, "env='A=1': expected the variables of the workers"),
        ({"meshes": {"workers": 1}, "lease": 0}, "lease=0: expected a number of seconds above 0"),
        ({"meshes": {"workers": 1}, "lease": float("nan")}, "lease=nan"),
        ({"meshes": {"workers": 1}, "lease": 10**400}, "lease=1000"),
        ({"meshes": {"workers": float("nan")}}, "expected a whole number of hosts, from 1 to 1024"),
        ({"meshes": {"workers": 1}, "lease": "1h"}, "lease='1h': expected a number of seconds above 0"),
        (
            {"meshes": {"workers": 1}, "idle_timeout": -1},
            "idle_timeout=-1: expected a number of seconds, or 0 for never",
        ),
    ],
)
def test_invalid_arguments_are_named_at_once(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProcessJob(**arguments)  # type: ignore[arg-type]


def test_a_whole_number_of_another_type_is_a_number_of_hosts() -> None:
    assert ProcessJob({"workers": np.int64(2), "loaders": 3.0})._spec()["meshes"] == {"workers": 2, "loaders": 3}


@pytest.mark.parametrize("spec", [{"meshes": None}, {"meshes": "ab"}, {"meshes": {"a": 1}, "detached": "x"}, {}])
@pytest.mark.parametrize("kind", [ProcessJob, LocalJob])
def test_a_saved_job_that_is_damaged_is_not_loaded(kind: type[ProcessJob] | type[LocalJob], spec: Any) -> None:
    saved = SavedJob(kind=f"meshgate.jobs.process:{kind.__name__}", spec=spec)
    with pytest.raises(JobFileError, match="it is damaged or was saved by another version"):
        job_loads(saved.to_bytes())


@pytest.mark.usefixtures("no_jobs_of_other_tests")
def test_a_job_of_a_directory_whose_name_is_not_text_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(directory)
    monkeypatch.chdir(os.fsdecode(directory))
    with ProcessJob({"workers": 1}) as job:
        job.apply()
        assert [entry.apply_id for entry in registry.entries()] == [job.apply_id]


def test_another_process_finds_the_running_job_and_ends_it(drive: Driver, path: str) -> None:
    first = drive("job = ProcessJob({'workers': 1}); job.state(sys.argv[1]); print(job.apply_id)", path)
    apply_id = read_line(first)
    assert first.wait(TIMEOUT) == 0
    assert processes_of(apply_id)

    job = ProcessJob({"workers": 1})
    state = job.state(path)
    assert job.apply_id == apply_id
    assert dict(state.workers.sizes) == {"hosts": 1}
    assert read_variable(job) == [apply_id]
    job.kill()
    assert processes_of(apply_id) == []
    assert not Path(path).exists()


def test_a_saved_job_outlives_its_killed_driver(drive: Driver, path: str) -> None:
    first = drive(
        """
        job = ProcessJob({"workers": 1})
        job.state(sys.argv[1])
        print(job.apply_id, flush=True)
        input()
        """,
        path,
    )
    apply_id = read_line(first)
    first.kill()
    first.wait()
    job = job_load(path)
    assert job.active
    assert job.apply_id == apply_id
    assert job.can_run(ProcessJob({"workers": 1}))
    assert not job.can_run(ProcessJob({"workers": 2}))
    job.kill()
    job.kill()
    assert processes_of(apply_id) == []


SCOPED = """
    with ProcessJob({"workers": 1}) as job:
        job.state().workers.spawn_procs(per_host={"gpus": 2}).initialized.get()
        print(job.apply_id, flush=True)
        input()
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_job_in_a_with_block_ends_with_its_driver_however_that_ends(drive: Driver, signum: signal.Signals) -> None:
    driver = drive(SCOPED)
    processes = processes_of(read_line(driver))
    assert len(processes) >= 5
    driver.send_signal(signum)
    require_ended(processes)


def test_a_job_ends_with_its_driver_even_if_a_forked_child_keeps_running(drive: Driver) -> None:
    driver = drive("""
        job = ProcessJob({"workers": 1}); job.state(cached_path=None)
        read, write = os.pipe()
        if os.fork() == 0:
            os.close(write)
            os.read(read, 1)  # until the driver has ended, and then until the input ends
            sys.stdin.read()
            os._exit(0)
        print(job.apply_id, flush=True)
        input()
    """)
    processes = processes_of(read_line(driver))
    driver.kill()
    require_ended(processes)


def test_a_job_survives_a_child_that_was_forked_in_its_with_block_and_exits(drive: Driver) -> None:
    driver = drive("""
        with ProcessJob({"workers": 1}) as job:
            workers = job.state().workers
            if os.fork() == 0:
                sys.exit(0)  # leaves the block and runs the exit handlers
            os.wait()
            workers.spawn_procs().initialized.get(timeout=60)
            print("the job runs", flush=True)
    """)
    assert read_line(driver) == "the job runs"


def test_a_saved_job_ends_after_its_idle_timeout(drive: Driver, path: str) -> None:
    driver = drive(
        """
        job = ProcessJob({"workers": 1}, idle_timeout=3)
        job.state(sys.argv[1])
        print(job.apply_id, flush=True)
        input()
        """,
        path,
    )
    processes = processes_of(read_line(driver))
    driver.communicate("\n")
    require_ended(processes)
    job = ProcessJob({"workers": 1}, idle_timeout=3)
    with pytest.warns(JobCacheWarning, match="has ended"):
        job.state(path)
    job.kill()


def test_a_dead_gateway_is_reported_and_apply_starts_another() -> None:
    with ProcessJob({"workers": 1}) as job:
        job.state()
        gateway, first = gateway_of(job), job.apply_id
        gateway.signal(signal.SIGKILL)
        assert gateway.wait_ended(TIMEOUT)
        with pytest.raises(JobNotRunning, match=r"has ended; call apply\(\) to start it again"):
            job.state()
        job.apply()
        assert job.apply_id != first
        assert processes_of(first) == []
        assert read_variable(job) == [job.apply_id]


def test_dumped_bytes_find_the_running_job() -> None:
    job = ProcessJob({"workers": 1})
    job.apply()
    copy = job_loads(job.dumps())
    assert isinstance(copy, ProcessJob)
    assert read_variable(copy) == [job.apply_id]
    copy.kill()
    assert processes_of(job.apply_id) == []
    job.kill()


def test_workers_import_modules_next_to_the_script(drive: Driver, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "trainers.py").write_text(
        "from meshgate import Actor, endpoint\n"
        "class Trainer(Actor):\n"
        "    @endpoint\n"
        "    def file(self): return __file__\n"
    )
    driver = drive(
        """
        from trainers import Trainer
        with ProcessJob({"workers": 1}) as job:
            procs = job.state().workers.spawn_procs(per_host={"gpus": 1})
            print(procs.spawn("trainer", Trainer).file.call_one().get())
        """,
        cwd=elsewhere,
    )
    assert read_line(driver) == str(tmp_path / "driver" / "trainers.py")
    assert driver.wait(TIMEOUT) == 0


@pytest.fixture
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_in_tmp_path")
def test_each_name_is_one_host_unless_a_number_is_given() -> None:
    with LocalJob(("trainers", "readers")) as job:
        state = job.state()
        assert (dict(state.trainers.sizes), dict(state.readers.sizes)) == ({"hosts": 1}, {"hosts": 1})
    assert repr(LocalJob()) == "LocalJob({'hosts': 1})"
    assert repr(LocalJob(meshes={"workers": 2})) == repr(LocalJob({"workers": 2})) == "LocalJob({'workers': 2})"


@pytest.mark.usefixtures("_in_tmp_path")
def test_actors_run_on_every_host_and_no_other_process_finds_the_job() -> None:
    with LocalJob(meshes={"workers": 2}) as job:
        pids = list(job.state().workers.spawn("workers", Worker).pid.call().get().values())
        assert len(set(pids)) == 2
        assert os.listdir() == []
        assert not job.can_run(job)
        copy = job_loads(job.dumps())
        assert not copy.active
        assert repr(copy) == repr(LocalJob({"workers": 2}))


@pytest.mark.usefixtures("_in_tmp_path")
def test_a_batch_script_runs_with_its_output_in_a_file() -> None:
    Path("train.py").write_text("import os; print('batch', os.environ['MONARCH_BATCH_JOB'])")
    job = LocalJob()
    with pytest.raises(ValueError, match="no local batch job"):
        job.process  # noqa: B018
    job.apply(client_script="train.py")
    assert job.active
    assert job.process.args == [sys.executable, "train.py"]
    assert job.process.wait() == 0
    (log,) = Path(".monarch/logs").glob("job_*/stdout.log")
    assert log.read_text() == "batch 1\n"
    job.kill()
    assert not job.active


@pytest.mark.usefixtures("_in_tmp_path")
def test_kill_ends_a_batch_script() -> None:
    Path("train.py").write_text("import sys, signal; signal.pause()")
    job = LocalJob()
    job.apply(client_script="train.py")
    process = job.process
    job.kill()
    assert process.returncode is not None
