"""``job.gather_mount``: a copy on the laptop of directories of the hosts, which follows them.

What is new on a host, or has changed, is pulled again and again. So a file is complete when it appears, may be some
seconds old, and stays when the host removes it or ends.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshgate.errors import MeshgateError, PullFailed
from meshgate.mounts import forget_handle, open_handles
from meshgate.mounts.remote import meshes_of, single_hosts
from meshgate.transfer.download import Download, HostFiles, Pulled
from meshgate.transfer.on_host import FileReader

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy

INTERVAL = 5.0  # seconds between two rounds
CONCURRENT_HOSTS = 8


@dataclass(frozen=True, slots=True)
class GatherMount:
    """``remote`` of each host of ``meshes`` (None: of all) appears in a directory of its own below ``local``."""

    remote: str
    local: str
    meshes: tuple[str, ...] | None = None

    @classmethod
    def from_arguments(cls, remote: str, local: str, meshes: Sequence[str] | None) -> GatherMount:
        """Raises ValueError."""
        if not remote.startswith("/"):
            raise ValueError(f"gather_mount({remote!r}): name an absolute path on the hosts")
        if os.path.lexists(local) and not os.path.isdir(local):
            raise ValueError(f"gather_mount(…, {local!r}): it exists and is not a directory")
        return cls(remote, os.path.abspath(local), None if meshes is None else tuple(meshes))


class GatherMounts:
    """The gather mounts of one job. ``start`` begins, ``close`` ends with what is there then. Thread-safe."""

    def __init__(self) -> None:
        self._mounts: list[GatherMount] = []
        self._hosts: list[_Host] = []
        self._meshes: Mapping[str, HostMeshProxy] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._one_round = threading.Lock()
        self._reported: set[str] = set()

    def add(self, mount: GatherMount) -> None:
        if mount not in self._mounts:
            self._mounts.append(mount)

    def start(self, meshes: Mapping[str, HostMeshProxy]) -> None:
        """Pulls what is there now, and from then on what changes. Raises PullFailed, and ValueError if the job does not
        have a mesh."""
        for mount in self._mounts:
            meshes_of("gather_mount", mount.meshes, meshes)
        with self._one_round:
            if meshes != self._meshes:
                self._meshes = dict(meshes)
                self._hosts = [_Host(mesh, *host) for mesh, hosts in meshes.items() for host in single_hosts(hosts)]
        self.pull()
        if self._thread is None or not self._thread.is_alive():  # it ends with all sessions
            self._stop.clear()
            self._thread = threading.Thread(target=self._follow, name="meshgate-gather", daemon=True)
            self._thread.start()

    def pull(self) -> Pulled:
        """One round. Raises PullFailed once it has tried all hosts."""
        with self._one_round, ThreadPoolExecutor(CONCURRENT_HOSTS) as pool:
            rounds = [pool.submit(host.pull, self._targets(host)) for host in self._hosts]
        return sum((each.result() for each in rounds), Pulled())

    def close(self) -> None:
        """Ends the rounds; pulls once more. Raises PullFailed."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        try:
            self.pull()
        finally:
            for host in self._hosts:
                host.close()

    def _targets(self, host: _Host) -> list[tuple[str, str]]:
        """The directories of ``host`` to pull, each with the local one."""
        targets = []
        for mount in self._mounts:
            meshes = meshes_of("gather_mount", mount.meshes, self._meshes)
            if host.mesh in meshes:
                top = os.path.join(mount.local, host.mesh) if len(meshes) > 1 else mount.local
                targets.append((mount.remote.replace("$SUBDIR", host.key), os.path.join(top, host.key, "")))
        return targets

    def _follow(self) -> None:
        while not self._stop.wait(INTERVAL):
            if all(hosts._client.closed for hosts in self._meshes.values()):
                return
            try:
                self.pull()
            except MeshgateError as error:  # the next round tries again
                if str(error) not in self._reported:
                    self._reported.add(str(error))
                    print(f"meshgate: gather_mount: {error}", file=sys.stderr)  # noqa: T201 - for the user's terminal


class _Host:
    """One host, and the actor there that reads its files."""

    def __init__(self, mesh: str, host: HostMeshProxy, key: str) -> None:
        self.mesh, self.key = mesh, key
        self._host = host
        self._procs: Any = None
        self._reader: Any = None

    def pull(self, targets: Sequence[tuple[str, str]]) -> Pulled:
        """Copies each directory that exists. Raises PullFailed; the next call starts another reader then."""
        total = Pulled()
        for remote, local in targets:
            if self._procs is None:
                self._procs = self._host.spawn_procs(name="gather")
                self._reader = self._procs.spawn("gather", FileReader)
            source = HostFiles(self._reader, remote, growing=True)
            try:
                total += Download(source, remote, local, skip_changed=True).run()
            except PullFailed as error:
                if not error.absent:
                    self.close()
                    raise
        return total

    def close(self) -> None:
        if self._procs is not None:
            self._procs.stop()
            self._procs = self._reader = None


class GatherHandle:
    """What ``gather_mount`` returns: the hosts' files are here, and follow until ``close`` or the end of a ``with``."""

    def __init__(self, host_mesh: HostMeshProxy, remote_mount_point: str, local_mount_point: str) -> None:
        self.hosts = host_mesh
        self._mounts = GatherMounts()
        self._mounts.add(GatherMount.from_arguments(remote_mount_point, local_mount_point, None))
        self._mounts.start({host_mesh._name: host_mesh})
        open_handles.append(self)

    def close(self, *, deadline: float | None = None) -> None:
        """Copies once more, whatever the ``deadline``. The files stay. Raises PullFailed."""
        forget_handle(self)
        self._mounts.close()

    def __enter__(self) -> GatherHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
