"""What a process has started ends when it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_for

GUARDED = """
import subprocess, time
from meshgate.ranks.guard import start_guard
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


@pytest.mark.parametrize("code", [GUARDED, COMMAND])
def test_a_command_ends_with_the_process_that_started_it_however_that_ends(code: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    wait_for(lambda: not Path(f"/proc/{child}").exists(), f"process {child} to end", timeout=60)
