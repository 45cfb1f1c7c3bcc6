"""``job.remote_mount``: a directory of the laptop under a path of the hosts.

Its files take the way of synced code, in a session of their own, so that the version of the program's code stays what
it is: only what changed is sent, and the hosts pass it on to each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshgate.code_sync.project import Tree
from meshgate.code_sync.push import CodeSync
from meshgate.errors import JobError
from meshgate.mounts import forget_handle, open_handles
from meshgate.mounts.on_host import Mounter, identity
from meshgate_sync.errors import TreeTooLarge
from meshgate_sync.tree.scan import Scanner, StatCache

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy
    from meshgate.proxies.client import Client


# Seconds that hosts may take to make or remove links: 3 ms for each, as of a network file system.
TIMEOUT = 60.0 + 0.003 * CodeSync.DATA_LIMITS.files


@dataclass(frozen=True, slots=True)
class RemoteMount:
    """``source`` of the laptop appears at ``path`` of the hosts of ``meshes`` (None: of all). ``python`` is the
    interpreter in it, relative to it, that processes on these hosts run."""

    source: str
    path: str
    meshes: tuple[str, ...] | None = None
    python: str | None = None

    @classmethod
    def from_arguments(
        cls, source: str, path: str | None, meshes: Sequence[str] | None, python: str | None
    ) -> RemoteMount:
        """Raises ValueError."""
        full = os.path.abspath(os.path.expanduser(source))
        if not os.path.isdir(full):
            raise ValueError(f"remote_mount({source!r}): there is no such directory on this machine")
        if python is not None and not os.path.isfile(os.path.join(full, python)):
            raise ValueError(
                f"remote_mount({source!r}): python_exe={python!r} is not in it. Create the virtual environment there, "
                "or pass python_exe=None to leave the workers' Python as it is"
            )
        if path is not None and path.startswith("~"):
            raise ValueError(f"remote_mount(mntpoint={path!r}): ~ is not expanded on the hosts; pass an absolute path")
        target = full if path is None else os.path.abspath(path)
        if python is not None and "$SUBDIR" in target:
            raise ValueError(f"remote_mount(mntpoint={path!r}): with $SUBDIR, pass python_exe=None")
        return cls(full, target, None if meshes is None else tuple(meshes), python)


class RemoteMounts:
    """The remote mounts of one job, and which version of each its hosts have. Not thread-safe."""

    def __init__(self) -> None:
        self._mounts: dict[str, RemoteMount] = {}  # by path
        self._caches: dict[str, StatCache] = {}  # by source
        self._mounted: dict[tuple[str, str], tuple[Client, str, int]] = {}  # by path and mesh

    def __bool__(self) -> bool:
        return bool(self._mounts)

    def add(self, mount: RemoteMount) -> None:
        """Replaces an earlier mount at the same path."""
        self._mounts[mount.path] = mount

    def python_of(self, mesh: str) -> str | None:
        """The path of the interpreter that processes of ``mesh`` run; the mount that was added last decides."""
        for mount in reversed(self._mounts.values()):
            if mount.python is not None and (mount.meshes is None or mesh in mount.meshes):
                return os.path.join(mount.path, mount.python)
        return None

    def apply(self, hosts: Mapping[str, HostMeshProxy], connect: Callable[[], Client]) -> None:
        """Brings what has changed to the hosts. ``connect`` opens another session of the job.

        Raises JobError that names the host, StaleCodeError if files cannot reach one, SupervisionError if it was lost,
        TreeError if the directory cannot be read, and ValueError if the job has no such mesh.
        """
        for mount in self._mounts.values():
            digest = self._digest(mount)
            due: dict[str, tuple[Client, str, int]] = {}
            for mesh in meshes_of("remote_mount", mount.meshes, hosts):
                wanted = self._wanted(hosts[mesh], mesh, digest)
                if self._mounted.get((mount.path, mesh)) != wanted:
                    due[mesh] = wanted
            if due:
                for mesh, (of, _, restarts) in due.items():  # if it fails, some hosts may have it, to be removed
                    self._mounted[mount.path, mesh] = (of, "", restarts)
                with connect() as client:
                    version = self._mount(mount, client, [hosts[mesh] for mesh in due])
                for mesh, (of, _, restarts) in due.items():
                    self._mounted[mount.path, mesh] = (of, version, restarts)

    def remove(self, hosts: Mapping[str, HostMeshProxy]) -> list[str]:
        """Removes the mounts from the hosts that the program has not shut down. Returns what went wrong."""
        problems = []
        mounted, self._mounted = self._mounted, {}
        for mesh in dict.fromkeys(mesh for _, mesh in mounted if mesh in hosts):
            if hosts[mesh]._owned.remote.stopped:
                continue
            procs = hosts[mesh].spawn_procs(name="meshgate_mount")
            mounters = procs.spawn("meshgate_mount", Mounter)
            paths = [path for path, mounted_on in mounted if mounted_on == mesh]
            calls = [part.unmount.call(own) for path in paths for part, own in _parts(mounters, path)]
            problems += _problems(calls)
            procs.stop()
        return problems

    def _digest(self, mount: RemoteMount) -> str:
        cache = self._caches.setdefault(mount.source, StatCache())
        scanner = Scanner(mount.source, cache=cache, limits=CodeSync.DATA_LIMITS, everything=True)
        try:
            return scanner.scan().tree.digest.hex()
        except TreeTooLarge as error:
            raise JobError(f"remote_mount({mount.source!r}): {error.reason}; mount a part of it") from error

    def _wanted(self, hosts: HostMeshProxy, mesh: str, digest: str) -> tuple[Client, str, int]:
        client: Any = hosts._client
        hosts._initialized(wait_for_all=False).get()  # then the restart count is up to date
        return client, digest, client.objects.host_restarts[mesh]

    def _mount(self, mount: RemoteMount, client: Client, due: Sequence[HostMeshProxy]) -> str:
        """Returns the version that the hosts have: files may change after the scan that found it due."""
        meshes = [_same_hosts(client, hosts) for hosts in due]
        tree = Tree(Path(mount.source), paths=(), everything=True)
        version = CodeSync(client, tree, cache=self._caches[mount.source]).push().version
        source = identity(mount.source)
        calls = [
            part.mount.call(version, path, source)
            for hosts in meshes
            for part, path in _parts(hosts.spawn("meshgate_mount", Mounter), mount.path)
        ]
        if problems := _problems(calls):
            raise JobError(f"remote_mount({mount.source!r}) failed on {'; '.join(problems)}")
        return version


class RemoteMountHandle:
    """What ``remotemount`` returns: ``source`` appears on the hosts with ``open``, and ``refresh`` brings changes."""

    def __init__(self, host_mesh: HostMeshProxy, sourcepath: str, mntpoint: str | None = None) -> None:
        self.sourcepath, self.mntpoint = sourcepath, mntpoint
        self._mesh = {host_mesh._name: host_mesh}
        self._mount = RemoteMount.from_arguments(sourcepath, mntpoint, None, None)
        self._mounts = RemoteMounts()

    def open(self, via_gateway: bool = False) -> None:
        """Returns when every host has all files. ``via_gateway`` has no effect: the hosts get them from the gateway in
        any case. Raises what ``job.state()`` raises for a mount."""
        self._mounts.add(self._mount)
        open_handles.append(self)
        self.refresh()

    def refresh(self, sourcepath: str | None = None) -> None:
        """Brings what has changed. Raises RuntimeError if the mount is not open."""
        if not self._mounts:
            raise RuntimeError(f"the mount of {self.sourcepath!r} is not open: call open() before refresh()")
        client: Any = self.hosts._client
        self._mounts.apply(self._mesh, client.connect_beside)

    def close(self) -> None:
        """Removes the links from the hosts. Raises JobError, which names the hosts that kept it."""
        forget_handle(self)
        problems = self._mounts.remove(self._mesh)
        self._mounts = RemoteMounts()
        if problems:
            raise JobError(f"cannot remove the mount of {self.sourcepath!r} from {'; '.join(problems)}")

    @property
    def hosts(self) -> HostMeshProxy:
        (hosts,) = self._mesh.values()
        return hosts


def _same_hosts(client: Client, hosts: HostMeshProxy) -> HostMeshProxy:
    """The mesh, or slice of a mesh, ``hosts`` of another session."""
    return client.attach_hosts(hosts._name, hosts._owned.remote.expected_hosts)._new_with_shape(hosts._shape)


def _parts(mounters: Any, path: str) -> list[tuple[Any, str]]:
    """The parts of ``mounters`` for which ``path`` is the same, each with its path."""
    if "$SUBDIR" not in path:
        return [(mounters, path)]
    return [(mounter, path.replace("$SUBDIR", key)) for mounter, key in single_hosts(mounters)]


def _problems(calls: list[Any]) -> list[str]:
    """What the hosts report to these calls of ``Mounter``, with their names. Raises TimeoutError."""
    results = [result for call in calls for result in call.get(timeout=TIMEOUT).values()]
    return [f"{host}: {problem}" for host, problem in results if problem]


def single_hosts(mesh: Any) -> list[tuple[Any, str]]:
    """Each host of ``mesh``, or what runs there, with what ``$SUBDIR`` stands for on it, as in Monarch: nothing if
    ``mesh`` is one host without a dimension."""
    if not mesh.sizes:
        return [(mesh, "")]
    return [(mesh.slice(hosts=slice(rank, rank + 1)), f"hosts_{rank}") for rank in range(len(mesh))]


def meshes_of(method: str, wanted: Sequence[str] | None, meshes: Collection[str]) -> list[str]:
    """``wanted``, or all of the job's ``meshes``. Raises ValueError if the job does not have one."""
    unknown = [] if wanted is None else [name for name in wanted if name not in meshes]
    if unknown:
        names = ", ".join(sorted(meshes))
        raise ValueError(f"{method}(meshes={list(wanted or ())!r}): unknown mesh {unknown[0]!r}; the job has {names}")
    return list(meshes if wanted is None else wanted)
