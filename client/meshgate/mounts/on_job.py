"""The directories that a job shows elsewhere: ``remote_mount`` and ``gather_mount``, with Monarch's signatures.

``JobTrait`` inherits these methods. They are not saved with a job, because each program brings its own. ``remote`` and
``gather`` have what they do, and are imported by the first mount: most jobs have none.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from meshgate.errors import MeshgateError
from meshgate.mounts import Handle, open_handles

if TYPE_CHECKING:
    from meshgate.mounts.gather import GatherMounts
    from meshgate.mounts.remote import RemoteMounts
    from meshgate.proxies import HostMeshProxy
    from meshgate.session.dialing import Dialer


def handles_of(meshes: Collection[HostMeshProxy]) -> list[Handle]:
    """The open handles whose hosts are of the same session as ``meshes``."""
    return [each for each in open_handles if any(hosts._client is each.hosts._client for hosts in meshes)]


def _remote_handle(*args: Any, **kwargs: Any) -> Handle:
    from meshgate.mounts.remote import RemoteMountHandle  # noqa: PLC0415 - few programs mount

    return RemoteMountHandle(*args, **kwargs)


def _gather_handle(*args: Any, **kwargs: Any) -> Handle:
    from meshgate.mounts.gather import GatherHandle  # noqa: PLC0415 - few programs mount

    return GatherHandle(*args, **kwargs)


# The module and name of the class whose object each function returns, and what makes the object that takes its place.
_CLASSES = (
    ("monarch.remotemount.remotemount", "MountHandler", _remote_handle),
    ("monarch._src.gather_mount.gather_mount", "GatherMount", _gather_handle),
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


def _new(theirs: type, ours: Callable[..., Handle]) -> Any:
    from meshgate.proxies import HostMeshProxy  # noqa: PLC0415 - imported already, because the job has hosts

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
        or if ``mntpoint`` begins with ``~``, and TypeError on other arguments.
        """
        if kwargs:
            raise TypeError(f"remote_mount() got an unexpected keyword argument {next(iter(kwargs))!r}")
        from meshgate.mounts.remote import RemoteMount, RemoteMounts  # noqa: PLC0415 - few programs mount

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
        from meshgate.mounts.gather import GatherMount, GatherMounts  # noqa: PLC0415 - few programs mount

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
        from meshgate.proxies.client import Client  # noqa: PLC0415 - imported already, by the session

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
    except (MeshgateError, OSError, RuntimeError) as error:  # also of hosts that were shut down meanwhile
        _warn(str(error))


def _warn(problem: str) -> None:
    print(f"meshgate: cannot end a mount: {problem}", file=sys.stderr)  # noqa: T201 - for the user's terminal
