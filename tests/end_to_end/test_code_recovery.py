"""Code reaches the hosts although relays die, hosts end, and files change while they are read."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from meshgate import (
    Client,
    MeshgateError,
    ProcessJob,
    StaleCodeError,
    StepFailedError,
    SupervisionError,
    UrlDialer,
    job_loads,
)
from meshgate.code_sync.project import Tree
from meshgate.code_sync.push import CodeSync
from meshgate.code_sync.session_sync import sync_for
from meshgate.testing import NetworkProxy
from meshgate_sync.upload import Sender
from tests.end_to_end.probes import Reader
from tests.projects import project_in
from tests.waiting import DEADLINE, wait_for

PROMPT = 45.0  # seconds: half of what a relay may take, and far less than a version may


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with project_in(tmp_path / "project", monkeypatch, {"note": "one"}) as directory:
        yield directory


@pytest.fixture
def job(project: Path) -> Iterator[ProcessJob]:
    with ProcessJob({"workers": 2}) as job:
        job.state()
        yield job


def notes(hosts: Any, name: str = "note") -> list[str]:
    return list(hosts.spawn_procs().spawn("reader", Reader).read.call(name).get(timeout=60).values())


def test_a_host_whose_relay_died_gets_a_new_relay_and_the_newest_version(job: Any, project: Path) -> None:
    hosts = job.state().workers
    job.sync(quiet=True)
    reader = hosts.spawn_procs().spawn("reader", Reader)
    assert list(reader.end_siblings.call().get(timeout=60).values()) == [1, 1]
    (project / "note").write_text("two")
    sync_for(job._client, None).code.push(wait=False)
    assert notes(hosts) == ["two", "two"]
    assert list(reader.read.call("note").get(timeout=60).values()) == ["one", "one"]


def test_code_that_was_removed_from_a_host_is_named_and_synced_again(job: Any) -> None:
    hosts = job.state().workers
    job.sync(quiet=True)
    hosts.slice(hosts=0).spawn_procs().spawn("reader", Reader).remove_snapshots.call().get(timeout=60)
    with pytest.raises(MeshgateError, match=r"version .* (is not in|has been removed from) .*sync again"):
        notes(hosts)

    def have_it_again() -> bool:
        try:
            job.sync(quiet=True)
            return notes(hosts) == ["one", "one"]
        except MeshgateError:  # before the host's agent has looked, or while this driver learns of it
            return False

    wait_for(have_it_again, "the code to be synced again")


def test_a_sync_names_a_lost_host_and_does_not_delay_the_others(job: Any, project: Path) -> None:
    hosts = job.state().workers
    job.sync(quiet=True)
    os.kill(host_processes(job)[1], signal.SIGKILL)
    with pytest.raises(MeshgateError, match="workers-1"):
        notes(hosts)
    (project / "note").write_text("two")
    started = time.monotonic()
    with pytest.raises(SupervisionError, match=r"workers-1: the host .* was killed") as caught:
        job.sync(quiet=True)
    failure = caught.value.failure
    assert failure is not None
    assert (failure.mesh_name, failure.hosts) == ("workers", {1: "workers-1"})
    assert "was killed by SIGKILL" in failure.reason
    assert time.monotonic() - started < PROMPT
    assert notes(hosts.slice(hosts=slice(0, 1))) == ["two"]


def test_a_host_that_is_killed_during_a_sync_is_named_with_the_reason(job: Any, project: Path) -> None:
    (project / "large").write_bytes(os.urandom(40_000_000))
    code = sync_for(job._client, None).code
    killed: list[int] = []

    def kill_once(status: Any) -> None:
        if not killed:
            killed.append(host_processes(job)[1])
            os.kill(killed[0], signal.SIGKILL)

    def push_until_lost() -> None:
        code.push(progress=kill_once)
        kill_once(None)  # if the version had reached the hosts before this process looked
        for number in count():  # the agent of a killed host may take another version before it ends
            (project / "note").write_text(f"again {number}")
            code.push()
            assert time.monotonic() < deadline

    job.state().workers.initialized.get(timeout=60)
    deadline = time.monotonic() + DEADLINE
    with pytest.raises(SupervisionError, match=r"workers-1: the host .* was killed by SIGKILL") as caught:
        push_until_lost()
    assert killed
    assert caught.value.failure is not None
    assert caught.value.failure.hosts == {1: "workers-1"}


def test_a_host_lost_before_the_first_sync_does_not_delay_the_others(job: Any) -> None:
    hosts = job.state().workers
    hosts.initialized.get(timeout=60)
    os.kill(host_processes(job)[1], signal.SIGKILL)
    with pytest.raises(MeshgateError, match="workers-1"):
        notes(hosts)
    started = time.monotonic()
    with pytest.raises(SupervisionError, match=r"workers-1: the host .* was killed"):
        job.sync(quiet=True)
    assert notes(hosts.slice(hosts=slice(0, 1))) == ["one"]
    assert time.monotonic() - started < PROMPT


def test_a_sync_without_attached_hosts_reports_why(job: Any) -> None:
    job.state().workers.initialized.get(timeout=60)
    for pid in host_processes(job):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not job.status().hosts, "the hosts to be lost")
    later = job_loads(job.dumps())
    later.state(cached_path=None)
    started = time.monotonic()
    message = r"no host received code version .*\n.*workers-0 .* was killed.*end this job and start it"
    with pytest.raises(StepFailedError, match=message):
        later.sync(quiet=True)
    assert time.monotonic() - started < PROMPT


def host_processes(job: Any) -> list[int]:
    """The host processes of the job, in rank order."""
    found = {}
    gateway = job._gateway.record.pid
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().split(b"\0")
            parent = command.with_name("stat").read_text(errors="replace").rpartition(")")[2].split()[1]
        except OSError:
            continue
        if b"meshgate_worker" in words and int(parent) == gateway:
            found[words[words.index(b"--name") + 1]] = int(command.parent.name)
    return [pid for _, pid in sorted(found.items())]


def test_a_file_that_changes_while_it_is_sent_is_in_the_next_version(
    job: Any, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = project / "large"
    large.write_bytes(os.urandom(5_000_000))
    wanted = Sender.answer_wants
    changes = iter(["changed meanwhile"])

    def wanted_and_changed(self: Sender, header: Any, digests: bytes) -> Any:
        if text := next(changes, None):
            large.write_text(text)
        return wanted(self, header, digests)

    monkeypatch.setattr(Sender, "answer_wants", wanted_and_changed)
    hosts = job.state().workers
    sync_for(job._client, None).code.push(wait=False)
    assert notes(hosts, "large") == ["changed meanwhile"] * 2  # the spawn had named the earlier version
    assert job.sync(quiet=True).ready == 2


def test_a_file_that_keeps_changing_is_named_soon(job: Any, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Sender.answer_wants

    def wanted_and_changed(self: Sender, header: Any, digests: bytes) -> Any:
        (project / "busy.log").write_bytes(os.urandom(3_000_000))
        return wanted(self, header, digests)

    hosts = job.state().workers
    job.sync(quiet=True)
    (project / "busy.log").write_bytes(os.urandom(3_000_000))
    with monkeypatch.context() as patched:
        patched.setattr(Sender, "answer_wants", wanted_and_changed)
        sync_for(job._client, None).code.push(wait=False)
        with pytest.raises(MeshgateError, match=r"busy\.log changes faster"):
            notes(hosts)  # it is already waiting when the version is rejected
        (project / "busy.log").write_bytes(os.urandom(3_000_000))
        with pytest.raises(StaleCodeError, match=r"busy\.log changes faster"):
            job.sync(quiet=True)
    assert job.sync(quiet=True).ready == 2


def test_a_gateway_that_cannot_store_a_version_reports_it_and_stores_the_next(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.write_text("a file instead of a directory")
    monkeypatch.setenv("MESHGATE_HOME", str(home))
    with ProcessJob({"workers": 1}) as job:
        hosts = job.state().workers
        with pytest.raises(StaleCodeError, match=r"the gateway: .*home"):
            job.sync(quiet=True)
        with pytest.raises(MeshgateError, match="the gateway cannot use version"):
            notes(hosts)
        home.unlink()
        assert job.sync(quiet=True).ready == 1
        assert notes(hosts) == ["one"]


def test_a_sync_resumes_after_a_lost_connection(job: Any, project: Path) -> None:
    (project / "large").write_bytes(os.urandom(12_000_000))
    with NetworkProxy("127.0.0.1", urlsplit(job.gateway_url).port or 0) as proxy:
        dialer = UrlDialer(f"ws://127.0.0.1:{proxy.port}", job._gateway.record.token)
        with Client(dialer) as client:
            client.attach_hosts("workers", 2)
            proxy.cut_after(5_000_000, "up")
            report = CodeSync(client, Tree(project)).push()
            assert (report.ready, report.hosts) == (2, 2)
            assert report.nbytes < 12_500_000  # nothing was sent twice
            seen = client.statistics()
            assert seen.connections == 2
            assert seen.frames_replayed > 0


def test_two_drivers_sync_two_versions_to_one_job_concurrently(job: Any, tmp_path: Path) -> None:
    dialer = UrlDialer(job.gateway_url, job._gateway.record.token)
    projects = [tmp_path / "first", tmp_path / "second"]
    with Client(dialer) as one, Client(dialer) as two:
        drivers = []
        for client, project in zip((one, two), projects, strict=True):
            project.mkdir()
            drivers.append((client.attach_hosts("workers", 2), CodeSync(client, Tree(project)), project))
        for turn in range(2):
            for _, code, project in drivers:
                (project / "note").write_text(f"{project.name} {turn}")
                code.push(wait=False)
            assert [notes(hosts) for hosts, _, _ in drivers] == [[f"first {turn}"] * 2, [f"second {turn}"] * 2]
