"""What a bare pod is sent to take part: the modules of a host as one zip, and the few lines that start from it.

``start`` is meant to travel by value (``cloudpickle.register_pickle_by_value``) inside an actor that the engine spawns
on each host: it refers to nothing outside itself, and needs nothing but the standard library where it lands. Hosts that
have meshgate installed are sent the engine's modules all the same, so that both ends are of one version.
"""

from __future__ import annotations

import importlib.resources
import io
import zipfile
from collections.abc import Mapping
from typing import Any

__all__ = ["MODULES", "bundle", "start"]

MODULES = (
    "__init__", "agent", "codec", "commands", "delta", "digest", "disk", "downstream", "errors", "fetch", "frames",
    "handshake", "home", "links", "objects", "plan", "records", "relay", "runner", "serve", "snapshots", "store", "tcp",
    "tree", "upkeep", "upstream",
)  # fmt: skip
"""What a host needs. Each imports only the standard library and others of the list."""

_DATE = (2020, 1, 1, 0, 0, 0)


def bundle() -> bytes:
    """The zip: the same bytes for the same modules."""
    package = importlib.resources.files(__package__)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in MODULES:
            info = zipfile.ZipInfo(f"meshgate_sync/{name}.py", _DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, package.joinpath(f"{name}.py").read_bytes())
    return out.getvalue()


def start(data: bytes, settings: Mapping[str, Any]) -> Any:
    """On the host: makes the bundle importable and returns a started ``agent.HostAgent(**settings)``."""
    import hashlib  # noqa: PLC0415 - travels by value: it has no module to import for
    import importlib  # noqa: PLC0415
    import os  # noqa: PLC0415
    import sys  # noqa: PLC0415
    import tempfile  # noqa: PLC0415

    name = f"meshgate-sync-{hashlib.blake2b(data, digest_size=16).hexdigest()}.zip"
    directory = os.path.join(tempfile.gettempdir(), f"meshgate-{os.getuid()}")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    path = os.path.join(directory, name)
    if not os.path.exists(path):
        handle, aside = tempfile.mkstemp(dir=directory)
        with open(handle, "wb") as out:
            out.write(data)
        os.replace(aside, path)
    if path not in sys.path:
        for loaded in [module for module in sys.modules if module.split(".")[0] == "meshgate_sync"]:
            del sys.modules[loaded]
        sys.path.insert(0, path)
        importlib.invalidate_caches()
    return importlib.import_module("meshgate_sync.agent").HostAgent(**settings)
