"""Arguments of ``remote_mount``; real hosts are in ``tests/end_to_end/test_mounts.py``."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshgate.errors import JobError
from meshgate.mounts.remote import RemoteMount, RemoteMounts, meshes_of
from meshgate_sync.tree.scan import Limits


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "data/.venv/bin").mkdir(parents=True)
    (tmp_path / "data/.venv/bin/python").write_text("")
    return tmp_path / "data"


def test_the_path_on_the_hosts_is_that_of_the_laptop_by_default(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    assert RemoteMount.from_arguments("data", None, None, None) == RemoteMount(str(source), str(source))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("absent", None, None, None), r"remote_mount\('absent'\): there is no such directory"),
        (("data", None, None, "bin/python"), "python_exe='bin/python' is not in it"),
        (("data", "~/data", None, None), r"remote_mount\(mntpoint='~/data'\): ~ is not expanded on the hosts"),
        (("data", "/x/$SUBDIR", None, ".venv/bin/python"), r"with \$SUBDIR, pass python_exe=None"),
    ],
)
@pytest.mark.usefixtures("source")
def test_unusable_arguments_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        RemoteMount.from_arguments(*arguments)


def test_the_last_mount_with_an_interpreter_decides_what_a_mesh_runs() -> None:
    mounts = RemoteMounts()
    mounts.add(RemoteMount("/s", "/a", None, "python"))
    mounts.add(RemoteMount("/s", "/b", ("trainers",), "bin/python"))
    mounts.add(RemoteMount("/s", "/c"))
    assert (mounts.python_of("trainers"), mounts.python_of("readers")) == ("/b/bin/python", "/a/python")


def test_a_directory_that_is_too_large_is_refused_before_anything_is_sent(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "big").write_bytes(b"12")
    monkeypatch.setattr("meshgate.code_sync.push.CodeSync.DATA_LIMITS", Limits(bytes=1))
    mounts = RemoteMounts()
    mounts.add(RemoteMount(str(source), "/data"))
    with pytest.raises(JobError, match=r"remote_mount\(.*/data'\): it has 0 MB, the limit is 0 MB; mount a part of it"):
        mounts.apply({}, lambda: pytest.fail("connected"))
    assert os.listdir(source)


def test_a_mount_that_failed_on_some_hosts_is_mounted_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = RemoteMounts()
    mounts.add(RemoteMount(str(source), "/data"))
    hosts: Any = {"workers": object()}
    client: Any = contextlib.nullcontext()
    mounted: list[str] = []

    def mount(self: RemoteMounts, mount: RemoteMount, *_: object) -> str:
        (version,) = {self._digest(mount)}
        mounted.append(version)
        if (source / "fails").exists():
            raise JobError("one host failed")
        return version

    monkeypatch.setattr(RemoteMounts, "_mount", mount)
    monkeypatch.setattr(RemoteMounts, "_wanted", lambda self, hosts, mesh, digest: (None, digest, 0))
    mounts.apply(hosts, lambda: client)
    mounts.apply(hosts, lambda: client)
    assert len(mounted) == 1
    (source / "fails").touch()
    with pytest.raises(JobError):
        mounts.apply(hosts, lambda: client)
    assert ("/data", "workers") in mounts._mounted  # the end of the job removes it
    (source / "fails").unlink()
    mounts.apply(hosts, lambda: client)
    assert mounted == [mounted[0], mounted[1], mounted[0]]


def test_mounts_of_hosts_that_were_shut_down_need_no_removal() -> None:
    mounts = RemoteMounts()
    client: Any = None
    mounts._mounted["/data", "workers"] = (client, "version", 0)
    down: Any = SimpleNamespace(_owned=SimpleNamespace(remote=SimpleNamespace(stopped="the hosts were shut down")))
    assert mounts.remove({"workers": down}) == []
    assert not mounts._mounted


def test_what_is_saved_during_a_mount_is_mounted_next(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = RemoteMounts()
    mounts.add(RemoteMount(str(source), "/data"))
    hosts: Any = {"workers": object()}
    client: Any = contextlib.nullcontext()
    versions = iter(["of a save during the scan", "next"])
    monkeypatch.setattr(RemoteMounts, "_mount", lambda *_: next(versions))
    monkeypatch.setattr(RemoteMounts, "_wanted", lambda self, hosts, mesh, digest: (None, digest, 0))
    mounts.apply(hosts, lambda: client)
    mounts.apply(hosts, lambda: client)
    assert next(versions, None) is None


def test_without_names_a_mount_is_for_all_meshes() -> None:
    assert meshes_of("remote_mount", None, {"a": 1, "b": 1}) == ["a", "b"]
    assert meshes_of("remote_mount", ["b"], {"a": 1, "b": 1}) == ["b"]


def test_an_unknown_mesh_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"gather_mount\(meshes=\['c'\]\): unknown mesh 'c'; the job has a, b"):
        meshes_of("gather_mount", ["c"], {"b": 1, "a": 1})
