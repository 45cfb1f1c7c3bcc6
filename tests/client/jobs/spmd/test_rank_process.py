"""A rank's script runs in a group of its own, its output is copied and kept, and nothing of it outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshgate.jobs.spmd.rank_process import TAIL_BYTES, RankProcess
from meshgate_processes.identity import identify_process
from tests.waiting import wait_for


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
    # The two pipes are read by two threads: print() writes a line and its end separately, so lines may mix.
    assert sorted(process.tail()) == sorted("out\nerr\n")


def test_output_is_shown_as_it_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    process = start("print('shown')", tmp_path, files=False, shown=True)
    assert process.wait() == 0
    assert capfd.readouterr().out == "shown\n"


def test_output_that_is_not_shown_is_kept_for_the_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    process = start("print('hidden')", tmp_path, files=False)
    process.wait()
    assert capfd.readouterr().out == ""
    assert process.tail() == "hidden\n"


def test_the_tail_is_bounded(tmp_path: Path) -> None:
    process = start(f"print('x' * {5 * TAIL_BYTES}); print('end')", tmp_path, files=False)
    process.wait()
    assert len(process.tail()) == TAIL_BYTES
    assert process.tail().endswith("end\n")


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
from meshgate.jobs.spmd.rank_process import RankProcess
code = "import os, time; print(os.getpid()); time.sleep(300)"
RankProcess([sys.executable, "-u", "-c", code], os.environ, ".", [sys.argv[1], None], (False, False))
time.sleep(300)
"""


def test_a_script_ends_with_the_process_that_started_it_however_that_ends(tmp_path: Path) -> None:
    log = tmp_path / "stdout.log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(log)], env=environment)
    child = int(written(log))
    parent.kill()
    parent.wait()
    wait_for(lambda: not Path(f"/proc/{child}").exists(), f"process {child} to end", timeout=60)


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
