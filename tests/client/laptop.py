"""Python processes without some modules: a laptop without torchmonarch, a worker without meshgate."""

from __future__ import annotations

import subprocess
import sys
import textwrap

_BLOCK = "import os, sys; sys.modules.update(dict.fromkeys({names!r}))\n"

# Not by the interpreter's shutdown if Monarch's threads run: one that then asks for the GIL aborts the process.
_LEAVE = """
sys.stdout.flush()
if sys.modules.get("monarch._rust_bindings"):
    sys.stderr.flush()
    os._exit(0)
"""


def run_without(*modules: str, code: str, python: str = sys.executable, stdin: bytes = b"") -> bytes:
    """Runs ``code`` in a Python that cannot import ``modules`` and returns its stdout. Fails with its stderr."""
    program = _BLOCK.format(names=modules) + textwrap.dedent(code) + _LEAVE
    done = subprocess.run([python, "-c", program], input=stdin, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout
