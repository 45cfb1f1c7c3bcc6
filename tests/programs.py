"""Runs programs as a user does: each in its own process and directory, until it exits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["ROOT", "run_program"]

ROOT = Path(__file__).parents[1]
TIMEOUT = 100.0  # seconds


def run_program(program: str | Path, directory: Path, *, strict: bool = True, timeout: float = TIMEOUT) -> str:
    """Runs a program, given as source or as a file, and returns its stdout. Fails on an exit code.

    ``strict``: also on a warning and on stderr.
    """
    if isinstance(program, str):
        (directory / "program.py").write_text(program)
        program = directory / "program.py"
    command = [sys.executable, *(("-W", "error") if strict else ()), str(program)]
    ran = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=timeout, check=False)
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    assert ran.stderr == "" or not strict
    return ran.stdout
