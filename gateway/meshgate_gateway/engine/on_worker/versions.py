"""Whether a worker's Python and Monarch fit the gateway's.

Monarch sends functions to workers as bytecode, which another minor version of Python cannot run: the process crashes.
So this module travels as source and runs before such a function is unpickled. It may use only the standard library.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket


def check_versions(python: str, monarch: str, laptop: str) -> None:
    """Raises RuntimeError, which names all versions, unless this process has the minor version of ``python`` and the
    release of ``monarch``, those of the gateway. ``laptop`` describes the laptop's versions."""
    here = platform.python_version()
    try:
        monarch_here = importlib.metadata.version("torchmonarch")
    except importlib.metadata.PackageNotFoundError:
        monarch_here = monarch  # it was built from source
    worker = os.environ.get("MESHGATE_HOST_NAME") or socket.gethostname()
    if problem := difference(worker, here, monarch_here, python, monarch, laptop):
        raise RuntimeError(problem)


def difference(worker: str, python_there: str, monarch_there: str, python: str, monarch: str, laptop: str) -> str:
    """The error if the versions of ``worker`` do not fit the gateway's; else empty."""
    if minor(python_there) == minor(python) and minor(monarch_there) == minor(monarch):
        return ""
    return (
        f"worker {worker} has Python {python_there} and torchmonarch {monarch_there}, the gateway has Python {python} "
        f"and torchmonarch {monarch}, and {laptop}. Workers need the gateway's minor version of Python and its release "
        "of torchmonarch: use images with the same versions"
    )


def minor(version: str) -> list[str]:
    return version.split(".")[:2]
