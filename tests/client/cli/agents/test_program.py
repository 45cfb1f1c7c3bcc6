from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from meshgate import ActorError
from meshgate.cli.agents.program import BOOTSTRAP, error_report
from meshgate.cli.models import ErrorReport
from meshgate.errors import ErrorKind


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


def test_an_exception_is_its_type_message_and_traceback() -> None:
    try:
        raise ValueError("wrong")
    except ValueError as error:
        report = error_report(error)
    assert (report.type, report.message, report.groups) == ("ValueError", "wrong", [])
    assert "test_program.py" in report.traceback
    assert error_report(ValueError("not raised")).traceback == ""


SNAPSHOT = "/home/u/.cache/meshgate/snapshots/" + 64 * "0"

ON_RANK = """Traceback of where the remote call failed (most recent call last):
  File "/venv/site-packages/monarch/_src/actor/actor_mesh.py", line 1822, in handle_sync
    result = the_method(*args, **kwargs)
  File "{where}pkg/model.py", line 4, in step
    return x / 0
ZeroDivisionError: division by zero
"""


def test_a_group_has_the_exception_and_its_traceback_from_the_users_code_on() -> None:
    error = ActorError(None)
    text = ON_RANK.format(where=f"{SNAPSHOT}/")
    error.kinds = (ErrorKind((0,), 1, None, "Actor call trainers.step failed.", text),)
    (group,) = error_report(error).groups
    assert group.message == "ZeroDivisionError: division by zero"
    head, _, _, *rest = ON_RANK.format(where="").splitlines(keepends=True)
    assert group.traceback == "".join((head, *rest))


def test_a_failed_call_is_what_its_ranks_raised() -> None:
    error = ActorError(None)
    error.endpoint = "trainers.step"
    error.kinds = (
        ErrorKind((0, 2), 2, KeyError("a"), "KeyError: 'a'", "Traceback of a"),
        ErrorKind((1,), 1, None, "OSError: b", "Traceback of b"),
    )
    report = error_report(error)
    assert (report.type, report.message, report.endpoint) == ("KeyError", "'a'", "trainers.step")
    assert [(group.ranks, group.count, group.traceback) for group in report.groups] == [
        ([0, 2], 2, "Traceback of a"),
        ([1], 1, "Traceback of b"),
    ]
    error.kinds = ()
    assert error_report(error).type == "ActorError"
