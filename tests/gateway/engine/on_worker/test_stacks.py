"""A process that lets others read its stacks. How they do is in tests/client/ranks/test_stacks_on_host.py."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from meshgate_gateway.engine.on_worker.stacks import read_tasks, read_threads, serve_stacks
from tests.waiting import wait_for


def test_each_thread_has_its_name_and_frames_outermost_first() -> None:
    def wait_here(event: threading.Event) -> None:
        event.wait()

    def waiting_thread() -> tuple[dict[str, Any], list[str]] | None:
        for each in read_threads():
            functions = [function.rpartition(".")[2] for _, _, function, _ in each["frames"]]
            if each["name"] == "waiting" and "wait" in functions:
                return each, functions
        return None

    release = threading.Event()
    thread = threading.Thread(target=wait_here, args=(release,), name="waiting")
    thread.start()
    try:
        found, functions = wait_for(waiting_thread, "the thread to wait")
    finally:
        release.set()
        thread.join()
    assert functions.index("wait_here") < functions.index("wait")
    file, line, _, text = found["frames"][functions.index("wait_here")]
    assert (file, text) == (__file__, "event.wait()")
    assert line > 0
    assert threading.current_thread().name not in [each["name"] for each in read_threads()]


def test_a_suspended_task_has_the_frames_of_all_its_coroutines() -> None:
    async def inner(event: asyncio.Event) -> None:
        await event.wait()

    async def outer(event: asyncio.Event) -> None:
        await inner(event)

    async def main() -> list[list[str]]:
        event = asyncio.Event()
        task = asyncio.create_task(outer(event), name="suspended")
        await asyncio.sleep(0)
        found = await asyncio.to_thread(read_tasks)
        event.set()
        await task
        return [
            [frame[2].rpartition(".")[2] for frame in each["frames"]] for each in found if each["name"] == "suspended"
        ]

    assert asyncio.run(main()) == [["outer", "inner", "wait"]]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="stacks are read through /proc")
def test_a_process_marks_itself_and_its_children_do_not_inherit_that() -> None:
    program = (
        "import os, subprocess, sys\n"
        "from meshgate_gateway.engine.on_worker.stacks import serve_stacks\n"
        "serve_stacks('procs', 3, 'workers-1', 'mine')\n"
        "subprocess.run(['sh', '-c', f'ls -l /proc/{os.getpid()}/fd | grep -c meshgate-stacks'])\n"
        "subprocess.run(['sh', '-c', 'ls -l /proc/self/fd | grep -c meshgate-stacks'], close_fds=False)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert found.stdout.split() == ["1", "0"]


def test_a_system_without_anonymous_files_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    before = set(threading.enumerate())
    serve_stacks("procs", 0, "workers-0", "mine")
    assert set(threading.enumerate()) <= before
