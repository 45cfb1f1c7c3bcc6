"""Monarch's modules as ``through_gateway.monarch...``: in a driver, a name that meshgate has is meshgate's, and any
other is Monarch's own. In the processes of actors all of them are Monarch's own.

A driver of Monarch's has a root client from the start, and a host of its own, ``this_host()``. Here it is the only host
of a job. The first ``this_host()`` starts it, or a channel or a controller before there is another session.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import meshgate
import meshgate.config
import meshgate.spmd
from meshgate.actors.api import in_worker_process
from meshgate.actors.monarch_surface import OWNERS
from meshgate.proxies import client

PREFIX = "through_gateway."
CLASSES = {monarchs: ours for ours, monarchs in OWNERS.items()}
SHARED = ("monarch.actor", "monarch.job", "monarch._src.actor", "monarch._src.job", "monarch._rust_bindings")
_current_client = client.current_client
MOUNTS = ("monarch.gather_mount", "monarch.remotemount")


@functools.cache
def _local_host() -> Any:
    job = meshgate.ProcessJob({"hosts": 1})
    atexit.register(job.kill)
    return job.state(cached_path=None).hosts.slice(hosts=0)


@functools.cache
def _local_proc() -> Any:
    return _local_host().spawn_procs(name="this_proc")


def this_host() -> Any:
    return _monarchs("monarch.actor", "this_host")() if in_worker_process() else _local_host()


def this_proc() -> Any:
    return _monarchs("monarch.actor", "this_proc")() if in_worker_process() else _local_proc()


def _client() -> Any:
    if not client.any_open():
        _local_host()
    return _current_client()


def configure(**settings: Any) -> Any:
    return meshgate.config.configure(**_of_a_driver(settings))


def configured(**settings: Any) -> Any:
    return meshgate.config.configured(**_of_a_driver(settings))


def _of_a_driver(settings: dict[str, Any]) -> dict[str, Any]:
    """Without the address of the admin server, which tests set for all jobs so that two can run beside one another."""
    return {name: value for name, value in settings.items() if name != "mesh_admin_addr"}


def counterpart(module: str, name: str) -> tuple[Any, str] | None:
    """Where a driver finds a name of Monarch's: the module and the name there; None if meshgate does not have it."""
    here, ours = None, name
    if name in ("this_host", "this_proc") or (name in ("configure", "configured") and "config" in module):
        here = sys.modules[__name__]
    elif module.startswith("monarch.config"):
        here = meshgate.config
    elif "spmd" in module:
        here = meshgate.spmd
    elif (module, name) == ("monarch.actor", "config"):
        return meshgate, name
    elif module.startswith(SHARED + MOUNTS):
        ours = name if name in meshgate.__all__ else CLASSES.get(name, "")
        here = meshgate if ours in meshgate.__all__ else None
    return (here, ours) if here is not None and hasattr(here, ours) else None


def _monarchs(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    try:
        return getattr(found, name)
    except AttributeError:
        return importlib.import_module(f"{module}.{name}")


class _Facade(ModuleType):
    def __getattr__(self, name: str) -> Any:
        module = self.__name__.removeprefix(PREFIX)
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{module}.{name}" in sys.modules:  # a module may have the name of its function, as returns_future
            return importlib.import_module(f"{self.__name__}.{name}")
        place = None if in_worker_process() else counterpart(module, name)
        if place is not None:
            return getattr(*place)
        value = _monarchs(module, name)
        return importlib.import_module(PREFIX + value.__name__) if _is_monarchs_module(value) else value

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)  # functions that use it may be sent by value

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or isinstance(value, _Facade):
            super().__setattr__(name, value)
            return
        module = self.__name__.removeprefix(PREFIX)
        place = None if in_worker_process() else counterpart(module, name)
        setattr(*(place or (importlib.import_module(module), name)), value)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if not name.startswith(PREFIX + "monarch"):
            return None
        try:  # Monarch's modules in Rust have no specification
            importlib.import_module(name.removeprefix(PREFIX))
        except ModuleNotFoundError:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Facade(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module empty: its names come from ``__getattr__``."""


def _is_monarchs_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and value.__name__.split(".")[0] == "monarch"


if __name__ == "through_gateway":  # beside a copy of the tests; the runner imports this module for counterpart() alone
    __path__: list[str] = []
    client.current_client = _client
    sys.meta_path.insert(0, _Finder())
    monarch = importlib.import_module("through_gateway.monarch")
