from __future__ import annotations

import asyncio
import os
import sys

import pytest

from meshgate_gateway.child_process import ChildProcess, ExitStatus, start_process
from meshgate_processes.marks import end_processes
from tests.gateway.server_process import wait_gone


class Started:
    """A Python program as a ChildProcess; records its lines."""

    def __init__(self, program: str, *arguments: str) -> None:
        self.lines: list[str] = []
        self._printed = asyncio.Event()
        process = start_process([sys.executable, "-c", program, *arguments], os.environ)
        self.child = ChildProcess(process, on_line=self._take)

    async def printed(self) -> None:
        """Waits for the first line."""
        await self._printed.wait()

    def _take(self, line: str) -> None:
        self.lines.append(line)
        self._printed.set()


@pytest.mark.parametrize(
    ("code", "reason"),
    [(0, "ended with exit code 0"), (-9, "was killed by SIGKILL"), (-40, "was killed by signal 40")],
)
def test_an_exit_status_has_a_reason(code: int, reason: str) -> None:
    assert ExitStatus(code, "").reason == reason


async def test_output_is_reported_line_by_line_and_its_tail_is_kept() -> None:
    started = Started(r"import os, sys; os.write(1, b'one\n'); os.write(2, b'two\n'); sys.exit(3)")
    assert await started.child.wait() == ExitStatus(3, "one\ntwo\n")
    assert started.lines == ["one", "two"]
    assert not started.child.running


async def test_only_the_tail_of_long_output_is_kept() -> None:
    started = Started("for i in range(100_000): print(i)")
    status = await started.child.wait()
    assert len(status.output) <= 64 * 1024
    assert status.output.endswith("99999\n")
    assert len(started.lines) == 100_000


async def test_an_unterminated_line_is_split_at_the_limit() -> None:
    started = Started("print('x' * 100_000, end='')")
    await started.child.wait()
    assert max(map(len, started.lines)) <= 8 * 1024
    assert sum(map(len, started.lines)) == 100_000


async def test_invalid_utf8_is_replaced() -> None:
    started = Started(r"import os; os.write(1, b'a\xffb\xc3'); os.write(1, b'\xa9\n')")
    await started.child.wait()
    assert started.lines == ["a�bé"]


async def test_a_descendant_that_keeps_the_output_open_does_not_delay_wait() -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    started = Started(program)
    status = await started.child.wait()
    end_processes(session=started.child.pid)
    wait_gone(int(status.output))


async def test_stop_kills_the_process_and_its_session_after_the_timeout() -> None:
    program = (
        "import subprocess, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True); signal.pause()"
    )
    started = Started(program)
    await started.printed()
    status = await started.child.stop(0.01)
    assert status.reason == "was killed by SIGKILL"
    wait_gone(int(started.lines[0]))


async def test_a_mark_finds_processes_that_left_the_session() -> None:
    mark = f"MESHGATE_TEST_MARK={os.getpid()}"
    name, _, value = mark.partition("=")
    program = (
        f"import os, subprocess; os.environ['{name}'] = '{value}';"
        "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
    )
    started = Started(program)
    status = await started.child.wait()
    assert end_processes(session=started.child.pid) == 0
    assert end_processes(mark, session=started.child.pid) == 1
    wait_gone(int(status.output))


async def test_a_missing_program_raises() -> None:
    with pytest.raises(FileNotFoundError):
        start_process(["/nowhere/at/all"], {})
