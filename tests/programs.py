"""Programs as a user runs them: a process of their own, in a directory of their own, to their end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

__all__ = ["ROOT", "python_blocks", "run_program"]

ROOT = Path(__file__).parents[1]
LIMIT = 100.0  # seconds


def python_blocks(document: Path) -> list[str]:
    """The ``python`` blocks of a Markdown document."""
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def run_program(program: str | Path, directory: Path) -> str:
    """Runs a program, given as its text or its file, and returns what it printed. Fails when it fails."""
    if isinstance(program, str):
        (directory / "program.py").write_text(program)
        program = directory / "program.py"
    command = [sys.executable, "-W", "error", str(program)]
    ran = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    assert ran.stderr == ""
    return ran.stdout
