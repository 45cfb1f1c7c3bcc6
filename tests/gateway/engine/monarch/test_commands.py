from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

from meshgate_gateway.engine.monarch.commands import ARGUMENTS, HOSTS_PYTHON, native_commands
from meshgate_wire.messages import BootstrapCommand, Launch


def test_without_commands_the_hosts_use_their_own() -> None:
    assert native_commands(Launch(binding=({"cpus": "0"},))) is None


def test_each_rank_has_its_command() -> None:
    commands = tuple(
        BootstrapCommand(program=f"/python{each}", args=("-m", "worker"), env={"A": None}, inherit_env=False)
        for each in range(2)
    )
    native = native_commands(Launch(commands=commands, command_of=(1, 0)))
    assert native is not None
    made = [native(SimpleNamespace(rank=rank)) for rank in range(2)]
    assert [each.program for each in made] == ["/python1", "/python0"]
    assert (made[0].args, made[0].env, made[0].inherit_env) == (["-m", "worker"], {"A": None}, False)


def test_a_command_without_a_program_starts_the_python_of_the_host() -> None:
    native = native_commands(Launch(commands=(BootstrapCommand(),)))
    assert native is not None
    command = native(SimpleNamespace(rank=5))
    assert (command.program, command.args[-2:]) == ("/bin/sh", list(ARGUMENTS))
    parent = f"import subprocess; subprocess.run(['/bin/sh', '-c', {HOSTS_PYTHON!r}, '/fallback', '-c', {PRINT!r}])"
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == sys.executable


PRINT = "import sys; print(sys.executable)"
