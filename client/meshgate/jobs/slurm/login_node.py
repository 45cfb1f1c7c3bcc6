"""Where Slurm's commands are: this machine, or a login node that ``ssh`` reaches."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass
from typing import Protocol

COMMAND_TIMEOUT = 180.0


@dataclass(frozen=True, slots=True)
class Output:
    """What a command on the login node returned."""

    code: int
    stdout: str
    stderr: str


class LoginNode(Protocol):
    """A machine with Slurm's commands. All methods may block and raise JobError or OSError."""

    def open(self) -> None:
        """Connects. May ask the user for a password on the terminal. Called again to connect again."""

    def run(self, command: str, stdin: str) -> Output:
        """Runs a shell command there."""

    def forward(self, remote: str) -> str:
        """What on this machine leads to ``remote``, as seen from there. Both are the path of a unix socket or
        ``host:port``."""

    @property
    def connection(self) -> str | None:
        """By which another process of this machine can use the same connection, if there is one."""

    def close(self) -> None: ...

    def __str__(self) -> str:
        """The machine in error messages."""


class ThisMachine:
    """This machine is a login node itself."""

    def open(self) -> None:
        return None

    def run(self, command: str, stdin: str) -> Output:
        shell = ["/bin/sh", "-c", command]
        result = subprocess.run(
            shell, input=stdin, capture_output=True, text=True, timeout=COMMAND_TIMEOUT, check=False
        )
        return Output(result.returncode, result.stdout, result.stderr)

    def forward(self, remote: str) -> str:
        return remote

    @property
    def connection(self) -> str | None:
        return None

    def close(self) -> None:
        return None

    def __str__(self) -> str:
        return f"this machine ({os.uname().nodename})"


def python_command(python: str, *arguments: str) -> str:
    """A shell command that runs ``python``, whose leading ``~/`` the shell expands."""
    quoted = f"~/{shlex.quote(python[2:])}" if python.startswith("~/") else shlex.quote(python)
    return " ".join([quoted, *map(shlex.quote, arguments)])
