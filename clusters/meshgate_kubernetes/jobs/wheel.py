"""The wheel of the meshgate that runs here, for the pods of gateways whose image has none.

It is made of the installed packages, so it is the version that creates the job, whether that was released or not, and
no index has to have it. It travels in a Secret, which holds 1 MiB: packed as a whole, its 500 files take two thirds of
that, and as an ordinary wheel, in which each file is compressed by itself, more than all of it.
"""

from __future__ import annotations

import bz2
import importlib.metadata
import importlib.util
import io
import os
import zipfile

from meshgate_kubernetes.errors import KubernetesError

PACKAGES = (
    "meshgate",  # for submitted programs, which run beside the gateway
    "meshgate_gateway",
    "meshgate_kubernetes",
    "meshgate_processes",
    "meshgate_slurm",
    "meshgate_sync",
    "meshgate_wire",
    "meshgate_worker",
)
MOST = 1_048_576  # bytes that Kubernetes allows in a Secret
_TAGS = "Wheel-Version: 1.0\nGenerator: meshgate\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def packed_wheel() -> bytes:
    """The wheel, compressed with bzip2: xz takes ten times as long for the same size.

    Raises KubernetesError if it is too large for a Secret.
    """
    try:
        installed = importlib.metadata.distribution("meshgate")
    except importlib.metadata.PackageNotFoundError:
        raise KubernetesError(
            "cannot send meshgate to the gateway's pod: this program runs it from a directory in which it is not "
            "installed. Install it with pip, or name an image that contains it: gateway=Compute(image=…)"
        ) from None
    info = f"meshgate-{installed.version}.dist-info"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED, strict_timestamps=False) as wheel:
        for name, text in (("METADATA", installed.read_text("METADATA")), ("WHEEL", _TAGS), ("RECORD", "")):
            wheel.writestr(f"{info}/{name}", text or "")
        for package in PACKAGES:
            _add(wheel, package)
    packed = bz2.compress(content.getvalue())
    if len(packed) > MOST:
        raise KubernetesError(
            f"the installed meshgate is too large to be sent to the gateway's pod: {len(packed)} bytes, and a Secret "
            f"holds {MOST}. Name an image that contains it: gateway=Compute(image=…)"
        )
    return packed


def _add(wheel: zipfile.ZipFile, package: str) -> None:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise KubernetesError(f"cannot send the installed meshgate to the gateway's pod: it has no package {package}")
    (root, *_) = found.submodule_search_locations
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - {"__pycache__"})
        for name in sorted(files):
            path = os.path.join(folder, name)
            wheel.write(path, os.path.join(package, os.path.relpath(path, root)))
