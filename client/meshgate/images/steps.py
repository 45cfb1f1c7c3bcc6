"""The steps of an image, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class PipInstall:
    packages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunBash:
    command: str


@dataclass(frozen=True, slots=True)
class SetEnvVars:
    """With ``expand``, the values come from a Dockerfile, and the host expands their variables."""

    variables: tuple[tuple[str, str], ...]
    expand: bool = False


@dataclass(frozen=True, slots=True)
class Argument:
    """A variable that later steps see and worker processes do not."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class WorkDir:
    """The working directory of later steps and of worker processes; the host expands its variables."""

    path: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Local paths, and their destination on the hosts. With ``expand``, they come from a Dockerfile: the host expands
    the destination's variables, sources may contain wildcards, and the ``.dockerignore`` of ``context`` applies."""

    sources: tuple[str, ...]
    destination: str
    expand: bool = False
    context: str | None = None


@dataclass(frozen=True, slots=True)
class SyncPackage:
    path: str


Step: TypeAlias = PipInstall | RunBash | SetEnvVars | Argument | WorkDir | Copy | SyncPackage

_MAX_TITLE = 72


def title(step: Step) -> str:
    """A short description for messages."""
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
            text = f"change directory to {path}"
        case Copy(sources, destination):
            text = f"copy {' '.join(sources)} to {destination or '.'}"
        case SyncPackage(path):
            text = f"sync package {path}"
    return text if len(text) <= _MAX_TITLE else f"{text[: _MAX_TITLE - 1]}…"
