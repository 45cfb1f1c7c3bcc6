from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshgate_processes import marks
from meshgate_processes.identity import ProcessIdentity, identify_process
from meshgate_processes.marks import end_processes, find_processes

VARIABLE = "MESHGATE_TEST_MARK"
PAUSE = "import signal; print(flush=True); signal.pause()"
IGNORE = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True)\nwhile 1: signal.pause()"


@pytest.fixture
def mark() -> str:
    return f"{VARIABLE}={uuid.uuid4().hex}"


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    """Waits at the end for the processes that a test started."""
    with ExitStack() as stack:
        yield stack


def start(processes: ExitStack, mark: str, program: str = PAUSE) -> subprocess.Popen[bytes]:
    """A process in a session of its own that has printed a line."""
    name, _, value = mark.partition("=")
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PADDING": "x" * 20_000, name: value},  # more than one read of the environment
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    processes.enter_context(process)
    processes.callback(process.kill)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def identify(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    identity = identify_process(process.pid)
    assert identity is not None
    return identity


def test_processes_with_the_mark_are_ended_in_any_session(processes: ExitStack, mark: str) -> None:
    started = [start(processes, mark) for _ in range(3)]
    assert find_processes(mark) == [identify(process) for process in sorted(started, key=lambda each: each.pid)]
    assert end_processes(mark, grace=20) == 0
    assert [process.wait(20) for process in started] == [-signal.SIGTERM] * 3
    assert find_processes(mark) == []


def test_a_process_that_ignores_sigterm_is_killed(processes: ExitStack, mark: str) -> None:
    stubborn = start(processes, mark, IGNORE)
    assert end_processes(mark, grace=0.05) == 1
    assert stubborn.wait(20) == -signal.SIGKILL


def test_without_grace_processes_are_killed_and_have_ended(processes: ExitStack, mark: str) -> None:
    process = identify(start(processes, mark))
    assert end_processes(mark) == 1
    assert not process.alive


def test_processes_of_a_session_are_found_without_the_mark(processes: ExitStack, mark: str) -> None:
    child = "import signal, subprocess; subprocess.Popen(['sleep', '600'], env={}); print(flush=True); signal.pause()"
    leader = start(processes, mark, child)
    session = find_processes(session=leader.pid)
    assert identify(leader) in session
    assert len(session) == 2
    assert end_processes(session=leader.pid) == 2
    assert find_processes(mark, session=leader.pid) == []


def test_other_processes_are_not_signalled(processes: ExitStack, mark: str) -> None:
    other = start(processes, f"{VARIABLE}=another")
    assert end_processes(mark, grace=1) == 0
    assert end_processes(mark, session=os.getpid() + 1_000_000_000) == 0
    assert other.poll() is None


def test_the_calling_process_is_never_found(mark: str) -> None:
    assert os.getpid() not in {process.pid for process in find_processes(session=os.getsid(0))}


def test_a_process_is_found_while_it_executes_a_program(processes: ExitStack, mark: str, tmp_path: Path) -> None:
    program = tmp_path / "again.sh"
    program.write_text(f"exec /bin/sh {program}\n")
    restless = start(processes, mark, f"import os; print(flush=True); os.execl('/bin/sh', 'sh', {str(program)!r})")
    missed = sum(identify(restless) not in find_processes(mark) for _ in range(100))
    assert missed == 0


def test_a_process_without_variables_does_not_hold_up_the_search(
    processes: ExitStack, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    bare = subprocess.Popen(["sleep", "600"], env={})
    processes.enter_context(bare)
    processes.callback(bare.kill)
    monkeypatch.setattr(marks, "EXEC_TIMEOUT", 600.0)
    assert find_processes(mark) == []


def test_a_process_that_executes_a_program_is_looked_at_again_after_a_slow_search(
    processes: ExitStack, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    process = identify(start(processes, mark))
    now, looks = 0.0, iter([None, True])

    def belongs(pid: int, mark: str | None, session: int | None) -> bool | None:
        nonlocal now
        now += 60.0
        return next(looks) if pid == process.pid else False

    monkeypatch.setattr(marks, "_belongs", belongs)
    monkeypatch.setattr(marks, "time", SimpleNamespace(monotonic=lambda: now, sleep=lambda _: None))
    assert find_processes(mark) == [process]


def test_processes_forked_while_the_first_are_killed_are_killed_too(
    processes: ExitStack, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    first, forked = start(processes, mark), start(processes, mark)
    found = iter([[identify(first)], [identify(forked)], []])
    monkeypatch.setattr(marks, "find_processes", lambda mark, session: next(found))
    assert end_processes(mark) == 2
    assert (first.wait(), forked.wait()) == (-signal.SIGKILL, -signal.SIGKILL)


def test_the_number_killed_counts_each_process_once(
    processes: ExitStack, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    process = identify(start(processes, mark))
    monkeypatch.setattr(marks, "find_processes", lambda mark, session: [process])  # as if it could not be killed
    assert end_processes(mark, timeout=0) == 1


AS_ON_MACOS = """
import pathlib, select, subprocess, sys, time
sys.platform = "darwin"
from meshgate_processes import marks
sys.platform = "linux"
from meshgate_processes import identity
identity.identify_process = marks.identify_process = identity._identify_by_ps
marks.PROC, marks.WITH_ENVIRONMENT = pathlib.Path("/missing"), "axeww"  # the options of Linux' ps
print(len(marks.find_processes(sys.argv[1])), len(marks.find_processes(session=int(sys.argv[2]))), flush=True)
print(marks.end_processes(sys.argv[1], grace=float(sys.argv[3])))
"""


@pytest.mark.parametrize(("program", "grace", "killed"), [(PAUSE, 20, 0), (IGNORE, 0.1, 2)])
def test_processes_are_found_and_ended_without_proc(
    processes: ExitStack, mark: str, program: str, grace: float, killed: int
) -> None:
    started = [start(processes, mark, program) for _ in range(2)]
    other = start(processes, f"{VARIABLE}=other")
    command = [sys.executable, "-c", AS_ON_MACOS, mark, str(other.pid), str(grace)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == f"2 1\n{killed}\n"
    assert {process.wait() for process in started} == {-signal.SIGKILL if killed else -signal.SIGTERM}
    assert other.poll() is None
