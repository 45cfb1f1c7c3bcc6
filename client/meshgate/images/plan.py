"""The steps of an image and their plan: what a host needs to run each, and a digest that says if it runs again.

The digest of a step covers the step, the content it copies and all earlier steps. A host therefore keeps the steps
before the first changed one, and runs that one and all later ones again.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shlex
import stat
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeAlias

from meshgate_sync.tree.ignore import DEFAULTS, Patterns

_LINK, _DIRECTORY, _EXECUTABLE, _FILE = "link", "directory", "executable", "file"


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


@dataclass(frozen=True, slots=True)
class Content:
    """What a step copies: (name on the host, local path), sorted by name. Each file is read twice, for its digest and
    to be sent, so it may change in between."""

    entries: tuple[tuple[str, str], ...]

    def digest(self) -> str:
        total = hashlib.sha256()
        for name, path in self.entries:
            kind = _kind(path)
            value = os.readlink(path) if kind == _LINK else "" if kind == _DIRECTORY else _file_digest(path)
            total.update(json.dumps([name, kind, value]).encode())
        return total.hexdigest()

    def write_tar(self, file: IO[bytes]) -> None:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, path in self.entries:
                info = tar.gettarinfo(path, name)
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                if info.islnk():  # a hard link to an earlier entry: store its content
                    info.type, info.size = tarfile.REGTYPE, os.path.getsize(path)
                if info.isreg():
                    with open(path, "rb") as source:
                        tar.addfile(info, source)
                else:
                    tar.addfile(info)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step: ``payload`` is sent to the hosts, ``content`` is what it copies."""

    payload: dict[str, Any]
    content: Content | None = None

    @property
    def digest(self) -> str:
        return str(self.payload["digest"])

    @property
    def title(self) -> str:
        return str(self.payload["title"])


def plan(steps: Sequence[Step]) -> tuple[PlannedStep, ...]:
    """Plans ``steps``. Reads what they copy; raises ValueError if it does not exist."""
    planned = []
    digest = ""
    for step in steps:
        payload, content = _payload(step)
        digest = hashlib.sha256(json.dumps([digest, payload], sort_keys=True).encode()).hexdigest()
        planned.append(PlannedStep({**payload, "digest": digest, "title": title(step)}, content))
    return tuple(planned)


def require_sources(steps: Sequence[Step]) -> None:
    """Raises ValueError if something that a step copies does not exist. Reads no file."""
    for step in steps:
        if isinstance(step, Copy):
            for source in step.sources:
                _resolve(source, step)
        elif isinstance(step, SyncPackage):
            _require_directory(step.path)


def _payload(step: Step) -> tuple[dict[str, Any], Content | None]:
    match step:
        case PipInstall(packages):
            options = [part for each in packages if each.startswith("-") for part in shlex.split(each)]
            names = [each for each in packages if not each.startswith("-")]
            payload: dict[str, Any] = {"kind": "pip", "options": options, "packages": names}
        case RunBash(command):
            payload = {"kind": "run", "command": command}
        case SetEnvVars(variables, expand):
            payload = {"kind": "env", "variables": dict(variables), "expand": expand}
        case Argument(name, value):
            payload = {"kind": "arg", "variables": {name: value}}
        case WorkDir(path):
            payload = {"kind": "workdir", "path": path}
        case Copy():
            return _copy(step)
        case SyncPackage(path):
            return _package(path)
    return payload, None


def _copy(step: Copy) -> tuple[dict[str, Any], Content]:
    resolved = [path for source in step.sources for path in _resolve(source, step)]
    ignored = _dockerignore(step.context)

    def is_excluded(path: str, *, directory: bool) -> bool:
        place = os.fsencode(os.path.relpath(path, step.context or path))
        return place != b"." and ignored.cover(place, directory=directory)

    entries: dict[str, str] = {}
    sources = []
    for source in resolved:
        if os.path.islink(source) and is_excluded(source, directory=False):
            continue
        target = _target(source, step.context)
        is_directory = os.path.isdir(target)
        below = _tree(target, ignored, step.context or target) if is_directory else {}
        if below or not is_excluded(target, directory=is_directory):
            sources.append(source)
            entries.update(below if is_directory else {os.path.basename(source): target})
    if not sources:
        raise ValueError(f"cannot copy {', '.join(step.sources)}: .dockerignore excludes it")
    only_file = len(sources) == 1 and not os.path.isdir(sources[0])
    destination = step.destination
    if len(sources) > 1 and not destination.endswith("/"):  # wildcards
        destination += "/"
    content = Content(tuple(sorted(entries.items())))
    payload = {"kind": "copy", "destination": destination, "expand": step.expand, "content": content.digest()}
    return {**payload, "file": os.path.basename(sources[0]) if only_file else None}, content


def _package(path: str) -> tuple[dict[str, Any], Content]:
    _require_directory(path)
    base = os.path.basename(path)
    entries = _tree(path, Patterns.of(map(str.encode, DEFAULTS)), path)
    root = "."
    if "__init__.py" in entries:  # an import package, not a project
        entries = {f"{base}/{name}": local for name, local in entries.items()}
    elif os.path.isdir(os.path.join(path, "src")):
        root = "src"
    content = Content(tuple(sorted(entries.items())))
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", base)
    return {"kind": "package", "name": name, "root": root, "content": content.digest()}, content


def _require_directory(path: str) -> None:
    if not os.path.isdir(path):
        raise ValueError(f"sync_package({path!r}): the directory does not exist")


def _resolve(source: str, step: Copy) -> list[str]:
    if os.path.lexists(source):
        _target(source, step.context)
        return [source]
    found = sorted(glob.glob(source)) if step.expand else []
    if not found:
        raise ValueError(f"cannot copy {source}: it does not exist")
    return found


def _target(source: str, context: str | None) -> str:
    """The file or directory that ``source`` is or leads to: a link would dangle on the hosts. As in Docker, it must be
    inside the Dockerfile's directory ``context``."""
    target = os.path.realpath(source)
    if not os.path.exists(target):
        raise ValueError(f"cannot copy {source}: it is a link to {target}, which does not exist")
    if context is not None and os.path.commonpath((context, target)) != context:
        raise ValueError(f"cannot copy {source}: it leads to {target}, outside the Dockerfile's directory")
    return target


def _dockerignore(context: str | None) -> Patterns:
    lines: list[str] = []
    if context is not None and os.path.isfile(path := os.path.join(context, ".dockerignore")):
        with open(path, encoding="utf-8-sig") as file:
            lines = [_as_git_has_it(line.strip()) for line in file if line.strip() and not line.startswith("#")]
    return Patterns.of(map(os.fsencode, lines))


def _as_git_has_it(pattern: str) -> str:
    """Docker anchors patterns at the context, cleans them as paths, lets ``**`` match directories within a name, and
    ignores ``.``."""
    negated, pattern = ("!", pattern[1:].strip()) if pattern.startswith("!") else ("", pattern)
    cleaned = os.path.normpath(pattern.lstrip("/")) if pattern.strip("/") else ""
    return negated + "/" + re.sub(r"(^|/)\*\*(?=[^/*])", r"\1**/*", "" if cleaned == "." else cleaned)


def _tree(top: str, ignored: Patterns, context: str) -> dict[str, str]:
    """The local paths below ``top`` by their relative names. What is included again below an ignored directory comes
    with the directories above it."""
    entries: dict[str, str] = {}
    for directory, subdirectories, files in os.walk(top):
        for name in (*subdirectories, *files):
            path = os.path.join(directory, name)
            is_directory = name in subdirectories and not os.path.islink(path)
            if ignored.cover(os.fsencode(os.path.relpath(path, context)), directory=is_directory):
                continue
            above = os.path.relpath(directory, top)
            while above != "." and above not in entries:
                entries[above] = os.path.join(top, above)
                above = os.path.dirname(above) or "."
            entries[os.path.relpath(path, top)] = path
        if not ignored.include:
            subdirectories[:] = [
                name for name in subdirectories if os.path.relpath(os.path.join(directory, name), top) in entries
            ]
    return entries


def _kind(path: str) -> str:
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return _LINK
    if stat.S_ISDIR(mode):
        return _DIRECTORY
    if not stat.S_ISREG(mode):
        raise ValueError(f"cannot copy {path}: it is not a file, directory or symlink")
    return _EXECUTABLE if mode & stat.S_IXUSR else _FILE


def _file_digest(path: str) -> str:
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            total.update(data)
    return total.hexdigest()


def chunks(file: IO[bytes], size: int) -> Iterator[tuple[int, bytes]]:
    """The content of ``file``, from its start, as (offset, data)."""
    file.seek(0)
    offset = 0
    while data := file.read(size):
        yield offset, data
        offset += len(data)
