from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from meshgate_gateway.processes import Child, Exit, kill_session
from tests.gateway.server_process import wait_gone

DEADLINE = 20.0


class Started:
    """A Python program as a Child, its lines kept."""

    def __init__(self, program: str, *arguments: str) -> None:
        self.lines: list[str] = []
        self._said = asyncio.Event()
        self.child = Child([sys.executable, "-c", program, *arguments], environment=os.environ, on_line=self._take)

    async def said(self) -> None:
        """Waits for the first line."""
        await self._said.wait()

    def _take(self, line: str) -> None:
        self.lines.append(line)
        self._said.set()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE))


@pytest.mark.parametrize(
    ("code", "reason"),
    [(0, "ended with exit code 0"), (-9, "was killed by SIGKILL"), (-40, "was killed by signal 40")],
)
def test_an_exit_has_a_reason(code: int, reason: str) -> None:
    assert Exit(code, "").reason == reason


def test_output_comes_line_by_line_and_its_last_part_is_kept() -> None:
    async def test() -> None:
        started = Started(r"import os, sys; os.write(1, b'one\n'); os.write(2, b'two\n'); sys.exit(3)")
        assert await started.child.wait() == Exit(3, "one\ntwo\n")
        assert started.lines == ["one", "two"]
        assert not started.child.running

    run(test)


def test_no_more_than_the_tail_of_a_long_output_is_kept() -> None:
    async def test() -> None:
        started = Started("for i in range(100_000): print(i)")
        exited = await started.child.wait()
        assert len(exited.output) <= 64 * 1024
        assert exited.output.endswith("99999\n")
        assert len(started.lines) == 100_000

    run(test)


def test_a_line_without_end_comes_in_bounded_pieces() -> None:
    async def test() -> None:
        started = Started("print('x' * 100_000, end='')")
        await started.child.wait()
        assert max(map(len, started.lines)) <= 8 * 1024
        assert sum(map(len, started.lines)) == 100_000

    run(test)


def test_bytes_that_are_no_text_are_output_too() -> None:
    async def test() -> None:
        started = Started(r"import os; os.write(1, b'a\xffb\xc3'); os.write(1, b'\xa9\n')")
        await started.child.wait()
        assert started.lines == ["a�bé"]

    run(test)


def test_a_descendant_that_holds_the_output_does_not_delay_the_exit() -> None:
    async def test() -> None:
        program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
        started = Started(program)
        exited = await started.child.wait()
        kill_session(started.child.pid)
        wait_gone(int(exited.output))

    run(test)


def test_who_does_not_end_in_time_is_killed_with_its_session() -> None:
    async def test() -> None:
        program = (
            "import subprocess, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            "print(subprocess.Popen(['sleep', '600']).pid, flush=True); signal.pause()"
        )
        started = Started(program)
        await started.said()
        exited = await started.child.end(0.01)
        assert exited.reason == "was killed by SIGKILL"
        wait_gone(int(started.lines[0]))

    run(test)


def test_a_mark_finds_who_left_the_session() -> None:
    async def test() -> None:
        mark = f"MESHGATE_TEST_MARK={os.getpid()}"
        name, _, value = mark.partition("=")
        program = (
            f"import os, subprocess; os.environ['{name}'] = '{value}';"
            "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
        )
        started = Started(program)
        exited = await started.child.wait()
        assert kill_session(started.child.pid) == 0
        assert kill_session(started.child.pid, mark) == 1
        wait_gone(int(exited.output))

    run(test)


def test_a_program_that_is_not_there_is_an_error() -> None:
    async def test() -> None:
        with pytest.raises(FileNotFoundError):
            Child(["/nowhere/at/all"], environment={}, on_line=print)

    run(test)
