"""Image: what a worker runs in, as a chain of steps. Nothing is built here: the steps run in the started pods.

::

    Image(name="trainer").from_docker("pytorch/pytorch").pip_install(["transformers"]).set_env_vars({"X": "1"})

An image is a value: every step returns a new one, so that two jobs can grow from one base.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshgate.images.dockerfile import parse
from meshgate.images.steps import Copy, PipInstall, RunBash, SetEnvVars, Step, SyncPackage

__all__ = ["Image"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFUSED_OPTIONS = {
    "-e": "sync_package() is for packages in development",
    "--editable": "sync_package() is for packages in development",
    "-r": "list what the file lists",
    "--requirement": "list what the file lists",
    "-t": "packages have a place of their own",
    "--target": "packages have a place of their own",
    "--prefix": "packages have a place of their own",
    "--user": "packages have a place of their own",
}
_EVERY_WORKER_HAS = frozenset({"torchmonarch", "meshgate", "meshgate[worker]"})


@dataclass(frozen=True, slots=True)
class Image:
    """The base (``reference``; None: meshgate's own worker image), and the steps upon it, in order."""

    name: str = ""
    reference: str | None = None
    steps: tuple[Step, ...] = field(default=(), repr=False)

    def from_docker(self, reference: str) -> Image:
        """Starts from the container image ``reference``."""
        if not reference or reference != reference.strip():
            raise ValueError(f"{reference!r} is not an image reference such as pytorch/pytorch:2.7.1")
        return replace(self, reference=reference)

    @classmethod
    def from_dockerfile(cls, path: str | Path, name: str = "", *, arguments: Mapping[str, str] | None = None) -> Image:
        """Starts from the FROM of a Dockerfile and takes its instructions as steps. ``arguments`` go to its ARGs.

        Raises ValueError on a file that is not there, and DockerfileError, which names the line, on an
        instruction other than FROM, RUN, ENV, COPY, WORKDIR and ARG.
        """
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ValueError(f"there is no Dockerfile at {file}") from None
        read = parse(text, context=str(file.resolve().parent), name=str(path), arguments=arguments)
        return cls(name=name, reference=read.reference, steps=read.steps)

    def pip_install(self, packages: Sequence[str] | str) -> Image:
        """Installs packages, each written as pip takes it. An entry that begins with ``-`` is options of pip's."""
        listed = (packages,) if isinstance(packages, str) else tuple(packages)
        if not listed or not all(isinstance(each, str) and each.strip() for each in listed):
            raise ValueError(f"pip_install takes the packages to install, not {packages!r}")
        for each in listed:
            option = re.split(r"[\s=]", each, maxsplit=1)[0]
            if option in _REFUSED_OPTIONS:
                raise ValueError(f"pip_install([{each!r}]): {_REFUSED_OPTIONS[option]}")
        return self._then(PipInstall(listed))

    def set_env_vars(self, variables: Mapping[str, str]) -> Image:
        """Sets environment variables for the steps that follow and for new processes of the workers."""
        for name in variables:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"set_env_vars: {name!r} is not the name of a variable")
        return self._then(SetEnvVars(tuple((name, str(value)) for name, value in variables.items())))

    def run_bash(self, command: str) -> Image:
        """Runs a shell command, in bash where there is one."""
        if not command.strip():
            raise ValueError("run_bash takes a command")
        return self._then(RunBash(command))

    def copy(self, source: str | Path, destination: str | Path = "") -> Image:
        """Copies a file, or what a directory holds, of this machine to ``destination`` (default: its own name).

        A file goes into ``destination`` where that is a directory or ends with ``/``. Executable bits are kept.
        """
        path = os.path.abspath(os.path.expanduser(source))
        return self._then(Copy((path,), str(destination) or os.path.basename(path)))

    def sync_package(self, path: str | Path) -> Image:
        """Makes a local package importable, as it is at each ``state()``. What it depends on is yours to install."""
        return self._then(SyncPackage(os.path.abspath(os.path.expanduser(path))))

    def _then(self, step: Step) -> Image:
        return replace(self, steps=(*self.steps, step))

    @property
    def live_steps(self) -> tuple[Step, ...]:
        """The steps that have to run in the pods. What every worker has anyway is not installed."""
        return tuple(
            step
            for step in self.steps
            if not (isinstance(step, PipInstall) and set(step.packages) <= _EVERY_WORKER_HAS)
        )
