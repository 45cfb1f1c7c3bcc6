"""Directories of the laptop on real hosts, and of the hosts on the laptop."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from monarch.gather_mount import gather_mount
from monarch.remotemount import remotemount

from meshgate import ProcessJob
from meshgate.errors import JobError
from tests.end_to_end.probes import Inspector


def test_mounted_directories_follow_their_sources_until_the_job_ends(tmp_path: Path) -> None:
    source = tmp_path / "data"
    (source / ".venv/bin").mkdir(parents=True)
    (source / "x").write_text("1")
    (source / ".gitignore").write_text("*")
    (source / "absolute").symlink_to("/etc/hosts")
    python = source / ".venv/bin/python"
    python.write_text(f'#!/bin/sh\nFROM_MOUNT=yes exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with ProcessJob({"workers": 2}) as job:
        job.remote_mount(str(source), str(tmp_path / "far/data"))
        job.remote_mount(str(source), str(tmp_path / "far/$SUBDIR"), python_exe=None)
        job.gather_mount(str(tmp_path / "out/$SUBDIR"), str(tmp_path / "here"))
        hosts = job.state().workers
        files = hosts.spawn_procs().spawn("files", Inspector)
        assert files.variable.call("FROM_MOUNT").get().item(hosts=1) == "yes"
        second = files.slice(hosts=1)
        assert second.read.call_one(f"{tmp_path}/far/hosts_1/x").get() == "1"
        assert os.readlink(tmp_path / "far/hosts_0/absolute") == "/etc/hosts"

        (source / "x").write_text("2")
        job.state()
        assert second.read.call_one(f"{tmp_path}/far/hosts_1/x").get() == "2"
        assert second.read.call_one(f"{tmp_path}/far/data/x").get() == "2"

        second.write.call_one(f"{tmp_path}/out/hosts_1/step/result", "early").get()
        job.state()
        assert (tmp_path / "here/hosts_1/step/result").read_text() == "early"
        files.slice(hosts=0).write.call_one(f"{tmp_path}/out/hosts_0/result", "late").get()
    assert (tmp_path / "here/hosts_0/result").read_text() == "late"
    assert os.listdir(tmp_path / "far") == []


def test_a_path_that_a_host_cannot_mount_is_reported_with_its_host(
    job: ProcessJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_remote_mounts", None)
    (tmp_path / "source").mkdir()
    (tmp_path / "taken/x").mkdir(parents=True)
    job.remote_mount(str(tmp_path / "source"), str(tmp_path / "taken"), python_exe=None)
    with pytest.raises(JobError, match=r"failed on workers-0: .*/taken exists there and is not a mount; remove it"):
        job.state()


def test_monarchs_mount_functions_work_with_hosts_of_a_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "data"
    source.mkdir()
    (source / "x").write_text("1")
    with ProcessJob({"workers": 3}) as job:
        hosts = job.state().workers
        files = hosts.spawn_procs().spawn("files", Inspector)
        mount = remotemount(hosts.slice(hosts=slice(1, 3)), str(source), str(tmp_path / "far/$SUBDIR"))
        with pytest.raises(RuntimeError, match="is not open: call open"):
            mount.refresh()
        mount.open()
        assert sorted(os.listdir(tmp_path / "far")) == ["hosts_0", "hosts_1"]
        (source / "x").write_text("2")
        mount.refresh(mount.sourcepath)
        third = files.slice(hosts=2)
        assert third.read.call_one(f"{tmp_path}/far/hosts_1/x").get() == "2"
        mount.close()
        assert os.listdir(tmp_path / "far") == []

        third.write.call_one(f"{tmp_path}/out/result", "early").get()
        with gather_mount(hosts.slice(hosts=2), f"{tmp_path}/out/$SUBDIR", str(tmp_path / "here")):
            assert (tmp_path / "here/result").read_text() == "early"
            third.write.call_one(f"{tmp_path}/out/result", "later").get()
        assert (tmp_path / "here/result").read_text() == "later"

        mount.open()
        gather_mount(hosts, f"{tmp_path}/out", str(tmp_path / "all"))
        third.write.call_one(f"{tmp_path}/out/result", "at the end").get()
    assert os.listdir(tmp_path / "far") == []
    assert (tmp_path / "all/hosts_0/result").read_text() == "at the end"
    assert "mount" not in capfd.readouterr().err
