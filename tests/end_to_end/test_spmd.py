"""A torchrun command runs on the hosts of a job: environment, exit codes, the first failure, restarts, log files."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshgate import ProcessJob, SPMDFailed
from meshgate.cli.ranks import why
from meshgate.jobs.spmd.run import _count_processes
from meshgate.spmd import SPMDJob, serve
from tests.programs import child_process
from tests.waiting import wait_for

# Records what a rank finds, then does what the arguments say: "fail RANK", "exit CODE", "kill RANK", "orphan RANK",
# "save".
TRAIN = """
import json, os, signal, sys, time
import helper

rank = int(os.environ["RANK"])
record = {"argv": sys.argv, "path0": sys.path[0], "name": __name__, "environment": dict(os.environ), "cwd": os.getcwd()}
with open(os.path.join(helper.PLACE, f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}.json"), "w") as file:
    json.dump(record, file)
print(f"rank {rank} prints")
print(f"rank {rank} warns", file=sys.stderr)
what, number = (sys.argv[1:] + ["", "0"])[:2]
if what == "exit":
    sys.exit(int(number))
if what == "first" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(5)
if what in ("fail", "kill", "orphan") and rank != int(number):
    time.sleep(600)
if what == "fail":
    raise ValueError("bad batch")
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "orphan":
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
if what == "save":
    def save(*_):
        open(os.path.join(helper.PLACE, f"saved-{rank}"), "w").close()
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
    print(f"rank {rank} is training", flush=True)
    time.sleep(600)
"""
DRIVER = """
from meshgate import ProcessJob
from meshgate.spmd import serve

if __name__ == "__main__":
    with ProcessJob({"workers": 1}) as job:
        serve(["torchrun", "--nproc-per-node=2", "sub/train.py", "save"], job=job).run_spmd()
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text(TRAIN)
    (tmp_path / "sub" / "helper.py").write_text(f"PLACE = {str(tmp_path)!r}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(job: ProcessJob, *arguments: str, options: tuple[str, ...] = ("--nproc-per-node=2",)) -> None:
    serve(["torchrun", *options, "sub/train.py", *arguments], job=job).run_spmd()


def records(project: Path, restart: int = 0) -> dict[int, Any]:
    found = sorted(project.glob(f"{restart}-*.json"))
    return {int(path.stem.partition("-")[2]): json.loads(path.read_text()) for path in found}


def test_every_rank_runs_the_script_as_torchrun_does(job: ProcessJob, project: Path) -> None:
    run(job, "--lr", "1", options=("--nproc-per-node=2", "--rdzv-id=exp", "--role=trainer", "--max-restarts=2"))
    found = records(project)
    assert sorted(found) == [0, 1, 2, 3]
    ports = {record["environment"]["MASTER_PORT"] for record in found.values()}
    assert len(ports) == 1
    for rank, record in found.items():
        assert record["argv"] == [str(project / "sub/train.py"), "--lr", "1"]
        assert (record["path0"], record["name"]) == (str(project / "sub"), "__main__")
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank % 2,
            "WORLD_SIZE": 4,
            "LOCAL_WORLD_SIZE": 2,
            "GROUP_RANK": rank // 2,
            "ROLE_NAME": "trainer",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": "exp",
            "TORCHELASTIC_MAX_RESTARTS": 2,
            "OMP_NUM_THREADS": 1,
        }
        environment = record["environment"]
        assert {name: environment[name] for name in expected} == {name: str(value) for name, value in expected.items()}
        assert not [name for name in environment if name.startswith("HYPERACTOR_")]


def test_exit_0_is_success(job: ProcessJob) -> None:
    run(job, "exit", "0")


def test_another_exit_code_is_that_of_the_run(job: ProcessJob) -> None:
    with pytest.raises(SPMDFailed, match="failed with exit code 3") as caught:
        run(job, "exit", "3")
    assert caught.value.exit_code == 3


def test_the_first_rank_that_fails_ends_the_others_and_is_reported(job: ProcessJob, project: Path) -> None:
    started = time.monotonic()
    with pytest.raises(SPMDFailed) as caught:
        run(job, "fail", "3")
    assert time.monotonic() - started < 300  # the other ranks would sleep for 600 s
    failure = caught.value
    assert (failure.rank, failure.host, failure.exit_code) == (3, "workers-1", 1)
    assert failure.exception == "ValueError: bad batch"
    assert "rank 3 prints" in failure.log_tail
    assert 'raise ValueError("bad batch")' in failure.log_tail
    assert "ranks 0-2 ended by this failure" in str(failure)


def test_a_rank_that_is_killed_is_reported_with_the_signal(job: ProcessJob) -> None:
    with pytest.raises(SPMDFailed, match="rank 1 on workers-0 was killed by SIGKILL") as caught:
        run(job, "kill", "1")
    assert caught.value.exit_code == -signal.SIGKILL


def test_a_rank_whose_worker_process_dies_ends_the_run_and_not_the_program(
    job: ProcessJob, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SPMDFailed, match="rank 2 on workers-1 was lost: ") as caught:
        run(job, "orphan", "2")
    assert (caught.value.rank, caught.value.host) == (2, "workers-1")
    run(job)  # the hosts can be used again
    assert "The program ends" not in capsys.readouterr().err


def test_a_failed_run_is_started_again(job: ProcessJob, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(job, "first", options=("--nproc-per-node=1", "--max-restarts=1"))
    restarted = r"meshgate: rank \d on workers-\d failed with exit code \d+[^\n]*\. Restart 1 of 1\n"
    shown = capsys.readouterr().err
    assert re.search(restarted, shown), shown
    assert "Last output" not in shown
    assert records(project, 1)[0]["environment"]["TORCHELASTIC_RESTART_COUNT"] == "1"


def test_restarts_end(job: ProcessJob, project: Path) -> None:
    with pytest.raises(SPMDFailed, match="exit code 4"):
        run(job, "exit", "4", options=("--max-restarts=1",))
    assert records(project, 1)
    assert not records(project, 2)


def test_a_rank_that_cannot_be_started_fails_the_run(
    job: ProcessJob, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "file").touch()
    with pytest.raises(SPMDFailed, match=r"rank \d on workers-\d was not started: .*/train\.py: .*: Not a directory"):
        run(job, options=("--max-restarts=1", f"--log-dir={project}/file/logs"))
    assert "Restart 1 of 1\n" in capsys.readouterr().err


def test_log_files_are_written_for_each_rank(job: ProcessJob, project: Path) -> None:
    logs = project / "logs"
    run(job, options=("--nnodes=1", "--nproc-per-node=2", f"--log-dir={logs}", "-t", "0:1", "-r", "2"))
    [attempt] = logs.glob("none_*/attempt_0")
    assert (attempt / "0" / "stdout.log").read_text() == "rank 0 prints\n"
    assert not (attempt / "1" / "stdout.log").exists()
    assert (attempt / "1" / "stderr.log").read_text() == "rank 1 warns\n"


def test_fewer_nodes_than_hosts_use_the_first_ones(job: ProcessJob, project: Path) -> None:
    run(job, options=("--standalone",))
    assert list(records(project)) == [0]
    assert records(project)[0]["environment"]["WORLD_SIZE"] == "1"


def test_processors_are_counted_on_the_hosts(hosts: Any) -> None:
    assert _count_processes(hosts, "cpu") == len(os.sched_getaffinity(0))


def test_a_module_and_a_program_run_too(job: ProcessJob, project: Path) -> None:
    serve(["torchrun", "--nnodes=1", "-m", "json.tool", "--help"], job=job).run_spmd()
    serve(["torchrun", "--nnodes=1", "--no-python", "touch", str(project / "touched")], job=job).run_spmd()
    assert (project / "touched").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/opt/nowhere/train.py"], "no rank was started: /opt/nowhere/train.py does not exist on workers-0"),
        (["-m", "no_such_module"], "no rank was started: there is no module 'no_such_module' on workers-0"),
        (["--no-python", "no-such-program"], "no rank was started: no-such-program is not an executable program"),
        (["--master-addr=192.0.2.1", "sub/train.py"], "192.0.2.1 is not an address of workers-0, the host of rank 0"),
        (["--nnodes=3", "sub/train.py"], "--nnodes=3: the job has 2 hosts"),
    ],
)
def test_what_cannot_run_is_refused_before_any_rank_starts(
    job: ProcessJob, project: Path, words: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        serve(["torchrun", *words], job=job).run_spmd()
    assert not records(project)


def test_a_master_port_in_use_is_refused(job: ProcessJob, project: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=f"no rank was started: port {port} of workers-0 cannot be used"):
            run(job, options=(f"--master-port={port}",))
    assert not records(project)


@pytest.fixture
def synced() -> Iterator[ProcessJob]:
    with ProcessJob({"workers": 1}) as job:
        yield job


def test_each_run_takes_the_files_as_they_are(synced: ProcessJob, project: Path) -> None:
    synced.state(cached_path=None)
    synced.sync(sync_dirs=[str(project)], quiet=True)
    spmd = SPMDJob(synced, ["torchrun", "sub/train.py", "exit", "0"])
    spmd.run_spmd()
    assert "snapshots" in records(project)[0]["path0"]
    (project / "sub" / "train.py").write_text("raise SystemExit(9)\n")
    with pytest.raises(SPMDFailed, match="exit code 9"):
        spmd.run_spmd()


HANGS = """
import os, socket, sys, threading, time

rank, place = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

def serve():
    with socket.create_server(place, reuse_port=True) as server:
        for peer in [server.accept()[0] for _ in range(4)]:
            peer.send(b"x")

def connect():
    while True:
        try:
            return socket.create_connection(place)
        except ConnectionRefusedError:
            time.sleep(0.01)

def barrier():
    connect().recv(1)

def load():
    while not os.path.exists(sys.argv[1]): time.sleep(0.01)

if rank == 0:
    threading.Thread(target=serve).start()
if rank == 1:
    load()
barrier()
"""


def test_a_rank_for_which_the_others_wait_is_named_with_its_place(job: ProcessJob, project: Path) -> None:
    (project / "hangs.py").write_text(HANGS)
    data = project / "data"
    barrier, load = (HANGS[: HANGS.index(text)].count("\n") + 1 for text in (".recv", "while not"))
    hung = f"3 of 4 ranks are in barrier (hangs.py:{barrier}), rank 1 is in load (hangs.py:{load})"

    def places() -> str:
        (found,) = [report.places for report in why(job.status(), job.stacks()).calls] or [""]
        return found

    with ThreadPoolExecutor() as pool:
        ended = pool.submit(SPMDJob(job, ["torchrun", "--nproc-per-node=2", "hangs.py", str(data)]).run_spmd)
        try:
            wait_for(lambda: ended.done() or places() == hung, hung)
            groups = [[each.rank for each in group] for group in job.stacks().groups().values()]
        finally:
            data.touch()
        ended.result()
    assert sorted(groups) == [[0], [1], [2, 3]]  # rank 0 has another thread


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)], ids=["INT", "TERM"]
)
def test_ranks_may_save_what_they_have_when_the_driver_is_ended(
    project: Path, signum: signal.Signals, status: int
) -> None:
    (project / "driver.py").write_text(DRIVER)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with child_process([sys.executable, "driver.py"], text=True, **pipes) as driver:
        training: set[str] = set()
        while len(training) < 2:
            line = driver.stdout.readline()
            assert line
            training.update(re.findall(r"rank (\d) is training", line))
        driver.send_signal(signum)
        _, errors = driver.communicate(timeout=100)
    assert driver.returncode == status
    assert "the ranks got SIGTERM; waiting up to 30 s" in errors
    assert sorted(path.name for path in project.glob("saved-*")) == ["saved-0", "saved-1"]
