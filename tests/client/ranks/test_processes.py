"""Processes that have marked themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshgate.ranks.processes import SCRIPT_MARK, find_marks, siblings, write_startup
from meshgate_processes.identity import identify_process
from tests.programs import child_process
from tests.waiting import wait_for

needs_processes = pytest.mark.skipif(not Path("/proc").is_dir(), reason="marks are read through /proc")


MARKED = """
import json, os
def mark(name, *about):
    os.write(os.memfd_create(name), b"".join(json.dumps(each).encode() + b"\\nmore" for each in about))
pid = os.getpid()
mark("test-mark", {"pid": pid, "rank": 3})
mark("test-mark", {"pid": 1})
mark("test-mark-2", {"pid": pid})
mark("test-mark", [])
mark("test-mark")
print("marked", flush=True)
input()
"""
GUARDED = """
import subprocess, time
from meshgate.ranks.processes import start_guard
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
start_guard(child.pid)
print(child.pid, flush=True)
time.sleep(300)
"""
COMMAND = """
import time
from meshgate.ranks.on_host import StreamWriter
StreamWriter.run._method(StreamWriter(), ["sh", "-c", "echo $$; exec sleep 300"], {}, None, False)
from meshgate.ranks import on_host
print([int(each.data) for each in on_host._hub.poll() if each.kind == "data"][0], flush=True)
time.sleep(300)
"""


@needs_processes
def test_marks_are_found_by_name_and_those_of_another_process_left_out() -> None:
    with child_process([sys.executable, "-c", MARKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        ((descriptor, about),) = find_marks(child.pid, "test-mark")
        assert about == {"pid": child.pid, "rank": 3}
        os.close(descriptor)


@needs_processes
def test_a_process_that_has_ended_has_no_marks() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    assert find_marks(child.pid, "test-mark") == []


@needs_processes
def test_siblings_are_the_other_processes_of_the_same_host(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with child_process([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        monkeypatch.setattr(os, "getppid", lambda: child.pid)  # as if it were the host
        (below,) = siblings()
        assert Path(f"/proc/{below}").exists()
        assert os.getpid() not in siblings()
        child.communicate(b"\n")


@pytest.mark.parametrize("code", [GUARDED, COMMAND])
def test_a_command_ends_with_the_process_that_started_it_however_that_ends(code: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with child_process([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
    wait_for(lambda: identify_process(child) is None, f"process {child} to end", timeout=60)


INTERPRETER = """
import json, os, signal, subprocess, sys
child = "import json, os, sys; print(json.dumps([os.environ.get('PYTHONPATH'), sys.path, os.listdir('/proc/self/fd')]))"
seen = [os.environ.get("PYTHONPATH"), sys.path, list(sys.path_importer_cache), "sitecustomize" in sys.modules]
seen += [[str(signal.getsignal(number)) for number in sorted(signal.valid_signals())], signal.signal.__doc__]
print(json.dumps([*seen, subprocess.check_output([sys.executable, "-c", child], text=True)]))
"""


def environment(*places: str) -> dict[str, str]:
    """That of this process, with a PYTHONPATH of ``places`` alone."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**found, "PYTHONPATH": os.pathsep.join(places)} if places else found


@contextlib.contextmanager
def script(code: str, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A marked interpreter that has printed a line and waits."""
    write_startup(str(directory), {"mesh": "spmd", "rank": 3})
    command = [sys.executable, "-c", f"{code}\nprint('up', flush=True)\ninput()"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with child_process(command, env=environment(str(directory)), **pipes) as child:
        assert child.stdout.readline() == b"up\n"
        yield child


def script_mark(pid: int) -> dict[str, Any]:
    ((descriptor, about),) = find_marks(pid, SCRIPT_MARK)
    os.close(descriptor)
    return about


@needs_processes
def test_a_script_is_marked_with_its_rank_and_the_signal_that_shows_its_stack(tmp_path: Path) -> None:
    with script("", tmp_path) as child:
        number = int(signal.SIGRTMAX) - 3
        assert script_mark(child.pid) == {"pid": child.pid, "signal": number, "mesh": "spmd", "rank": 3}


@needs_processes
@pytest.mark.parametrize(("own", "customized"), [((), False), (("/some/where",), True)])
def test_a_marked_script_and_its_children_find_everything_as_without_the_mark(
    own: tuple[str, ...], customized: bool, tmp_path: Path
) -> None:
    """A ``sitecustomize`` of the user's still runs."""
    startup, users = tmp_path / "startup", tmp_path / "users"
    for directory in (startup, users):
        directory.mkdir()
    if customized:
        (users / "sitecustomize.py").write_text("print('customized')\n")
        own = (*own, str(users))
    write_startup(str(startup), {"mesh": "spmd", "rank": 3})
    printed = [
        subprocess.run(
            [sys.executable, "-c", INTERPRETER], env=environment(*places), capture_output=True, text=True, check=True
        )
        for places in (own, (str(startup), *own))
    ]
    assert printed[0].stdout == printed[1].stdout
    assert printed[1].stderr == ""
    assert printed[1].stdout.startswith("customized\n") == customized


@needs_processes
def test_a_marked_script_has_one_thread_and_may_fork(tmp_path: Path) -> None:
    """A second thread would make ``os.fork`` warn."""
    code = "import os\nassert len(os.listdir('/proc/self/task')) == 1\nif os.fork() == 0: os._exit(0)\nos.wait()"
    with script(code, tmp_path) as child:
        assert script_mark(child.pid)["rank"] == 3


@needs_processes
@pytest.mark.parametrize(
    "set_handlers",
    [
        "for number in signal.valid_signals() - {9, 19}: signal.signal(number, handler)",
        "signal.signal(signal.SIGRTMAX - 3, signal.SIG_DFL)",
    ],
)
def test_a_script_that_handles_the_signal_itself_says_so(set_handlers: str, tmp_path: Path) -> None:
    with script(f"import signal\ndef handler(*_): pass\n{set_handlers}", tmp_path) as child:
        assert script_mark(child.pid) == {"pid": child.pid, "taken": True, "mesh": "spmd", "rank": 3}


@needs_processes
@pytest.mark.parametrize(
    "code",
    [
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "pid = os.fork()\nif pid == 0:\n    signal.signal(signal.SIGRTMAX - 3, print)\n    os._exit(0)\nos.wait()",
    ],
    ids=["another signal", "in a fork"],
)
def test_handlers_of_other_signals_and_processes_leave_the_mark(code: str, tmp_path: Path) -> None:
    with script(f"import os, signal\n{code}", tmp_path) as child:
        assert script_mark(child.pid)["signal"] == int(signal.SIGRTMAX) - 3


@needs_processes
def test_a_script_that_closes_its_files_keeps_those_that_it_opens_then(tmp_path: Path) -> None:
    """The mark's descriptor is that of a file of the script by then."""
    code = (
        "import os, signal\nos.closerange(3, 100)\nfiles = [open(f'{n}', 'w+') for n in range(4)]\n"
        "for file in files: print('kept', file=file, flush=True)\nsignal.signal(signal.SIGRTMAX - 3, print)"
    )
    with script(f"import os\nos.chdir({str(tmp_path)!r})\n{code}", tmp_path) as child:
        assert find_marks(child.pid, SCRIPT_MARK) == []
    assert [(tmp_path / str(number)).read_text() for number in range(4)] == ["kept\n"] * 4
