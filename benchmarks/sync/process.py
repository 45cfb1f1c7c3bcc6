"""A process that runs from a version of a host's store, as a worker's does, without Monarch.

``python -m benchmarks.sync.process HOME ROOT``. Prints the last value of the module that the measurements change, then
waits for the end of its input.
"""

from __future__ import annotations

import importlib
import sys

from meshgate_sync.store.home import activate

if __name__ == "__main__":
    home, root = sys.argv[1:]
    activate(home, root)
    module = importlib.import_module("package4.part42.module4242")
    print(getattr(module, "changed", 0.0), flush=True)
    sys.stdin.read()
