from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import cast

import pytest

from meshgate.caller import warn_caller
from tests.programs import ROOT

WARN = "def warn(depth):\n    warn_caller('careless', category) if not depth else warn(depth - 1)\n"


def inside(module: str, category: type[Warning]) -> Callable[[int], None]:
    """A function of ``module`` that calls itself a number of times, then warns."""
    namespace = {"__name__": module, "warn_caller": warn_caller, "category": category}
    exec(compile(WARN, f"/{module}.py", "exec"), namespace)
    return cast(FunctionType, namespace["warn"])


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_a_warning_names_the_line_that_called_meshgate(depth: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inside("meshgate.jobs.trait", DeprecationWarning)(depth)
    (warning,) = caught
    assert (warning.filename, warning.category) == (__file__, DeprecationWarning)
    assert str(warning.message) == "careless"


def test_packages_with_similar_names_are_the_programs() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inside("meshgates", UserWarning)(0)
    assert caught[0].filename == "/meshgates.py"


FAILS = """
import meshgate

def main():
    meshgate.job_load("nowhere/job.pkl" if {missing} else __file__)

main()
"""


def printed(tmp_path: Path, program: str, status: int = 1, **environment: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(program)
    ran = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "client"), str(ROOT)]), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == status
    return ran.stderr


def test_an_error_that_ends_a_program_shows_the_programs_frames_alone(tmp_path: Path) -> None:
    text = printed(tmp_path, FAILS.format(missing=False))
    assert text.splitlines()[-1].startswith("meshgate.errors.JobFileError: ")
    assert re.findall(r", in (\S+)$", text, re.MULTILINE) == ["<module>", "main"]
    full = printed(tmp_path, FAILS.format(missing=False), MESHGATE_TRACEBACK="full")
    assert len(re.findall(r", in (\S+)$", full, re.MULTILINE)) > 2
    assert full.splitlines()[-1] == text.splitlines()[-1]


DELIBERATE = """
from meshgate.jobs import state
from meshgate.session.futures import FutureProxy

def main():
    {mistake}

def failing():
    raise ValueError("of the program")

main()
"""
OURS = "FutureProxy.resolved(1) + 1"
ITS_OWN = "future = FutureProxy(); future.settle(failing); future.get()"
BUG = "state.did_you_mean = None; state.JobState({}).workers"
ASSERTION = "future = FutureProxy(); future._results.append(1); future.validate_state()"


@pytest.mark.parametrize(
    ("mistake", "last", "frames"),
    [
        (OURS, "TypeError: a future is not the value of the call: read that first", ["<module>", "main"]),
        (ITS_OWN, "ValueError: of the program", ["<module>", "main", "get", "_result", "_outcome_of", "failing"]),
        (BUG, "TypeError: 'NoneType' object is not callable", ["<module>", "main", "__getattr__"]),
        (ASSERTION, "AssertionError: read, but not settled", ["<module>", "main", "validate_state"]),
    ],
)
def test_what_is_raised_on_purpose_shows_the_programs_frames_and_a_defect_all(
    tmp_path: Path, mistake: str, last: str, frames: list[str]
) -> None:
    text = printed(tmp_path, DELIBERATE.format(mistake=mistake))
    assert text.splitlines()[-1].startswith(last)
    after_the_cause = text.rpartition("Traceback (most recent call last):")[2]
    assert re.findall(r", in (\S+)$", after_the_cause, re.MULTILINE) == frames


INTERRUPTED = """
import os, signal, threading
from meshgate.session.futures import FutureProxy
from tests.waiting import wait_for

class Call:
    endpoint = "trainers.step"
    waits_for = staticmethod(lambda: "1 of 4 ranks answered")
    about_to_wait = staticmethod(lambda: None)

def interrupt():
    wait_for(lambda: future._wakers, "the program to wait")
    os.kill(os.getpid(), signal.SIGINT)

future = FutureProxy(call=Call())
threading.Thread(target=interrupt).start()
future.get()
"""


def test_ctrl_c_while_waiting_prints_a_line_and_no_traceback(tmp_path: Path) -> None:
    text = printed(tmp_path, INTERRUPTED, status=-signal.SIGINT)
    assert text == (
        "\nmeshgate: interrupted while waiting for trainers.step: 1 of 4 ranks answered. The program ends, and its "
        "sessions unless detached\n"
    )
    full = printed(tmp_path, INTERRUPTED, status=-signal.SIGINT, MESHGATE_TRACEBACK="full")
    assert full.splitlines()[0] == "Traceback (most recent call last):"
    assert full.splitlines()[-1] == "KeyboardInterrupt"


REFUSED = """
import os
from meshgate_sync.tree.scan import Scanner

def main():
    Scanner(os.getcwd()).scan()

import meshgate.errors
main()
"""


def test_a_tree_that_cannot_be_synced_shows_the_programs_frames_alone(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    text = printed(tmp_path, REFUSED.replace("os.getcwd()", repr(str(tmp_path))))
    assert text.splitlines()[-1].startswith("meshgate_sync.errors.LinkLeavesTree: ")
    assert re.findall(r", in (\S+)$", text, re.MULTILINE) == ["<module>", "main"]


def test_errors_of_other_libraries_keep_their_frames(tmp_path: Path) -> None:
    assert "trait.py" in printed(tmp_path, FAILS.format(missing=True))


def test_a_hook_of_the_program_stays(tmp_path: Path) -> None:
    hook = "import sys\nsys.excepthook = lambda kind, error, trace: sys.stderr.write('mine')\n"
    assert printed(tmp_path, hook + FAILS.format(missing=False)) == "mine"
