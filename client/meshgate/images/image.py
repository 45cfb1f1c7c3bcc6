"""Image: the environment of workers as a chain of steps. Nothing is built; the steps run in started pods.

::

    Image(name="trainer").from_docker("pytorch/pytorch").pip_install(["transformers"]).set_env_vars({"X": "1"})

An image is a value: each step returns a new image, so two jobs can extend the same base.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshgate.images.dockerfile import parse
from meshgate.images.plan import Copy, PipInstall, RunBash, SetEnvVars, Step, SyncPackage

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REJECTED_OPTIONS = {
    "-e": "use sync_package() for packages in development",
    "--editable": "use sync_package() for packages in development",
    "-r": "list the packages instead of a requirements file",
    "--requirement": "list the packages instead of a requirements file",
    "-t": "meshgate chooses the target directory",
    "--target": "meshgate chooses the target directory",
    "--prefix": "meshgate chooses the target directory",
    "--user": "meshgate chooses the target directory",
}
_ON_EVERY_WORKER = frozenset({"torchmonarch", "meshgate", "meshgate[worker]"})


@dataclass(frozen=True, slots=True)
class Image:
    """The base image (``reference``; None: meshgate's own worker image) and the steps on top of it, in order."""

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
        """Starts from the FROM of a Dockerfile, with its instructions as steps. ``arguments`` are values of its ARGs.

        Raises ValueError if the file does not exist, and DockerfileError, which names the line, on an instruction
        other than FROM, RUN, ENV, COPY, WORKDIR and ARG.
        """
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ValueError(f"there is no Dockerfile at {file}") from None
        parsed = parse(text, context=str(file.resolve().parent), name=str(path), arguments=arguments)
        return cls(name=name, reference=parsed.reference, steps=parsed.steps)

    def pip_install(self, packages: Sequence[str] | str) -> Image:
        """Installs packages, each in pip's syntax. An entry that begins with ``-`` is a pip option."""
        if not isinstance(packages, Iterable):
            raise TypeError(f"pip_install({packages!r}): expected one or more packages, such as ['numpy']")
        entries = (packages,) if isinstance(packages, str) else tuple(packages)
        if not entries or not all(isinstance(each, str) and each.strip() for each in entries):
            raise ValueError(f"pip_install({packages!r}): expected one or more packages")
        for each in entries:
            option = re.split(r"[\s=]", each, maxsplit=1)[0]
            if option in _REJECTED_OPTIONS:
                raise ValueError(f"pip_install([{each!r}]): {option} is not supported; {_REJECTED_OPTIONS[option]}")
        return self._then(PipInstall(entries))

    def set_env_vars(self, variables: Mapping[str, str]) -> Image:
        """Sets environment variables for later steps and new worker processes."""
        if not isinstance(variables, Mapping):
            raise TypeError(f"set_env_vars({variables!r}): expected values by name, such as {{'DEBUG': '1'}}")
        for name in variables:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"set_env_vars: {name!r} is not a valid variable name")
        return self._then(SetEnvVars(tuple((name, str(value)) for name, value in variables.items())))

    def run_bash(self, command: str) -> Image:
        """Runs a shell command, in bash if the host has it, else in sh."""
        if not isinstance(command, str):
            raise TypeError(f"run_bash({command!r}): expected one command as a string")
        if not command.strip():
            raise ValueError("run_bash: the command is empty")
        return self._then(RunBash(command))

    def copy(self, source: str | Path, destination: str | Path = "") -> Image:
        """Copies a local file, or the contents of a local directory, to ``destination`` (default: its own name).

        If ``destination`` is a directory or ends with ``/``, a file goes into it. Keeps executable bits, and links
        in a directory; if ``source`` itself is a link, copies what it leads to.
        """
        path = os.path.abspath(os.path.expanduser(source))
        return self._then(Copy((path,), str(destination) or os.path.basename(path)))

    def sync_package(self, path: str | Path) -> Image:
        """Makes a local package importable, as it is at each ``state()``. Does not install its dependencies."""
        return self._then(SyncPackage(os.path.abspath(os.path.expanduser(path))))

    def _then(self, step: Step) -> Image:
        return replace(self, steps=(*self.steps, step))

    @property
    def live_steps(self) -> tuple[Step, ...]:
        """The steps to run in the pods: all except installs of packages that every worker has."""
        return tuple(
            step for step in self.steps if not (isinstance(step, PipInstall) and set(step.packages) <= _ON_EVERY_WORKER)
        )
