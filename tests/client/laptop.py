"""Python processes without some modules: a laptop without torchmonarch, a worker without meshgate."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests.programs import LEAVE_MONARCH

_BLOCK = "import sys; sys.modules.update(dict.fromkeys({names!r}))\n"


def run_without(*modules: str, code: str, python: str = sys.executable, stdin: bytes = b"") -> bytes:
    """Runs ``code`` in a Python that cannot import ``modules`` and returns its stdout. Fails with its stderr."""
    program = _BLOCK.format(names=modules) + textwrap.dedent(code) + LEAVE_MONARCH
    done = subprocess.run([python, "-c", program], input=stdin, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout
