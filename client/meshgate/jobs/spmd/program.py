"""Finds the program of a command: on this machine, where it is in the synced project, or only on the workers."""

from __future__ import annotations

import os
from pathlib import Path

from meshgate.jobs.spmd.run import Program
from meshgate.jobs.spmd.torchrun import TorchrunCommand


def local_file(command: TorchrunCommand, directory: str) -> str | None:
    """The file on this machine that the command names, by its absolute path; None if it names something else."""
    if command.kind == "module" or (command.kind == "executable" and "/" not in command.program):
        return None
    path = os.path.join(directory, os.path.expanduser(command.program))
    return os.path.abspath(path) if os.path.isfile(path) else None


def require_program(command: TorchrunCommand, directory: str) -> None:
    """Raises FileNotFoundError if the command names a file by a relative path, and it does not exist here.

    Files with absolute paths may exist on the workers only, and so may modules and programs; each worker checks them.
    """
    if command.kind == "module" or os.path.isabs(os.path.expanduser(command.program)):
        return
    if command.kind == "executable" and "/" not in command.program:
        return
    if local_file(command, directory) is None:
        is_directory = os.path.isdir(os.path.join(directory, os.path.expanduser(command.program)))
        problem = "is a directory" if is_directory else "does not exist"
        raise FileNotFoundError(
            f"the script {command.program} {problem} in {directory}. Run the program where it does, or pass its "
            "absolute path; for a module, use -m"
        )


def find_program(command: TorchrunCommand, directory: str, top: Path | None) -> Program:
    """What each rank runs. ``top`` is the directory of the synced project, None if no code is synced.

    Raises ValueError if the file exists here and is outside of the project, so that workers would not have it.
    """
    if top is None:
        name = local_file(command, directory) or command.program
        return Program(command.kind, name, command.arguments)
    place = _below(Path(directory), top)
    file = local_file(command, directory)
    if file is None:
        return Program(command.kind, command.program, command.arguments, directory=place or "")
    synced = _below(Path(file), top)
    if synced is None:
        raise ValueError(f"{file} is outside of the synced project {top}: move it there, or name it in sync_dirs")
    return Program(command.kind, file, command.arguments, synced, place or "")


def _below(path: Path, top: Path) -> str | None:
    try:
        relative = str(path.resolve().relative_to(top.resolve()))
    except ValueError:
        return None
    return "" if relative == "." else relative
