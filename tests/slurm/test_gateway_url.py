"""A gateway on the login node that submits jobs for the holder of a token, as a user of the cluster, and a driver on a
laptop that has its URL and that token."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import shutil
import signal
import site
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster import DEADLINE, DISTURBED, KIT, laptop, queue, run
from tests.waiting import wait_for

USER = "meshgate-test"
URL = "ws://10.78.0.1:8443"  # the login node, as the laptop reaches it
LARGE = ("torch", "pyarrow", "playwright", "sympy", "matplotlib", "jedi", "fontTools", "mypy", "*__mypyc.*")
TOKEN, OPERATOR = "the token of the caller", "the-token-of-the-gateway"

PROGRAM = """
import os, sys, warnings
warnings.filterwarnings("ignore", message=".*unencrypted")
from meshgate import Actor, JobError, JobStartFailed, SlurmJob, endpoint

class Trainer(Actor):
    @endpoint
    def where(self):
        return os.uname().nodename, os.getuid()

def make(**options):
    here = os.path.dirname(os.path.abspath(__file__))
    return SlurmJob(
        options.pop("meshes", {{"trainers": 2}}), gateway_url={url!r}, job_name=sys.argv[1], exclusive=False,
        sync_dirs=[here], slurm_args=["--exclude={disturbed}"], **{{"time_limit": "10", **options}},
    )

if __name__ == "__main__":
"""


@dataclass
class Gateway:
    process: subprocess.Popen[str]
    log: Path
    command: list[str]

    def restart(self) -> None:
        """Another process, as after an update of the operator's."""
        self.stop(signal.SIGKILL)
        self.process = start(self.command, self.log)

    def stop(self, how: int = signal.SIGTERM) -> None:
        for pid in children(self.process.pid):  # the supervisor, in the machine's namespaces
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        self.process.wait(DEADLINE)

    def audits(self) -> list[dict[str, str]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == "audit"]


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found] or [pid]


def start(command: list[str], log: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "MESHGATE_TOKEN": OPERATOR, "HOME": str(log.parent)}  # where its records are
    with log.open("a") as output:
        before = log.stat().st_size
        process = subprocess.Popen(command, stdout=output, stderr=output, text=True, env=environment)
    wait_for(
        lambda: '"event": "serving"' in log.read_text()[before:] or process.poll() is not None, "the gateway to serve"
    )
    assert process.poll() is None, log.read_text()
    return process


@pytest.fixture
def user() -> Iterator[pwd.struct_passwd]:
    """A user of the cluster, whose home has a Python with meshgate that it may run. Tests that need it take turns."""
    with open(Path(tempfile.gettempdir()) / "meshgate-slurm-user.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_user()  # of a test that was killed
        run("useradd", "--create-home", USER)
        try:
            yield pwd.getpwnam(USER)
        finally:
            remove_user()


def remove_user() -> None:
    """Once the last process of the user has ended: those on nodes do a moment after their job."""

    def removed() -> bool:
        done = subprocess.run(["userdel", "--remove", USER], capture_output=True, text=True, check=False)
        assert done.returncode in (0, 6, 8), done.stderr  # there is no such user; its processes run
        return done.returncode != 8

    wait_for(removed, "the last process of the user to end")


def python_of(home: Path) -> Path:
    """A Python like this one below ``home``: the installation of this one may be private to its owner."""
    base, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    copy = home / "python"
    leave_out = shutil.ignore_patterns("site-packages", "test", "__pycache__", "idlelib")
    shutil.copytree(base / "lib" / version, copy / "lib" / version, ignore=leave_out, symlinks=True)
    for library in (base / "lib").glob("libpython*.so*"):
        shutil.copy2(library, copy / "lib", follow_symlinks=False)
    packages = copy / "lib" / version / "site-packages"
    own = Path(site.getsitepackages()[0])
    if all(parent.stat().st_mode & stat.S_IXOTH for parent in own.parents):
        packages.mkdir()
        (packages / "meshgate-test.pth").write_text(f"import site; site.addsitedir({str(own)!r})\n")
    else:  # of a checkout that is private to its owner
        shutil.copytree(own, packages, ignore=shutil.ignore_patterns(*LARGE, "*.pth", "__pycache__"), symlinks=True)
        for root in (own / "_meshgate.pth").read_text().split():
            shutil.copytree(root, packages, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (copy / "bin").mkdir()
    shutil.copy2(base / "bin" / version, copy / "bin" / version)
    python = copy / "bin" / "python"
    libraries = f'export LD_LIBRARY_PATH="{copy}/lib"'
    python.write_text(f'#!/bin/sh\n{libraries}\nexec "{copy}/bin/{version}" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture
def gateway(user: pwd.struct_passwd, tmp_path: Path) -> Iterator[Gateway]:
    policy = {
        "callers": [
            {"name": "alice", "token_sha256": hashlib.sha256(TOKEN.encode()).hexdigest(), "user": USER},
        ],
        "python": str(python_of(Path(user.pw_dir))),
        "options": ["--exclude"],
        "max_nodes": 2,
        "max_time": "30",
        "max_jobs_per_caller": 1,
    }
    (tmp_path / "policy.json").write_text(json.dumps(policy))
    command = [
        *(str(KIT / "on"), "login", sys.executable, "-m", "meshgate_gateway", "--host", "0.0.0.0", "--port", "8443"),
        *("--slurm-policy", str(tmp_path / "policy.json"), "--warm-engines", "0", "--log-format", "json"),
    ]
    log = tmp_path / "gateway.log"
    running = Gateway(start(command, log), log, command)
    try:
        yield running
    finally:
        running.stop()


def program(directory: Path, body: str) -> Path:
    file = directory / "program.py"
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    file.write_text(PROGRAM.format(url=URL, disturbed=DISTURBED) + lines)
    return file


def output(file: Path, *arguments: str, token: str = TOKEN) -> str:
    with laptop(file, *arguments, variables={"MESHGATE_TOKEN": token}) as process:
        out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
    return out


def test_a_laptop_with_a_url_and_a_token_runs_as_its_user_on_nodes(
    name: str, tmp_path: Path, gateway: Gateway, user: pwd.struct_passwd
) -> None:
    body = """
with make() as job:
    trainers = job.state().trainers.spawn_procs().spawn("trainers", Trainer)
    print(sorted(value for _, value in trainers.where.call().get()))
    print(job.job_id)
"""
    found, number = output(program(tmp_path, body), name).splitlines()
    nodes, users = zip(*eval(found), strict=True)
    assert len(set(nodes)) == 2
    assert set(users) == {user.pw_uid}
    assert not queue(name)
    assert f"UserId={USER}(" in run("scontrol", "show", "job", number)
    done = [(audit["action"], audit["outcome"], audit["caller"]) for audit in gateway.audits()]
    assert done[0] == ("start job", "allowed", "caller:alice")
    assert done[-1] == ("end job", "allowed", "caller:alice")
    assert list((Path(user.pw_dir) / ".meshgate" / "slurm").glob("*-*")) == []


def test_what_the_policy_does_not_allow_is_refused_by_name(name: str, tmp_path: Path, gateway: Gateway) -> None:
    body = """
for options in (dict(meshes={"a": 3}, partition="gpu"), dict(time_limit="31"), dict(python_exe="/usr/bin/python3")):
    try:
        make(**options).apply()
    except JobStartFailed as error:
        print(error)
"""
    size, limit, python = output(program(tmp_path, body), name).splitlines()
    assert "3 nodes exceed the limit of 2; partition 'gpu' is not allowed (allowed: none)" in size
    assert "time_limit 31 exceeds the limit of 30" in limit
    assert "python_exe '/usr/bin/python3' is not allowed" in python
    body = """
try:
    make().apply()
except (JobError, ConnectionError) as error:
    print(error)
except Exception as error:
    print(type(error).__name__, error)
"""
    assert "AuthenticationError" in (stranger := output(program(tmp_path, body), name, token="x" * 20))
    assert "no caller of this gateway has the presented token: set MESHGATE_TOKEN to yours" in stranger
    assert "runs as root, and no job may" in output(program(tmp_path, body), name, token=OPERATOR)
    assert not queue(name)


def test_a_saved_job_survives_the_gateway_and_is_ended_by_another_program(
    name: str, tmp_path: Path, gateway: Gateway
) -> None:
    body = """
job = make(meshes={"trainers": 1})
trainers = job.state().trainers.spawn_procs().spawn("trainers", Trainer)
print(job.job_id, trainers.where.call_one().get()[0])
try:
    make(meshes={"trainers": 1}).apply()
except JobStartFailed as error:
    print(error)
if sys.argv[2] == "end":
    job.kill()
"""
    file = program(tmp_path, body)
    first, refused = output(file, name, "leave").splitlines()
    assert f"these of caller:alice have not ended: {first.split()[0]}. End one first" in refused
    gateway.restart()
    assert queue(name) == ["RUNNING"]
    assert output(file, name, "end").splitlines() == [first, refused]
    assert not queue(name)


def test_a_batch_job_runs_without_a_gateway_and_is_cancelled_through_the_url(
    name: str, tmp_path: Path, gateway: Gateway
) -> None:
    body = """
job = make(meshes={"trainers": 1})
job.apply("sleep 600")
print(job.job_id)
job.kill()
"""
    number = output(program(tmp_path, body), name).strip()
    assert not queue(name)
    wait_for(lambda: "JobState=CANCELLED" in run("scontrol", "show", "job", number), "Slurm to cancel the job")


def test_the_end_of_the_jobs_own_gateway_reaches_the_driver(name: str, tmp_path: Path, gateway: Gateway) -> None:
    body = """
with make(meshes={"trainers": 1}) as job:
    trainers = job.state().trainers.spawn_procs().spawn("trainers", Trainer)
    print(job._job.pid, flush=True)
    sys.stdin.readline()
    try:
        print(trainers.where.call_one().get())
    except Exception as error:
        print(type(error).__name__, error)
"""
    variables = {"MESHGATE_TOKEN": TOKEN}
    with laptop(program(tmp_path, body), name, variables=variables, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        run(str(KIT / "on"), "login", "kill", "-KILL", process.stdout.readline().strip())
        out, err = process.communicate("\n", timeout=DEADLINE)
    assert process.returncode == 0, err
    assert out.startswith("GatewayLostError"), out
    assert "its process on login has ended" in out
    wait_for(lambda: not queue(name), "the job to end with its gateway")
