"""What a rank starts: its command, its environment, its files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from meshgate.jobs.spmd import rank_actors
from meshgate.jobs.spmd.rank_actors import TAIL_BYTES, RankProcess
from meshgate_processes.identity import identify_process
from tests.programs import child_process
from tests.waiting import wait_for

PROGRAM: dict[str, Any] = {
    "kind": "script",
    "name": "/x/train.py",
    "arguments": ["-a"],
    "synced": None,
    "directory": "",
    "wrapper": (),
}
PLAN: dict[str, Any] = {
    "program": PROGRAM,
    "world": 4,
    "local_world": 2,
    "run_id": "none",
    "token": "t",
    "restart": 1,
    "max_restarts": 1,
    "master": ("host", 1),
    "role": "default",
    "virtual_local_rank": False,
    "shown_local_ranks": None,
    "shutdown_timeout": 30,
    "log_directory": None,
    "redirects": 0,
    "tee": 0,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [sys.executable, "-u", "/x/train.py", "-a"]),
        ({"kind": "module", "name": "pkg.train"}, [sys.executable, "-u", "-m", "pkg.train", "-a"]),
        ({"kind": "executable"}, ["/x/train.py", "-a"]),
        ({"kind": "run_path"}, [sys.executable, "-u", "-c", rank_actors.RUN_PATH, "/x/train.py", "-a"]),
        ({"wrapper": ("env", "A=1")}, ["env", "A=1", sys.executable, "-u", "/x/train.py", "-a"]),
        ({"arguments": ["--n=${local_rank}"]}, [sys.executable, "-u", "/x/train.py", "--n=1"]),
    ],
)
def test_the_command_is_torchruns(changes: dict[str, Any], expected: list[str]) -> None:
    assert rank_actors._command({**PROGRAM, **changes}, 1) == expected


def test_the_interpreter_can_be_named_as_for_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    assert rank_actors._command(PROGRAM, 0)[0] == "/opt/python"


def test_a_script_in_a_synced_version_runs_there_and_imports_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "snapshots" / "abc"
    monkeypatch.setenv("MESHGATE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "/before")
    monkeypatch.setattr(sys, "path", [str(version / "src"), str(version), *sys.path])
    program = {**PROGRAM, "synced": "jobs/train.py", "directory": "jobs"}
    assert rank_actors._path(program) == str(version / "jobs/train.py")
    assert rank_actors._directory(program) == str(version / "jobs")
    paths = rank_actors._environment()["PYTHONPATH"].split(os.pathsep)
    assert paths == [str(version / "src"), str(version), "/before"]


def test_variables_of_monarch_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERACTOR_MESH_BOOTSTRAP_MODE", "x")
    assert not [name for name in rank_actors._environment() if name.startswith("HYPERACTOR")]


def test_a_module_that_does_not_exist_is_reported_with_where_it_was_searched(tmp_path: Path) -> None:
    assert rank_actors._missing_module("json.tool", str(tmp_path)) == ""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    assert rank_actors._missing_module("pkg.train", str(tmp_path)) == ""
    missing = rank_actors._missing_module("typo.train", str(tmp_path))
    assert "no module 'typo'" in missing
    assert str(tmp_path) in missing


def test_log_files_of_hosts_that_share_a_directory_do_not_collide(tmp_path: Path) -> None:
    plan = {**PLAN, "log_directory": str(tmp_path)}
    directories = {rank_actors._log_directory(plan, rank, rank % 2) for rank in range(4)}
    assert len(directories) == 4
    assert str(tmp_path / "none_t_1" / "attempt_1" / "0") in directories


@pytest.mark.parametrize(("option", "value"), [("redirects", 1), ("tee", {0: 3})])
def test_log_files_without_a_directory_go_to_a_temporary_one(
    option: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert rank_actors._log_directory(PLAN, 0, 0) is None
    assert str(rank_actors._log_directory({**PLAN, option: value}, 0, 0)).startswith(str(tmp_path / "torchelastic"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (json.dumps({"message": {"message": "ValueError: x", "extraInfo": {}}}), "ValueError: x"),
        (json.dumps({"message": "plain"}), "plain"),
        ("not json", ""),
        (None, ""),
    ],
)
def test_torchs_error_file_is_read(content: str | None, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    if content is not None:
        path.write_text(content)
    assert rank_actors._read_error(str(path)) == expected


TORCH = """
class Devices:
    def __init__(self, count): self.count = count
    def device_count(self): return self.count
    def is_available(self): return True
    def current_accelerator(self): return type("Device", (), {"type": "cuda"})
cuda, xpu, accelerator = Devices(8), Devices(0), Devices(8)
"""


@pytest.mark.parametrize(
    ("kind", "count"), [("gpu", 8), ("auto", 8), ("xpu", 0), ("cpu", len(os.sched_getaffinity(0)))]
)
def test_devices_are_counted_as_torchrun_does(kind: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    command = [sys.executable, "-c", rank_actors.COUNT_DEVICES, kind]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, check=True)
    assert int(ran.stdout) == count


def run_rank(plan: dict[str, Any], stoppers: object) -> dict[str, Any]:
    """The report of rank 1."""
    run: Any = vars(rank_actors.RankRunner)["run"]
    report: dict[str, Any] = run._method(SimpleNamespace(rank=1), plan, stoppers)
    return report


def test_a_rank_that_fails_was_not_stopped_by_its_own_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop_all_ranks(timeout: float) -> None:
        monkeypatch.setattr(rank_actors._Current, "stopped", True)

    process = SimpleNamespace(wait=lambda: -signal.SIGKILL, tail=lambda: "")
    monkeypatch.setattr(rank_actors._Current, "process", None)
    monkeypatch.setattr(rank_actors, "_start", lambda *_: process)
    stoppers = SimpleNamespace(end=SimpleNamespace(broadcast=stop_all_ranks))
    report = run_rank(PLAN, stoppers)
    assert rank_actors._Current.stopped
    assert (report["code"], report["stopped"]) == (-signal.SIGKILL, False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "Exec format error; begin it with a line such as #!/bin/sh"),
        ({"log_directory": "program/logs"}, "{program}/logs: Not a directory"),
    ],
)
def test_a_rank_that_cannot_be_started_fails_and_ends_the_others(
    changes: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text("echo no shebang")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank_actors._Current, "process", None)
    monkeypatch.setattr(rank_actors._Current, "stopped", False)
    ended: list[float] = []
    stoppers = SimpleNamespace(end=SimpleNamespace(broadcast=ended.append))
    plan = {**PLAN, "program": {**PROGRAM, "kind": "executable", "name": str(program)}, **changes}
    report = run_rank(plan, stoppers)
    assert ended == [30]
    assert (report["rank"], report["code"], report["stopped"]) == (1, None, False)
    assert report["error"] == f"{program}: {reason.format(program=program)}"


def test_a_script_without_a_guard_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []

    def fail(group: int) -> NoReturn:
        groups.append(group)
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(rank_actors, "start_guard", fail)
    with pytest.raises(BlockingIOError):
        start("import time; time.sleep(300)", tmp_path)
    assert identify_process(groups[0]) is None


def start(code: str, directory: Path, *, files: bool = True, shown: bool = False) -> RankProcess:
    paths = [str(directory / name) if files else None for name in ("stdout.log", "stderr.log")]
    return RankProcess([sys.executable, "-u", "-c", code], os.environ, str(directory), paths, (shown, shown))


def written(path: Path) -> str:
    wait_for(lambda: path.exists() and path.read_text().endswith("\n"), f"{path} to be written", timeout=60)
    return path.read_text()


@pytest.mark.parametrize(("code", "expected"), [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.abort()", -6)])
def test_the_exit_code_is_that_of_the_script(code: str, expected: int, tmp_path: Path) -> None:
    assert start(code, tmp_path).wait() == expected


def test_each_stream_goes_to_its_file_and_both_to_the_tail(tmp_path: Path) -> None:
    process = start("import sys; print('out'); print('err', file=sys.stderr)", tmp_path)
    assert process.wait() == 0
    assert (tmp_path / "stdout.log").read_text() == "out\n"
    assert (tmp_path / "stderr.log").read_text() == "err\n"
    assert sorted(process.tail().splitlines(keepends=True)) == ["err\n", "out\n"]


def test_a_full_disk_of_a_log_file_does_not_stop_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = "x" * 1_000_000  # more than a pipe holds
    command = [sys.executable, "-c", f"print('x' * {len(printed)}); print('done')"]
    process = RankProcess(command, os.environ, str(tmp_path), ["/dev/full", None], [False, False])
    assert process.wait() == 0
    assert process.tail().endswith("x\ndone\n")
    assert capsys.readouterr().err == "meshgate: cannot write /dev/full: No space left on device; it ends here\n"


WAIT_READ = """
import array, fcntl, os, sys, termios

def wait_read(descriptor):
    unread = array.array("i", [1])
    while unread[0]:
        fcntl.ioctl(descriptor, termios.FIONREAD, unread)
"""
PRINT_IN_PARTS = f"""{WAIT_READ}
os.write(1, b"rank ")
wait_read(1)
os.write(2, b"ValueError: bad batch\\nlast")
wait_read(2)
os.write(1, b"3 of 4\\nbar")
"""


def test_the_tail_has_whole_lines_of_each_stream(tmp_path: Path) -> None:
    """An exception is found by the lines of its traceback."""
    process = start(PRINT_IN_PARTS, tmp_path, files=False)
    process.wait()
    assert sorted(process.tail().splitlines()) == ["ValueError: bad batch", "barlast", "rank 3 of 4"]


def test_a_progress_bar_does_not_hide_the_exception_after_it(tmp_path: Path) -> None:
    bars = (f"os.write(1, b'\\repoch 0' * {count})\nwait_read(1)\n" for count in (TAIL_BYTES, 1))  # the first is read
    process = start(f"{WAIT_READ}{''.join(bars)}raise ValueError('bad batch')", tmp_path, files=False)
    process.wait()
    assert "ValueError: bad batch" in process.tail()


def test_output_is_shown_as_it_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    process = start("print('shown')", tmp_path, files=False, shown=True)
    assert process.wait() == 0
    assert capfd.readouterr().out == "shown\n"


def test_output_that_is_not_shown_is_kept_for_the_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    process = start("print('hidden')", tmp_path, files=False)
    process.wait()
    assert capfd.readouterr().out == ""
    assert process.tail() == "hidden\n"


@pytest.mark.parametrize("end", ["end\n", "end"])
def test_the_tail_is_bounded(end: str, tmp_path: Path) -> None:
    process = start(f"print('x' * {5 * TAIL_BYTES}); print('y' * {5 * TAIL_BYTES}, end={end!r})", tmp_path, files=False)
    process.wait()
    assert process.tail() == ("y" * TAIL_BYTES + end)[-TAIL_BYTES:]
    assert sum(len(output.unfinished) for output in process._outputs) <= TAIL_BYTES


def test_stop_asks_with_sigterm_and_the_script_may_finish(tmp_path: Path) -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('ready'); time.sleep(300)"
    process = start(code, tmp_path)
    written(tmp_path / "stdout.log")
    threading.Thread(target=process.stop, args=(60,)).start()
    assert process.wait() == 7


def test_stop_kills_a_script_that_ignores_sigterm(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready'); time.sleep(300)"
    process = start(code, tmp_path)
    written(tmp_path / "stdout.log")
    threading.Thread(target=process.stop, args=(0.05,)).start()
    assert process.wait() == -signal.SIGKILL


def test_stop_of_a_script_that_has_just_ended_leaves_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start("raise SystemExit(3)", tmp_path)
    os.waitid(os.P_PID, process._process.pid, os.WEXITED | os.WNOWAIT)
    killed, kill_group = threading.Event(), os.killpg

    def note(group: int, number: int) -> None:
        killed.set()
        kill_group(group, number)

    monkeypatch.setattr(os, "killpg", note)
    stopping = threading.Thread(target=process.stop, args=(0,))
    stopping.start()
    assert killed.wait(60)  # SIGTERM and SIGKILL have been sent, and neither reaped the script
    assert process.wait() == 3
    stopping.join()


def test_stop_after_the_end_does_nothing(tmp_path: Path) -> None:
    process = start("pass", tmp_path)
    process.wait()
    process.stop(60)


def test_what_a_script_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '300']).pid)"
    process = start(code, tmp_path)
    assert process.wait() == 0
    child = int((tmp_path / "stdout.log").read_text())
    wait_for(lambda: identify_process(child) is None, f"process {child} to end")


PARENT = """
import os, sys, time
from meshgate.jobs.spmd.rank_actors import RankProcess
code = "import os, time; print(os.getpid()); time.sleep(300)"
RankProcess([sys.executable, "-u", "-c", code], os.environ, ".", [sys.argv[1], None], (False, False))
time.sleep(300)
"""


def test_a_script_ends_with_the_process_that_started_it_however_that_ends(tmp_path: Path) -> None:
    log = tmp_path / "stdout.log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with child_process([sys.executable, "-c", PARENT, str(log)], env=environment):
        child = int(written(log))
    wait_for(lambda: identify_process(child) is None, f"process {child} to end", timeout=60)


def test_a_group_whose_script_ended_just_in_time_is_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then another process may have its number."""

    class EndedOnTimeout(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None:
                return super().wait()
            assert waiting.result() == -signal.SIGTERM  # the script has ended
            return False

    process = start("import time; print('up'); time.sleep(60)", tmp_path)
    written(tmp_path / "stdout.log")
    monkeypatch.setattr(process, "_ended", EndedOnTimeout())
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(number))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(process.wait)
        pool.submit(process.stop, 1.0).result()
    assert killed == [signal.SIGKILL]  # by wait(), before the number could be used again
