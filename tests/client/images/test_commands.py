"""Commands of image steps, run on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshgate.images.commands import TAIL_LINES, StepFailed, execute
from meshgate_processes.marks import find_processes

SHELL = ["/bin/sh", "-c"]


def test_output_is_forwarded(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    execute([*SHELL, "echo $A in $(pwd); echo error >&2"], {"A": "value", "PATH": os.defpath}, str(tmp_path))
    assert capfd.readouterr().out == f"value in {tmp_path}\nerror\n"


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_a_failure_carries_exit_code_and_last_lines(command: str, code: int, tmp_path: Path) -> None:
    with pytest.raises(StepFailed) as raised:
        execute([*SHELL, f"seq 1 100; {command}"], dict(os.environ), str(tmp_path))
    assert raised.value.code == code
    assert raised.value.output.split() == [str(number) for number in range(101 - TAIL_LINES, 101)]


def test_background_processes_end_with_the_command(tmp_path: Path) -> None:
    execute([*SHELL, "LEFT_BEHIND=3 sleep 1000 & exit 0"], dict(os.environ), str(tmp_path))
    assert find_processes("LEFT_BEHIND=3") == []
