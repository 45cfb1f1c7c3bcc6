"""The directories that a job shows elsewhere: ``remote_mount`` and ``gather_mount``, with Monarch's signatures.

``JobTrait`` inherits these methods. They are not saved with a job, because each program brings its own.

A gather mount is a copy that follows the hosts: what is new there, or has changed, is pulled again and again. So a file
is complete when it appears, may be some seconds old, and stays when the host removes it or ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from meshgate.errors import JobError, MeshgateError, PullFailed
from meshgate.mounts.remote import RemoteMount, RemoteMounts, meshes_of, single_hosts
from meshgate.proxies import HostMeshProxy
from meshgate.proxies.client import Client
from meshgate.transfer.download import Download, HostFiles, Pulled
from meshgate.transfer.on_host import FileReader

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy
    from meshgate.session.dialing import Dialer

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
        _open_handles.append(self)
        self.refresh()

    def refresh(self, sourcepath: str | None = None) -> None:
        """Brings what has changed. Raises RuntimeError if the mount is not open."""
        if not self._mounts:
            raise RuntimeError(f"the mount of {self.sourcepath!r} is not open: call open() before refresh()")
        client: Any = self.hosts._client
        self._mounts.apply(self._mesh, client.connect_beside)

    def close(self) -> None:
        """Removes the links from the hosts. Raises JobError, which names the hosts that kept it."""
        _forget(self)
        problems = self._mounts.remove(self._mesh)
        self._mounts = RemoteMounts()
        if problems:
            raise JobError(f"cannot remove the mount of {self.sourcepath!r} from {'; '.join(problems)}")

    @property
    def hosts(self) -> HostMeshProxy:
        (hosts,) = self._mesh.values()
        return hosts


class GatherHandle:
    """What ``gather_mount`` returns: the hosts' files are here, and follow until ``close`` or the end of a ``with``."""

    def __init__(self, host_mesh: HostMeshProxy, remote_mount_point: str, local_mount_point: str) -> None:
        self.hosts = host_mesh
        self._mounts = GatherMounts()
        self._mounts.add(GatherMount.from_arguments(remote_mount_point, local_mount_point, None))
        self._mounts.start({host_mesh._name: host_mesh})
        _open_handles.append(self)

    def close(self, *, deadline: float | None = None) -> None:
        """Copies once more, whatever the ``deadline``. The files stay. Raises PullFailed."""
        _forget(self)
        self._mounts.close()

    def __enter__(self) -> GatherHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_open_handles: list[RemoteMountHandle | GatherHandle] = []


def _forget(handle: object) -> None:
    _open_handles[:] = [each for each in _open_handles if each is not handle]


def handles_of(meshes: Collection[HostMeshProxy]) -> list[RemoteMountHandle | GatherHandle]:
    """Those that are open, and whose hosts are of the same session as ``meshes``."""
    return [each for each in _open_handles if any(hosts._client is each.hosts._client for hosts in meshes)]


# The module and name of the class whose object each function returns, and the class that takes its place.
_CLASSES = (
    ("monarch.remotemount.remotemount", "MountHandler", RemoteMountHandle),
    ("monarch._src.gather_mount.gather_mount", "GatherMount", GatherHandle),
)


def serve_monarchs_mount_functions() -> None:
    """Does nothing unless the program has loaded Monarch. It does not matter when the program imports the functions,
    because the ``__new__`` of the classes that they call is replaced."""
    if "monarch._src.actor.actor_mesh" not in sys.modules:
        return
    for module, name, ours in _CLASSES:
        theirs = getattr(importlib.import_module(module), name)
        if theirs.__new__ is object.__new__:
            theirs.__new__ = _new(theirs, ours)


def _new(theirs: type, ours: type[RemoteMountHandle | GatherHandle]) -> Any:
    def new(cls: type, host_mesh: object = None, *args: Any, **kwargs: Any) -> object:
        if cls is theirs and isinstance(host_mesh, HostMeshProxy):
            return ours(host_mesh, *args, **kwargs)
        return object.__new__(cls)

    return new


Hosts: TypeAlias = "Mapping[str, HostMeshProxy]"


class Mounting(ABC):
    def __init__(self) -> None:
        super().__init__()
        self._remote_mounts: RemoteMounts | None = None
        self._gather_mounts: GatherMounts | None = None

    @abstractmethod
    def _dialer(self) -> Dialer: ...

    def remote_mount(
        self,
        source: str,
        mntpoint: str | None = None,
        meshes: list[str] | None = None,
        python_exe: str | None = ".venv/bin/python",
        **kwargs: Any,
    ) -> None:
        """The next ``state()`` makes the directory ``source`` of this machine appear at ``mntpoint`` (default: the same
        path) on the hosts of ``meshes`` (default: all); later ones bring what has changed.

        Everything in it is copied, whatever ignore files say, and processes must not write there. In ``mntpoint``,
        ``$SUBDIR`` stands for ``hosts_<rank>``. Processes on these hosts run the interpreter ``python_exe``, which is
        relative to ``source``; None: the workers' own. Raises ValueError if there is no such directory or interpreter,
        and TypeError on other arguments.
        """
        if kwargs:
            raise TypeError(f"remote_mount() got an unexpected keyword argument {next(iter(kwargs))!r}")
        mount = RemoteMount.from_arguments(source, mntpoint, meshes, python_exe)
        self._remote_mounts = self._remote_mounts or RemoteMounts()
        self._remote_mounts.add(mount)

    def gather_mount(self, remote_mount_point: str, local_mount_point: str, meshes: list[str] | None = None) -> None:
        """From the next ``state()`` on, copies the directory ``remote_mount_point`` of each host to ``hosts_<rank>`` in
        ``local_mount_point``, below the name of the mesh if there are several.

        ``meshes`` names the host meshes (default: all). What is new or has changed there follows within seconds, at
        each ``state()``, and a last time in ``kill()``; what is removed there stays here. ``$SUBDIR`` in
        ``remote_mount_point`` stands for ``hosts_<rank>``. Raises ValueError unless the paths can be used.
        """
        mount = GatherMount.from_arguments(remote_mount_point, local_mount_point, meshes)
        self._gather_mounts = self._gather_mounts or GatherMounts()
        self._gather_mounts.add(mount)

    def _mount(self, running: Mounting, hosts: Hosts) -> Hosts:
        """Applies the mounts to the hosts of ``running``, which is this job or the one loaded from its file. Returns
        them, with the interpreters that their processes are to run."""
        serve_monarchs_mount_functions()
        if self._gather_mounts is not None:
            self._gather_mounts.start(hosts)
        mounts = self._remote_mounts
        if mounts is None:
            return hosts
        mounts.apply(hosts, lambda: Client.connect(running._dialer()))
        pythons = {mesh: python for mesh in hosts if (python := mounts.python_of(mesh)) is not None}
        if not pythons:
            return hosts
        return {**hosts, **{mesh: hosts[mesh].with_python_executable(python) for mesh, python in pythons.items()}}

    def _unmount(self, hosts: Hosts) -> None:
        """Before the job ends: a last copy of what is gathered, and no links to removed files. Warns of problems."""
        for handle in handles_of(hosts.values()):  # of Monarch's functions
            with _warning_of_errors():
                handle.close()
        with _warning_of_errors():
            if self._gather_mounts is not None:
                self._gather_mounts.close()
        with _warning_of_errors():
            if self._remote_mounts is not None:
                for problem in self._remote_mounts.remove(hosts):
                    _warn(problem)


@contextlib.contextmanager
def _warning_of_errors() -> Iterator[None]:
    try:
        yield
    except (MeshgateError, TimeoutError) as error:
        _warn(str(error))


def _warn(problem: str) -> None:
    print(f"meshgate: cannot end a mount: {problem}", file=sys.stderr)  # noqa: T201 - for the user's terminal
