"""Chooses the adapter for the installed release of Monarch."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from meshgate_gateway.engine.monarch.interface import Monarch, OnFault
from meshgate_wire.messages import Host

# Each supported release and its module, which defines ``Client``, an implementation of ``Monarch``.
SUPPORTED: Mapping[str, str] = {
    "0.7": "meshgate_gateway.engine.monarch.release_0_7",
    "0.8": "meshgate_gateway.engine.monarch.release_0_8",
}


class UnsupportedMonarch(Exception):
    """The installed torchmonarch is missing or of a release without an adapter."""


def module_for(version: str | None) -> str:
    """The module that adapts torchmonarch ``version``, such as ``0.7.0``. Raises UnsupportedMonarch."""
    supported = ", ".join(f"{release}.*" for release in SUPPORTED)
    if version is None:
        raise UnsupportedMonarch(
            f"torchmonarch is not installed. Install one of the supported releases ({supported}): "
            "pip install 'meshgate[gateway]'"
        )
    module = SUPPORTED.get(".".join(version.split(".")[:2]))
    if module is None:
        raise UnsupportedMonarch(
            f"torchmonarch {version} is not supported. Supported releases: {supported}. Install one of them on the "
            "gateway and on the workers"
        )
    return module


def installed_version() -> str | None:
    try:
        return importlib.metadata.version("torchmonarch")
    except importlib.metadata.PackageNotFoundError:
        return None


def native_hosts(name: str, hosts: Sequence[Mapping[str, Any]], transport: str | None) -> Any:
    """Monarch's own ``HostMesh`` of these hosts of the job, for a program that was submitted to it; see
    ``meshgate.native_hosts``. ``transport``: as of ``connect``. Raises UnsupportedMonarch."""
    release = importlib.import_module(module_for(installed_version()))
    return release.attach_natively(name, [Host.model_validate(host) for host in hosts], transport)


def connect(transport: str | None, on_fault: OnFault) -> Monarch:
    """This process's Monarch root client; see ``Monarch.__init__``. Raises UnsupportedMonarch."""
    client: Monarch = importlib.import_module(module_for(installed_version())).Client(transport, on_fault)
    return client
