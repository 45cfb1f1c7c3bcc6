"""Image: what a worker runs in, as a chain of steps. Nothing is built here: the steps run in the started pods.

::

    Image(name="trainer").from_docker("pytorch/pytorch").pip_install(["transformers"]).set_env_vars({"X": "1"})

An image is a value: every step returns a new one, so that two jobs can grow from one base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

__all__ = ["Copy", "Image", "PipInstall", "RunBash", "SetEnvVars", "Step", "SyncPackage"]


@dataclass(frozen=True, slots=True)
class PipInstall:
    packages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunBash:
    command: str


@dataclass(frozen=True, slots=True)
class SetEnvVars:
    variables: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Copy:
    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class SyncPackage:
    path: str


_EVERY_WORKER_HAS = frozenset({"torchmonarch", "meshgate", "meshgate[worker]"})

Step: TypeAlias = PipInstall | RunBash | SetEnvVars | Copy | SyncPackage


@dataclass(frozen=True, slots=True)
class Image:
    """The base (``reference``; None: meshgate's own worker image), and the steps upon it, in order."""

    name: str = ""
    reference: str | None = None
    steps: tuple[Step, ...] = field(default=(), repr=False)
    dockerfile: str | None = None

    def from_docker(self, reference: str) -> Image:
        """Starts from the container image ``reference``."""
        if not reference or reference != reference.strip():
            raise ValueError(f"{reference!r} is not an image reference such as pytorch/pytorch:2.7.1")
        return replace(self, reference=reference, dockerfile=None)

    @classmethod
    def from_dockerfile(cls, path: str | Path, name: str = "") -> Image:
        """Starts from the FROM of a Dockerfile and takes its instructions as steps."""
        file = Path(path)
        if not file.is_file():
            raise ValueError(f"there is no Dockerfile at {file}")
        return cls(name=name, dockerfile=str(file))

    def pip_install(self, packages: Sequence[str] | str) -> Image:
        """Installs packages, each written as pip takes it."""
        listed = (packages,) if isinstance(packages, str) else tuple(packages)
        if not listed or not all(isinstance(each, str) and each.strip() for each in listed):
            raise ValueError(f"pip_install takes the packages to install, not {packages!r}")
        return self._then(PipInstall(listed))

    def set_env_vars(self, variables: Mapping[str, str]) -> Image:
        """Sets environment variables for what follows and for the workers."""
        return self._then(SetEnvVars(tuple((str(name), str(value)) for name, value in variables.items())))

    def run_bash(self, command: str) -> Image:
        """Runs a shell command."""
        return self._then(RunBash(command))

    def copy(self, source: str | Path, destination: str | Path = "") -> Image:
        """Copies a file or directory of this machine."""
        return self._then(Copy(str(source), str(destination)))

    def sync_package(self, path: str | Path) -> Image:
        """Installs a local package in development: its code follows live."""
        return self._then(SyncPackage(str(path)))

    def _then(self, step: Step) -> Image:
        return replace(self, steps=(*self.steps, step))

    @property
    def env_vars(self) -> dict[str, str]:
        """The variables that the steps set, the last one counting."""
        return {name: value for step in self.steps if isinstance(step, SetEnvVars) for name, value in step.variables}

    @property
    def live_steps(self) -> tuple[Step, ...]:
        """The steps that have to run in the pods. What every worker has anyway is not installed."""
        return tuple(
            step
            for step in self.steps
            if not isinstance(step, SetEnvVars)
            and not (isinstance(step, PipInstall) and set(step.packages) <= _EVERY_WORKER_HAS)
        )
