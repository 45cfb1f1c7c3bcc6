"""What ``remotemount`` and ``gather_mount`` of Monarch return for hosts of a job: mounts of their own, which copy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection
from typing import Any

from meshgate.errors import JobError
from meshgate.mounts.gather import GatherMount, GatherMounts
from meshgate.mounts.remote import RemoteMount, RemoteMounts
from meshgate.proxies import HostMeshProxy


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


# The module and name of the class whose object each function returns, and of the one that takes its place.
_CLASSES = (
    ("monarch.remotemount.remotemount", "MountHandler", "RemoteMountHandle"),
    ("monarch._src.gather_mount.gather_mount", "GatherMount", "GatherHandle"),
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


def _new(theirs: type, ours: str) -> Any:
    def new(cls: type, host_mesh: object = None, *args: Any, **kwargs: Any) -> object:
        if cls is theirs and isinstance(host_mesh, HostMeshProxy):
            return getattr(importlib.import_module("meshgate.mounts.handles"), ours)(host_mesh, *args, **kwargs)
        return object.__new__(cls)

    return new
