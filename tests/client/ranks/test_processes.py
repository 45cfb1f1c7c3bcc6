"""Processes that have marked themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshgate.ranks.processes import find_marks, siblings
from meshgate_processes.identity import identify_process
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
    child = subprocess.Popen([sys.executable, "-c", MARKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    ((descriptor, about),) = find_marks(child.pid, "test-mark")
    assert about == {"pid": child.pid, "rank": 3}
    os.close(descriptor)
    child.communicate(b"\n")


@needs_processes
def test_a_process_that_has_ended_has_no_marks() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert find_marks(child.pid, "test-mark") == []


@needs_processes
def test_siblings_are_the_other_processes_of_the_same_host(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    monkeypatch.setattr(os, "getppid", lambda: child.pid)  # as if it were the host
    (below,) = siblings()
    assert Path(f"/proc/{below}").exists()
    assert os.getpid() not in siblings()
    child.communicate(b"\n")


@pytest.mark.parametrize("code", [GUARDED, COMMAND])
def test_a_command_ends_with_the_process_that_started_it_however_that_ends(code: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    wait_for(lambda: identify_process(child) is None, f"process {child} to end", timeout=60)
