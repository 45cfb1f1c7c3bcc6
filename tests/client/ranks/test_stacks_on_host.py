"""Reading the stacks of real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshgate.ranks.processes import SCRIPT_MARK, write_startup
from meshgate.ranks.stacks_on_host import MAX_ANSWERS, StackReader, _Process, parse_dump
from tests.programs import child_process

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="stacks are read through /proc")
SERVE = (
    "from meshgate_gateway.engine.on_worker.stacks import serve_stacks\nserve_stacks('procs', 3, 'workers-1', 'mine')\n"
)
ENOUGH = 30.0  # seconds
NEVER = 0.05  # seconds in which a process that cannot answer does not


@contextlib.contextmanager
def running(body: str, *, serve: str = SERVE) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs ``body`` once it has printed a line."""
    program = f"import sys, time\n{serve}def work():\n    print('up', flush=True)\n    {body}\nwork()\n"
    with child_process([sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"up\n"
        yield child


def ask(pid: int, *, thread: float = ENOUGH) -> dict[str, Any]:
    process = _Process.find(pid)
    assert process is not None
    try:
        process.ask()
        return process.answer(time.monotonic() + thread, ENOUGH)
    finally:
        process.close()


@contextlib.contextmanager
def running_script(text: str, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A training script, started as its rank does, that has printed a line."""
    write_startup(str(directory), {"session": "mine", "mesh": "spmd", "rank": 1, "host": "workers-0"})
    (directory / "train.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    command = [sys.executable, str(directory / "train.py")]
    with child_process(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"up\n"
        yield child


def ask_script(pid: int) -> dict[str, Any]:
    process = _Process.find(pid, SCRIPT_MARK)
    assert process is not None
    with contextlib.closing(process):
        process.ask()
        return process.answer(time.monotonic(), ENOUGH)


def functions(found: dict[str, Any]) -> list[str]:
    return [frame[2] for thread in found["threads"] for frame in thread["frames"]]


@pytest.mark.parametrize("body", ["while True: pass", "time.sleep(1000)", "sys.stdin.read()"])
def test_a_busy_process_answers_again_and_again(body: str) -> None:
    with running(body) as child:
        for _ in range(3):
            found = ask(child.pid)
            whose = [found[name] for name in ("session", "mesh", "rank", "host", "pid")]
            assert whose == ["mine", "procs", 3, "workers-1", child.pid]
            assert "work" in functions(found)
            assert "note" not in found


def test_a_process_whose_interpreter_is_locked_by_c_code_is_read_by_a_signal() -> None:
    with running("import re; re.match('(a+)+$', 'a' * 60 + 'b')") as child:
        while "note" not in (found := ask(child.pid, thread=NEVER)) or "work" not in functions(found):
            pass  # it has not begun yet
        assert "work" in functions(found)
        assert "C code" in found["note"]


def test_a_stopped_process_does_not_answer() -> None:
    with running("time.sleep(1000)") as child:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        process = _Process.find(child.pid)
        assert process is not None
        process.ask()
        assert "does not answer" in process.answer(time.monotonic() + NEVER, NEVER)["problem"]
        process.close()


def test_processes_without_the_mark_and_ended_ones_are_left_out() -> None:
    with running("time.sleep(1000)", serve="") as child:
        assert _Process.find(child.pid) is None
    assert _Process.find(child.pid) is None
    with running("time.sleep(1000)") as child:
        process = _Process.find(child.pid)
    assert process is not None
    process.ask()
    assert "has ended" in process.answer(time.monotonic(), ENOUGH)["problem"]
    process.close()


def test_the_reader_asks_the_other_processes_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with running("time.sleep(1000)") as child:
        monkeypatch.setattr(os, "getppid", os.getpid)  # as if this process were the host
        found = StackReader.read._method(StackReader(), ENOUGH)
        assert child.pid in [each["pid"] for each in found]


def test_a_dump_is_parsed_with_the_outermost_frame_first() -> None:
    text = (
        'Current thread 0x00007f01 (most recent call first):\n  File "/a b/x.py", line 12 in inner\n'
        '  File "/a b/x.py", line 3 in outer\n\n'
        "Thread 0x00007f02 [named] (most recent call first):\n  <no Python frame>\n"
    )
    first, second = parse_dump(text)
    assert first == {
        "name": "thread 0x00007f01",
        "frames": [("/a b/x.py", 3, "outer", ""), ("/a b/x.py", 12, "inner", "")],
    }
    assert second["frames"] == []


def test_a_process_that_reuses_the_pid_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal would end it."""
    with running("sys.stdin.read()") as child, running("sys.stdin.read()", serve="") as other:
        process = _Process.find(child.pid)
        assert process is not None
        process.pid = other.pid
        assert "has ended" in process.answer(time.monotonic(), 5.0)["problem"]
        process.close()
        assert other.poll() is None


WAITS = "import sys\ndef load():\n    print('up', flush=True)\n    sys.stdin.readline()  # stuck\nload()\n"


def test_a_script_shows_where_it_is_again_and_again_with_the_text_of_its_lines(tmp_path: Path) -> None:
    with running_script(WAITS, tmp_path) as child:
        for _ in range(3):
            found = ask_script(child.pid)
            file = str(tmp_path / "train.py")
            while found["threads"][-1]["frames"][-1][1] == 3:  # it has printed, and not gone on
                found = ask_script(child.pid)
            assert found["threads"][-1]["frames"] == [
                (file, 5, "<module>", "load()"),
                (file, 4, "load", "sys.stdin.readline()  # stuck"),
            ]
            whose = [found[name] for name in ("session", "mesh", "rank", "host", "pid", "script")]
            assert whose == ["mine", "spmd", 1, "workers-0", child.pid, True]


@pytest.mark.parametrize("handler", ["lambda *_: print('called', flush=True)", "signal.SIG_DFL"])
def test_a_script_that_handles_the_signal_itself_does_not_get_it(handler: str, tmp_path: Path) -> None:
    text = f"import signal\nsignal.signal(signal.SIGRTMAX - 3, {handler})\n{WAITS}print('went on')\n"
    with running_script(text, tmp_path) as child:
        assert "its own handler" in ask_script(child.pid)["problem"]
        assert child.communicate(b"\n")[0] == b"went on\n"


def test_a_script_that_takes_the_signal_behind_pythons_back_is_not_ended(tmp_path: Path) -> None:
    text = f"import faulthandler, signal\nfaulthandler.unregister(signal.SIGRTMAX - 3)\n{WAITS}print('went on')\n"
    with running_script(text, tmp_path) as child:
        assert "its own handler" in ask_script(child.pid)["problem"]
        assert child.communicate(b"\n")[0] == b"went on\n"


def test_a_script_that_has_just_ended_is_reported_as_ended(tmp_path: Path) -> None:
    with running_script(WAITS, tmp_path) as child:
        process = _Process.find(child.pid, SCRIPT_MARK)
        assert process is not None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its parent has not noticed
        with contextlib.closing(process):
            assert "has ended" in process.answer(time.monotonic(), ENOUGH)["problem"]


def test_earlier_answers_of_a_script_are_dropped_before_they_take_much_memory(tmp_path: Path) -> None:
    with running_script(WAITS, tmp_path) as child:
        process = _Process.find(child.pid, SCRIPT_MARK)
        assert process is not None
        with contextlib.closing(process):
            mark = f"/proc/self/fd/{process.answers}"
            os.truncate(mark, MAX_ANSWERS + 1)
            assert process.answer(time.monotonic(), ENOUGH)["threads"]
            assert os.stat(mark).st_size < MAX_ANSWERS


def test_the_reader_finds_scripts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_script(WAITS, tmp_path) as child:
        monkeypatch.setattr(os, "getppid", os.getpid)  # as if this process were the host
        found = StackReader.read._method(StackReader(), ENOUGH)
        assert [each["script"] for each in found if each["pid"] == child.pid] == [True]
