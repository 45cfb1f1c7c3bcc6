"""The steps of an image, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Argument", "Copy", "PipInstall", "RunBash", "SetEnvVars", "Step", "SyncPackage", "WorkDir", "title"]


@dataclass(frozen=True, slots=True)
class PipInstall:
    packages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunBash:
    command: str


@dataclass(frozen=True, slots=True)
class SetEnvVars:
    """With ``expand`` the values are words of a Dockerfile, read on the host."""

    variables: tuple[tuple[str, str], ...]
    expand: bool = False


@dataclass(frozen=True, slots=True)
class Argument:
    """A variable for the steps that follow, which the workers do not see."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class WorkDir:
    """Where later steps run, and the workers' processes; a word of a Dockerfile."""

    path: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Paths of this machine, and one on the hosts. With ``expand`` they come from a Dockerfile: the destination is
    a word of it, sources may hold wildcards, and the ``.dockerignore`` of the directory ``context`` counts."""

    sources: tuple[str, ...]
    destination: str
    expand: bool = False
    context: str | None = None


@dataclass(frozen=True, slots=True)
class SyncPackage:
    path: str


Step: TypeAlias = PipInstall | RunBash | SetEnvVars | Argument | WorkDir | Copy | SyncPackage

_LONGEST_TITLE = 72


def title(step: Step) -> str:
    """The step in a few words."""
    match step:
        case PipInstall(packages):
            text = f"pip install {' '.join(packages)}"
        case RunBash(command):
            text = f"run {' '.join(command.split())}"
        case SetEnvVars(variables):
            text = f"set {' '.join(name for name, _ in variables)}"
        case Argument(name, _):
            text = f"argument {name}"
        case WorkDir(path):
            text = f"work in {path}"
        case Copy(sources, destination):
            text = f"copy {' '.join(sources)} to {destination or '.'}"
        case SyncPackage(path):
            text = f"sync package {path}"
    return text if len(text) <= _LONGEST_TITLE else f"{text[: _LONGEST_TITLE - 1]}…"
