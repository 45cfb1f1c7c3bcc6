"""Records which functions of the product a process enters, for ``benchmarks.path``.

The driver of the benchmark imports it. In the engine the interpreter does, at its start, because this folder is on the
PYTHONPATH that the gateway inherits: nothing of the product knows of it. It does nothing unless RECORD names the folder
of the benchmark.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

RECORD = "MESHGATE_BENCHMARK_PATH"


def start(name: str) -> None:
    """Records this thread, and those that ``threading`` starts from now on, while the first byte of ``switch`` is 1."""
    folder = Path(os.environ[RECORD])
    with (folder / "switch").open("r+b") as file:
        switch = mmap.mmap(file.fileno(), 1)
    entries = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    places: dict[str, str] = {}  # of files of the product: their path below its source root

    def place_of(file: str) -> str:
        if file not in places:
            parts = Path(file).parts
            packages = [at for at, part in enumerate(parts) if part.startswith("meshgate")]
            places[file] = "/".join(parts[packages[-1] :]) if packages and "site-packages" not in parts else ""
        return places[file]

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and switch[0] and (place := place_of(frame.f_code.co_filename)):
            code = frame.f_code
            function = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no co_qualname
            thread = threading.current_thread().name
            line = f"{time.monotonic_ns()}\t{thread}\t{place}\t{function}:{code.co_firstlineno}\n"
            os.write(entries, line.encode())

    threading.setprofile(record)
    sys.setprofile(record)


if RECORD in os.environ and "meshgate_gateway.engine" in sys.orig_argv:
    start("engine")
