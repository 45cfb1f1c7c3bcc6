"""The versions that this side announces in a handshake."""

from __future__ import annotations

import functools
import importlib.metadata
import platform

PROTOCOL_VERSION = 3
SOFTWARE_VERSION = "0.1.0"
PYTHON_VERSION = platform.python_version()


@functools.cache
def monarch_version() -> str:
    """The version of the installed torchmonarch; empty if there is none."""
    try:
        return importlib.metadata.version("torchmonarch")
    except importlib.metadata.PackageNotFoundError:
        return ""
