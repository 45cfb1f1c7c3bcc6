"""Commands on the login node."""

from __future__ import annotations

import os
import subprocess

from meshgate.jobs.slurm.login_node import ThisMachine, python_command


def test_a_command_runs_with_its_input() -> None:
    output = ThisMachine().run("cat; echo problem >&2; exit 3", "hello")
    assert (output.code, output.stdout, output.stderr) == (3, "hello", "problem\n")


def test_the_shell_expands_the_home_of_a_python_and_nothing_else() -> None:
    command = f"printf '%s\\n' {python_command('~/my env/bin/$(x)', '-m', 'a b')}"
    shown = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == [os.path.expanduser("~/my env/bin/$(x)"), "-m", "a b"]
