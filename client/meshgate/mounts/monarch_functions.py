"""Makes Monarch's ``remotemount(hosts, ...)`` and ``gather_mount(hosts, ...)`` work with the hosts of a job.

Monarch's own would start a Monarch on the laptop, from which the hosts cannot fetch. Here both copy, as the methods of
a job do.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from meshgate.proxies.host_and_proc_mesh import HostMeshProxy

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
