"""AppDefs run on the replicas that torchx has started: as processes, and in containers."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchx import specs

from meshgate import JobStartFailed
from meshgate.spmd import serve
from meshgate_processes.marks import find_processes
from tests.programs import DDP, ROOT, check_equal_weights, child_process

TRAIN = """
import os, sys
sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} in {os.environ['MESHGATE_HOST_NAME']}, "
                 f"{os.environ['COLOR']}\\n")
"""


def app(**fields: Any) -> specs.AppDef:
    role = {
        "name": "trainer",
        "image": "",
        "entrypoint": "env",
        "args": ["torchrun", "--nnodes=2", "--nproc-per-node=2", "--log-dir=logs", "--tee=3", "train.py"],
        "num_replicas": 2,
        "env": {"COLOR": "blue"},
    }
    return specs.AppDef(name="app", roles=[specs.Role(**{**role, **fields})])


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_replica_of_local_cwd_is_a_host_of_the_run(project: Path) -> None:
    interrupt = signal.getsignal(signal.SIGINT)
    with serve(app(), scheduler="local_cwd") as job:
        assert signal.getsignal(signal.SIGINT) is interrupt  # torchx's raises no KeyboardInterrupt
        job.run_spmd()
        assert job.active
    printed = sorted(path.read_text() for path in project.glob("logs/*/attempt_0/*/stdout.log"))
    assert printed == [f"rank {rank} of 4 in workers-{rank // 2}, blue\n" for rank in range(4)]


def test_replicas_that_end_at_once_are_reported_with_their_output(project: Path) -> None:
    entrypoint = project / "entrypoint.sh"
    entrypoint.write_text("#!/bin/sh\necho the environment is missing\nexit 3\n")
    entrypoint.chmod(0o755)
    with pytest.raises(JobStartFailed, match=r"(?s)is FAILED\n.*replica 0: .*the environment is missing"):
        serve(app(entrypoint=str(entrypoint)), scheduler="local_cwd")


PROGRAM = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from tests.end_to_end.test_torchx import app
from meshgate.spmd import serve
if __name__ == "__main__":
    job = serve(app(), scheduler="local_cwd")
    print(job.apply_id, flush=True)
    time.sleep(300)
"""


def test_replicas_end_with_a_driver_that_is_killed(project: Path) -> None:
    (project / "driver.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "driver.py", str(ROOT)]
    with child_process(command, env=environment, stdout=subprocess.PIPE, text=True) as driver:
        processes = find_processes(f"MESHGATE_JOB={driver.stdout.readline().strip()}")
    assert len(processes) >= 3  # the gateway and two hosts
    for process in processes:
        assert process.wait_ended(60)


@pytest.fixture
def remove_containers() -> Iterator[None]:
    """Tests that need it take turns."""
    import docker

    with open(Path(tempfile.gettempdir()) / "meshgate-torchx-containers.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        client = docker.from_env()
        for container in client.containers.list(all=True, filters={"label": "torchx.pytorch.org/role-name=trainer"}):
            container.remove(force=True)
        client.close()


def containers(script: str) -> specs.AppDef:
    """Two containers with this Python, in which two ranks each run the script."""
    interpreter = os.path.realpath(sys.executable)
    seen = {sys.prefix, os.path.dirname(os.path.dirname(interpreter)), *(p for p in sys.path if os.path.isdir(p))}
    mounts = [specs.BindMount(path, path, read_only=True) for path in sorted(seen)]
    environment = {"COLOR": "blue", "PATH": f"{os.path.dirname(sys.executable)}:/usr/bin:/bin"}
    args = ["torchrun", "--nproc-per-node=2", script]
    return app(image="python:3.11-slim", mounts=mounts, env=environment, args=args)


@pytest.mark.docker
@pytest.mark.timeout(1200)
def test_every_container_of_local_docker_is_a_host_of_the_run(
    project: Path, capfd: pytest.CaptureFixture[str], remove_containers: None
) -> None:
    with serve(containers("train.py"), scheduler="local_docker") as job:
        job.run_spmd()
    printed = capfd.readouterr().out
    for rank in range(4):
        assert f"rank {rank} of 4 in workers-{rank // 2}, blue" in printed


@pytest.mark.docker
def test_an_image_without_monarch_is_named_when_the_job_starts(remove_containers: None) -> None:
    """One container: its host may fail while this test looks at it."""
    with pytest.raises(JobStartFailed, match=r"its image python:3\.11-slim lacks torchmonarch"):
        serve(app(image="python:3.11-slim", num_replicas=1, args=["torchrun", "train.py"]), scheduler="local_docker")


@pytest.mark.docker
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.timeout(1200)
def test_ddp_ends_with_equal_weights_in_containers(
    project: Path, capfd: pytest.CaptureFixture[str], remove_containers: None
) -> None:
    (project / "ddp.py").write_text(DDP)
    with serve(containers("ddp.py"), scheduler="local_docker") as job:
        job.run_spmd()
    check_equal_weights(capfd.readouterr().out, ranks=4)
