"""Which of Monarch's mounts become ours; what they do is in ``tests/end_to_end/test_mounts.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from monarch.gather_mount import gather_mount
from monarch.remotemount import remotemount

from meshgate.mounts.handles import RemoteMountHandle
from meshgate.mounts.monarch_functions import serve_monarchs_mount_functions
from meshgate.proxies.client import Client


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
