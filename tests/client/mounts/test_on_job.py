"""The mount methods of a job; real hosts are in ``tests/end_to_end/test_mounts.py``."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from monarch.gather_mount import gather_mount
from monarch.remotemount import remotemount

from meshgate.errors import JobError, PullFailed
from meshgate.mounts.on_job import handles_of, serve_monarchs_mount_functions
from meshgate.mounts.remote import RemoteMountHandle
from meshgate.proxies.client import Client
from tests.client.jobs.fake_job import RUNNING, FakeJob


class MountedHosts:
    _name = "workers"

    def __init__(self, client: Any) -> None:
        self._client = client


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The meshes to which mounts were applied; hosts cannot remove them."""
    applied: list[Any] = []
    monkeypatch.setattr("meshgate.mounts.remote.RemoteMounts.apply", lambda self, hosts, connect: applied.append(hosts))
    monkeypatch.setattr("meshgate.mounts.remote.RemoteMounts.remove", lambda self, hosts: ["workers-1: busy"])
    return applied


def test_a_mount_is_open_from_open_to_close_whatever_close_meets(applied: list[Any], tmp_path: Path) -> None:
    hosts: Any = MountedHosts(type("Client", (), {"connect_beside": None})())
    others: Any = MountedHosts(object())
    mount = RemoteMountHandle(hosts, str(tmp_path))
    assert handles_of([hosts]) == []
    mount.open()
    mount.refresh()
    assert applied == [{"workers": hosts}] * 2
    assert (handles_of([hosts, others]), handles_of([others])) == ([mount], [])
    with pytest.raises(JobError, match=r"cannot remove the mount of '.*' from workers-1: busy"):
        mount.close()
    assert handles_of([hosts]) == []
    with pytest.raises(RuntimeError, match="is not open"):
        mount.refresh()


def test_a_function_that_was_imported_before_serves_hosts_of_a_job(client: Client, tmp_path: Path) -> None:
    hosts = client.attach_hosts("workers", 2)
    for _ in range(2):
        serve_monarchs_mount_functions()
        assert type(remotemount(hosts, str(tmp_path))) is RemoteMountHandle
    with pytest.raises(ValueError, match="name an absolute path on the hosts"):
        gather_mount(hosts, "relative", str(tmp_path))


def test_other_meshes_are_still_monarchs(tmp_path: Path) -> None:
    serve_monarchs_mount_functions()
    with pytest.raises(AttributeError, match="spawn_procs"):
        gather_mount("no mesh", "/data", str(tmp_path / "here"))


class FakeMounts:
    """Remote and gather mounts in one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[str] = []

    def apply(self, hosts: Any, connect: Any) -> None:
        self.calls.append("apply")

    def start(self, hosts: Any) -> None:
        self.calls.append("start")

    def python_of(self, mesh: str) -> str | None:
        return "/data/python" if mesh == "workers" else None

    def remove(self, hosts: Any) -> list[str]:
        self.calls.append("remove")
        return ["workers-1: busy"]

    def close(self) -> None:
        self.calls.append("close")
        if self.error is not None:
            raise self.error


class FakeMesh:
    def with_python_executable(self, python: str) -> str:
        return f"hosts with {python}"


HOSTS: Any = {"workers": FakeMesh(), "readers": "hosts"}


def test_other_arguments_than_monarchs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunk_size'"):
        FakeJob(1).remote_mount(str(tmp_path), python_exe=None, chunk_size=1)


def test_meshes_of_a_mount_with_an_interpreter_run_it() -> None:
    job = FakeJob(1)
    mounts: Any = FakeMounts()
    job._remote_mounts = job._gather_mounts = mounts
    assert job._mount(job, HOSTS) == {"workers": "hosts with /data/python", "readers": "hosts"}
    assert mounts.calls == ["start", "apply"]


def test_the_end_of_a_job_ends_its_mounts_and_names_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    job = FakeJob(1)
    mounts: Any = FakeMounts()
    job._remote_mounts = job._gather_mounts = mounts
    job._unmount(HOSTS)
    assert mounts.calls == ["close", "remove"]
    assert capsys.readouterr().err == "meshgate: cannot end a mount: workers-1: busy\n"


@pytest.mark.parametrize("Error", [PullFailed, RuntimeError, OSError])
def test_a_host_that_cannot_be_reached_does_not_keep_a_job_from_ending(
    capsys: pytest.CaptureFixture[str], Error: type[Exception]
) -> None:
    job = FakeJob(1)
    mounts: Any = FakeMounts(Error("workers-0 was lost"))
    job._remote_mounts = job._gather_mounts = mounts
    job._unmount(HOSTS)
    assert mounts.calls == ["close", "remove"]
    assert "workers-0 was lost" in capsys.readouterr().err


def test_an_interrupt_while_mounts_end_still_ends_the_job_and_removes_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = FakeJob(1)
    job.state(str(tmp_path / "job"))
    monkeypatch.setattr(job, "_unmount", lambda hosts: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        job.kill()
    assert job.allocation not in RUNNING
    assert not job.active
    assert not (tmp_path / "job").exists()


def test_a_job_that_a_signal_handler_kills_while_it_ends_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job = FakeJob(1)
    job.apply()
    ended: list[object] = []
    monkeypatch.setattr(job, "_kill", lambda: ended.append(job.allocation))
    handlers = [job.kill]
    monkeypatch.setattr(job, "_unmount", lambda hosts: handlers.pop()() if handlers else None)
    job.kill()
    assert ended == [job.allocation]


def test_an_interrupt_while_mounts_end_still_leaves_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    client: Any = SimpleNamespace(leave=lambda: left.append("left"))
    job = FakeJob(1)
    monkeypatch.setattr(job, "_unmount", lambda hosts: signal.raise_signal(signal.SIGINT))
    job.apply()
    job._client = client
    job._detached = True
    with pytest.raises(KeyboardInterrupt), job:
        pass
    assert left == ["left"]
    assert job._client is None
