"""Restarts of a run, decided without hosts; tests/end_to_end/test_spmd.py runs scripts on hosts."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import MagicMock

import pytest

from meshgate.code_sync.project import Tree
from meshgate.errors import SPMDFailed, SupervisionError
from meshgate.jobs.spmd import run
from meshgate.jobs.spmd.run import (
    Program,
    RankReport,
    exception_of,
    failure_of,
    find_program,
    local_file,
    require_program,
)
from meshgate.jobs.spmd.torchrun import TorchrunCommand

PROGRAM = run.Program("script", "train.py", ())
TRACEBACK = """some output
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
    raise ValueError("bad batch")
ValueError: bad batch
"""


class Hosts:
    """Two hosts that are lost until they have been waited for, and for ever if they are not replaced."""

    def __init__(self, events: list[str], *, replaced: bool) -> None:
        self.initialized = SimpleNamespace(get=self._wait)
        self._events, self._replaced = events, replaced

    def __len__(self) -> int:
        return 2

    def _wait(self) -> None:
        self._events.append("waited")
        if not self._replaced:
            raise SupervisionError("host 1 was lost")


def run_twice(monkeypatch: pytest.MonkeyPatch, events: list[str], *, replaced: bool) -> None:
    """Runs a command with one restart. Its first attempt fails."""

    def attempt(hosts: object, processes: int, command: object, program: object, restart: int, *_: object) -> Any:
        events.append(f"attempt {restart}")
        return SPMDFailed("rank 1 was lost", rank=1, host="host 1") if restart == 0 else None

    monkeypatch.setattr(run, "_attempt", attempt)
    command = TorchrunCommand("script", "train.py", max_restarts=1)
    run.run_command(Hosts(events, replaced=replaced), command, PROGRAM)  # type: ignore[arg-type]


def test_a_restart_waits_until_lost_hosts_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    run_twice(monkeypatch, events, replaced=True)
    assert events == ["attempt 0", "waited", "attempt 1"]


def test_a_run_whose_hosts_are_not_replaced_fails_as_its_last_attempt_did(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    with pytest.raises(SPMDFailed, match="rank 1 was lost") as failed:
        run_twice(monkeypatch, events, replaced=False)
    assert isinstance(failed.value.__cause__, SupervisionError)
    assert events == ["attempt 0", "waited"]


def test_an_interrupt_stays_one_if_a_rank_is_lost_while_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    def lose(*_: object) -> NoReturn:
        raise SupervisionError("host 1 was lost")

    called = SimpleNamespace(call=lambda *_: SimpleNamespace(get=dict))
    mesh = SimpleNamespace(_client=SimpleNamespace(handle_faults=lambda number: None), _object=1, check=called)
    mesh.run, mesh.end = SimpleNamespace(stream=interrupt), SimpleNamespace(call=lose)
    procs = MagicMock(spawn=lambda name, actor: mesh)
    monkeypatch.setattr(run, "_hold_master", lambda *_: ("h", 1))
    monkeypatch.setattr(run, "_stop", lambda procs: None)
    hosts = MagicMock(spawn_procs=lambda **_: procs)
    with pytest.raises(KeyboardInterrupt):
        run.run_command(hosts, TorchrunCommand("script", "train.py", max_restarts=1), PROGRAM)


def report(rank: int, code: int | None = 0, *, stopped: bool = False, tail: str = "", error: str = "") -> RankReport:
    return RankReport(rank, f"workers-{rank // 2}", code, stopped, tail, error, "")


def test_a_run_whose_ranks_all_succeed_has_no_failure() -> None:
    assert failure_of([report(0), report(1)]) is None


def test_a_rank_that_was_asked_to_end_and_succeeded_is_no_failure_of_its_own() -> None:
    failure = failure_of([report(0, 0, stopped=True), report(1, 2)])
    assert failure is not None
    assert "ended by this failure" not in str(failure)


def test_the_first_to_fail_is_reported_and_the_others_are_summarised() -> None:
    failure = failure_of(
        [report(2, -15, stopped=True), report(3, 1, tail=TRACEBACK), report(0, 1), report(1, None, stopped=True)]
    )
    assert failure is not None
    assert (failure.rank, failure.host, failure.exit_code) == (3, "workers-1", 1)
    assert failure.exception == "ValueError: bad batch"
    assert failure.log_tail.endswith("ValueError: bad batch")
    assert failure.exit_codes == {0: 1, 1: None, 2: -15, 3: 1}
    first_line = str(failure).splitlines()[0]
    assert first_line == (
        "rank 3 on workers-1 failed with exit code 1: ValueError: bad batch. rank 0 failed too; ranks 1-2 ended by "
        "this failure. Last output of rank 3:"
    )


def test_the_first_to_fail_did_not_end_by_its_own_failure() -> None:
    failure = failure_of([report(0, -15, stopped=True), report(1, 1, stopped=True, tail=TRACEBACK)])
    assert failure is not None
    assert failure.rank == 1
    assert ". rank 0 ended by this failure" in str(failure)


def test_the_message_of_torchs_error_file_comes_before_the_output() -> None:
    failure = failure_of([report(0, 1, tail=TRACEBACK, error="RuntimeError: CUDA out of memory\nmore")])
    assert failure is not None
    assert failure.exception == "RuntimeError: CUDA out of memory"


LOST = "Traceback (most recent call last):\nRuntimeError: [gloo] Connection closed by peer [127.0.0.1]:9393\n"


@pytest.mark.parametrize(
    "cause", [report(1, 1, tail=TRACEBACK), report(1, -9), report(1, -15, stopped=True, tail=TRACEBACK)]
)
def test_a_rank_that_only_lost_its_connection_is_not_the_cause(cause: RankReport) -> None:
    failure = failure_of([report(0, 1, tail=LOST), cause, report(2, -15, stopped=True)])
    assert failure is not None
    assert failure.rank == 1


def test_a_rank_that_only_lost_its_connection_is_reported_if_no_other_failed() -> None:
    failure = failure_of([report(1, -15, stopped=True), report(0, 1, tail=LOST)])
    assert failure is not None
    assert failure.rank == 0


def test_a_rank_that_could_not_be_started_is_reported_with_the_reason() -> None:
    reports = [report(0, -15, stopped=True), report(1, None, error="/x/run.sh: Exec format error")]
    failure = failure_of(reports)
    assert str(failure) == (
        "rank 1 on workers-0 was not started: /x/run.sh: Exec format error. rank 0 ended by this failure"
    )


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "was killed by SIGKILL, which is how the kernel ends a process if the host or job is out of memory"),
        (-11, "was killed by SIGSEGV"),
        (-60, "was killed by signal 60"),
        (None, "was not started"),
    ],
)
def test_a_signal_is_named(code: int | None, text: str) -> None:
    assert text in str(failure_of([report(0, code)]))


def test_only_the_end_of_long_output_is_quoted() -> None:
    failure = failure_of([report(0, 1, tail="\n".join(f"line {n}" for n in range(500)))])
    assert failure is not None
    assert failure.log_tail.splitlines()[0] == "line 470"


def test_log_files_are_named() -> None:
    logs = RankReport(1, "workers-0", 1, False, "", "", "/logs/run_1/attempt_0/1")
    assert "log files on workers-0: /logs/run_1/attempt_0/1" in str(failure_of([logs]))


@pytest.mark.parametrize(
    ("output", "exception"),
    [
        (TRACEBACK, "ValueError: bad batch"),
        ("ValueError: not raised\n", ""),
        ("[rank1]: Traceback (most recent call last):\n[rank1]:   File 'x'\n[rank1]: ValueError: x\n", "ValueError: x"),
        ("Traceback (most recent call last):\n  File 'x'\nmodule.Error\n", "module.Error"),
        ("Traceback (most recent call last):\n  File 'x'\n", ""),
    ],
)
def test_the_exception_is_the_last_line_of_the_last_traceback(output: str, exception: str) -> None:
    assert exception_of(output) == exception


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project" / "jobs").mkdir(parents=True)
    (tmp_path / "project" / "jobs" / "train.py").touch()
    return tmp_path / "project"


def test_without_synced_code_the_script_is_named_by_its_absolute_path(project: Path) -> None:
    command = TorchrunCommand("script", "jobs/train.py", ("-x",))
    assert find_program(command, str(project), None) == Program("script", str(project / "jobs/train.py"), ("-x",))


def test_a_synced_script_is_named_by_its_place_in_the_project(project: Path) -> None:
    command = TorchrunCommand("script", "train.py")
    program = find_program(command, str(project / "jobs"), Tree(project))
    assert (program.synced, program.directory) == ("jobs/train.py", "jobs")


def test_a_script_outside_of_the_synced_project_is_refused(project: Path) -> None:
    (project.parent / "other.py").touch()
    with pytest.raises(ValueError, match=r"other.py is outside of the synced project"):
        find_program(TorchrunCommand("script", "../other.py"), str(project), Tree(project))


def test_a_script_between_the_synced_directories_is_refused(project: Path) -> None:
    (project / "left-out").mkdir()
    (project / "left-out" / "train.py").touch()
    tree = Tree(project, parts=("jobs", "models"))
    with pytest.raises(
        ValueError, match=rf"train.py is outside of the synced project {project}/jobs, {project}/models:"
    ):
        find_program(TorchrunCommand("script", "train.py"), str(project / "left-out"), tree)
    script = TorchrunCommand("script", str(project / "jobs/train.py"))
    assert find_program(script, str(project / "left-out"), tree) == Program(
        "script", script.program, (), "jobs/train.py"
    )


def test_a_directory_outside_of_the_project_is_replaced_by_its_top(project: Path) -> None:
    command = TorchrunCommand("script", str(project / "jobs/train.py"))
    assert find_program(command, str(project.parent), Tree(project)).directory == ""


@pytest.mark.parametrize(
    "command",
    [
        TorchrunCommand("module", "pkg.train"),
        TorchrunCommand("executable", "nvidia-smi"),
        TorchrunCommand("script", "/opt/app/train.py"),
    ],
)
def test_what_only_workers_have_is_left_to_them(command: TorchrunCommand, project: Path) -> None:
    require_program(command, str(project))
    assert local_file(command, str(project)) is None
    assert find_program(command, str(project), Tree(project)).synced is None


@pytest.mark.parametrize("command", [TorchrunCommand("script", "typo.py"), TorchrunCommand("executable", "./typo")])
def test_a_missing_file_is_an_error_that_names_the_directory(command: TorchrunCommand, project: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{re.escape(command.program)} does not exist in {project}"):
        require_program(command, str(project))


def test_a_directory_is_not_a_script(project: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the script \. is a directory in "):
        require_program(TorchrunCommand("script", "."), str(project))
