from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from meshgate.cli.agents.program import BOOTSTRAP
from meshgate.cli.models import ErrorReport


def test_classes_of_a_program_have_their_source_and_its_namespace_is_clean(tmp_path: Path) -> None:
    program, report = tmp_path / "program.py", tmp_path / "report"
    program.write_text(
        "import inspect, sys\n"
        "print(sorted(name for name in globals() if not name.startswith('__')))\n"
        "class A: pass\n"
        "print(inspect.getsource(A).strip(), sys.modules['__main__'].A is A)\n"
    )
    command = [sys.executable, "-c", BOOTSTRAP, str(report), str(tmp_path), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "['inspect', 'sys']\nclass A: pass True\n"
    assert not report.exists()


def test_the_report_is_written_before_the_program_ends(tmp_path: Path) -> None:
    program, report = tmp_path / "program.py", tmp_path / "report"
    program.write_text("raise OSError(2, 'gone')\n")
    command = [sys.executable, "-c", BOOTSTRAP, str(report), str(tmp_path), str(program)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    found = ErrorReport.model_validate_json(report.read_bytes())
    assert (found.type, found.message) == ("FileNotFoundError", "[Errno 2] gone")
    assert "<string>" not in found.traceback
