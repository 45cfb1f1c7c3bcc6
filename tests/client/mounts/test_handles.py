"""What Monarch's mount functions return; real hosts are in ``tests/end_to_end/test_mounts.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from monarch.gather_mount import gather_mount
from monarch.remotemount import remotemount

from meshgate.errors import JobError
from meshgate.mounts.handles import RemoteMountHandle, handles_of, serve_monarchs_mount_functions
from meshgate.proxies.client import Client


class FakeHosts:
    _name = "workers"

    def __init__(self, client: Any) -> None:
        self._client = client


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The meshes to which mounts were applied; hosts cannot remove them."""
    applied: list[Any] = []
    monkeypatch.setattr(
        "meshgate.mounts.handles.RemoteMounts.apply", lambda self, hosts, connect: applied.append(hosts)
    )
    monkeypatch.setattr("meshgate.mounts.handles.RemoteMounts.remove", lambda self, hosts: ["workers-1: busy"])
    return applied


def test_a_mount_is_open_from_open_to_close_whatever_close_meets(applied: list[Any], tmp_path: Path) -> None:
    hosts: Any = FakeHosts(type("Client", (), {"connect_beside": None})())
    others: Any = FakeHosts(object())
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
