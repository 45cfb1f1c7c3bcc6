"""The mount methods of a job; real hosts are in ``tests/end_to_end/test_mounts.py``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from monarch.gather_mount import gather_mount
from monarch.remotemount import remotemount

from meshgate.errors import JobError, PullFailed
from meshgate.mounts.on_job import (
    GatherMount,
    GatherMounts,
    RemoteMountHandle,
    handles_of,
    serve_monarchs_mount_functions,
)
from meshgate.proxies.client import Client
from meshgate.session.futures import FutureProxy
from tests.client.jobs.fake_job import RUNNING, FakeJob


class MountedHosts:
    _name = "workers"

    def __init__(self, client: Any) -> None:
        self._client = client


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The meshes to which mounts were applied; hosts cannot remove them."""
    applied: list[Any] = []
    monkeypatch.setattr("meshgate.mounts.on_job.RemoteMounts.apply", lambda self, hosts, connect: applied.append(hosts))
    monkeypatch.setattr("meshgate.mounts.on_job.RemoteMounts.remove", lambda self, hosts: ["workers-1: busy"])
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


def test_a_host_that_cannot_be_read_does_not_keep_a_job_from_ending(capsys: pytest.CaptureFixture[str]) -> None:
    job = FakeJob(1)
    mounts: Any = FakeMounts(PullFailed("workers-0 was lost"))
    job._remote_mounts = job._gather_mounts = mounts
    job._unmount(HOSTS)
    assert mounts.calls == ["close", "remove"]
    assert "workers-0 was lost" in capsys.readouterr().err


def test_an_interrupt_while_mounts_end_still_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = FakeJob(1)
    job.apply()
    monkeypatch.setattr(job, "_unmount", lambda hosts: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        job.kill()
    assert job.allocation not in RUNNING


class FakeHosts:
    """A mesh of hosts, its processes and its readers in one. ``files`` are below ``/out``; ``failure`` is the reply."""

    def __init__(self, count: int, rank: int = 0) -> None:
        self.count, self.rank = count, rank
        self.files: dict[str, bytes] = {}
        self.failure: tuple[str, str] | None = None
        self.replies: dict[str, tuple[str, str]] = {}  # to reads of a file
        self.asked: list[str] = []
        self.spawned = self.stopped = 0
        self.closed = False
        self.slices: dict[int, FakeHosts] = {}

    def __len__(self) -> int:
        return self.count

    @property
    def sizes(self) -> dict[str, int]:
        return {"hosts": self.count}

    def slice(self, hosts: slice) -> FakeHosts:
        return self.slices.setdefault(hosts.start, FakeHosts(1, hosts.start))

    def spawn_procs(self, name: str) -> FakeHosts:
        self.spawned += 1
        return self

    def spawn(self, name: str, Class: type) -> FakeHosts:
        return self

    def stop(self) -> None:
        self.stopped += 1

    @property
    def _client(self) -> Any:
        return self

    @property
    def listing(self) -> Any:
        def call_one(path: str) -> FutureProxy[Any]:
            self.asked.append(path)
            rows = [(name, "file", len(data), 5, 0o644, "") for name, data in self.files.items()]
            return FutureProxy.resolved((f"host-{self.rank}", self.failure or rows))

        return type("Endpoint", (), {"call_one": staticmethod(call_one)})

    @property
    def read(self) -> Any:
        def call_one(path: str, name: str, offset: int, length: int, size: int, mtime: int) -> FutureProxy[Any]:
            assert size < 0, "files may grow"
            return FutureProxy.resolved(self.replies.get(name) or self.files[name][offset : offset + length])

        return type("Endpoint", (), {"call_one": staticmethod(call_one)})


@pytest.fixture
def mounts(tmp_path: Path) -> GatherMounts:
    mounts = GatherMounts()
    mounts.add(GatherMount("/out/$SUBDIR", str(tmp_path / "here")))
    return mounts


def test_each_host_has_a_directory_of_its_own(mounts: GatherMounts, tmp_path: Path) -> None:
    hosts: Any = FakeHosts(2)
    hosts.slice(hosts=slice(1, 2)).files = {"log": b"1"}
    mounts.start({"workers": hosts})
    assert (tmp_path / "here/hosts_1/log").read_bytes() == b"1"
    assert hosts.slices[0].asked == ["/out/hosts_0"]
    hosts.slices[0].files = {"log": b"0"}
    mounts.close()
    assert (tmp_path / "here/hosts_0/log").read_bytes() == b"0"
    assert (hosts.slices[0].spawned, hosts.slices[0].stopped) == (1, 1)
    mounts.close()


def test_several_meshes_have_a_directory_each(mounts: GatherMounts, tmp_path: Path) -> None:
    meshes: Any = {"a": FakeHosts(1), "b": FakeHosts(1)}
    for hosts in meshes.values():
        hosts.slice(hosts=slice(0, 1)).files = {"log": b"x"}
    mounts.start(meshes)
    mounts.close()
    assert sorted(str(path.relative_to(tmp_path / "here")) for path in tmp_path.rglob("log")) == [
        "a/hosts_0/log",
        "b/hosts_0/log",
    ]


def test_a_directory_that_is_not_there_yet_is_waited_for(mounts: GatherMounts) -> None:
    hosts: Any = FakeHosts(1)
    hosts.slice(hosts=slice(0, 1)).failure = ("absent", "")
    mounts.start({"workers": hosts})
    mounts.close()


def test_a_file_that_is_replaced_while_it_is_read_is_left_for_the_next_round(
    mounts: GatherMounts, tmp_path: Path
) -> None:
    hosts: Any = FakeHosts(1)
    host = hosts.slice(hosts=slice(0, 1))
    host.files, host.replies = {"log": b"1", "result": b"2"}, {"log": ("changed", "log")}
    mounts.start({"workers": hosts})
    assert sorted(path.name for path in (tmp_path / "here/hosts_0").iterdir()) == ["result"]
    host.replies = {}
    mounts.close()
    assert (tmp_path / "here/hosts_0/log").read_bytes() == b"1"


def test_a_host_that_fails_delays_no_other_and_gets_another_reader(mounts: GatherMounts, tmp_path: Path) -> None:
    hosts: Any = FakeHosts(2)
    hosts.slice(hosts=slice(0, 1)).failure = ("forbidden", "denied")
    hosts.slice(hosts=slice(1, 2)).files = {"log": b"1"}
    with pytest.raises(PullFailed, match="host-0 may not read /out/hosts_0"):
        mounts.start({"workers": hosts})
    assert (tmp_path / "here/hosts_1/log").exists()
    hosts.slices[0].failure = None
    mounts.start({"workers": hosts})
    mounts.close()
    assert (hosts.slices[0].spawned, hosts.slices[1].spawned) == (2, 1)


@pytest.mark.parametrize("interval", [0.01])
def test_changes_follow_and_a_problem_is_reported_once(
    mounts: GatherMounts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interval: float,
) -> None:
    monkeypatch.setattr("meshgate.mounts.on_job.INTERVAL", interval)
    hosts: Any = FakeHosts(1)
    mounts.start({"workers": hosts})
    host = hosts.slices[0]
    host.failure = ("forbidden", "denied")
    rounds = host.spawned
    while host.spawned < rounds + 3:
        mounts._stop.wait(interval)
    host.failure, host.files = None, {"log": b"new"}
    while not (tmp_path / "here/hosts_0/log").exists():
        mounts._stop.wait(interval)
    assert capsys.readouterr().err.count("may not read") == 1
    thread: Any = mounts._thread
    hosts.closed = True
    thread.join(60)
    assert not thread.is_alive()
    again: Any = FakeHosts(1)  # of another session
    mounts.start({"workers": again})
    again.slices[0].files = {"later": b"new"}
    while not (tmp_path / "here/hosts_0/later").exists():
        mounts._stop.wait(interval)
    again.closed = True


@pytest.mark.parametrize(
    ("remote", "local", "message"),
    [("out", "here", "name an absolute path on the hosts"), ("/out", "file", "it exists and is not a directory")],
)
def test_unusable_arguments_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: str, local: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=message):
        GatherMount.from_arguments(remote, local, None)
