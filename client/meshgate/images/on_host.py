"""What runs image steps on a host: an actor, one to a host, that needs nothing but torchmonarch.

What has been done is written down in ``<home>/image/steps.json``, a state for each step, under a lock that is held
while a step runs: of two sessions that want the same step one runs it and the other finds it done. What new
processes take on (``apply_image`` in the engine) is ``<home>/environment.json`` and ``<home>/packages``.

::

    <home>/image/steps.json    the digest of each step done, and the variables and directory after it
    <home>/image/lock          held while a step runs
    <home>/image/incoming/     content of copies on its way
    <home>/synced/<name>/      local packages in development, a directory for each content
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import socket
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshgate.images.commands import StepFailed, execute, say  # sent along
from meshgate.images.words import expand  # sent along
from meshgate.sent_as_source import Actor, SentAsSource, endpoint
from meshgate_sync.place import default_home  # sent along

__all__ = ["StepRunner"]


class StepRunner(Actor, metaclass=SentAsSource):
    """The steps of one host. Each order is a mapping with ``kind``, ``title``, ``digest`` and what its kind needs."""

    def __init__(self, home: str | None = None) -> None:
        self.home = home or default_home()
        self.base = _environment_before()
        # What steps set may be secret: the directory is its owner's alone, and so are the files that tell of it.
        os.makedirs(self.home, exist_ok=True)
        os.makedirs(os.path.join(self.home, "image"), mode=0o700, exist_ok=True)
        for part in ("image/incoming", "synced"):
            os.makedirs(os.path.join(self.home, part), exist_ok=True)

    @endpoint
    def begin(self, digests: Sequence[str]) -> tuple[str, int]:
        """This host's name, and how many of the leading steps are done. Whatever follows those is forgotten."""
        with self._locked():
            self._clear_incoming()
            states = self._states()
            done = _common(states, digests)
            if done == len(digests) < len(states):
                self._save(states[:done])
        return _host_name(), done

    @endpoint
    def receive(self, digest: str, offset: int, data: Any) -> None:
        """Part of the content of the copy ``digest``."""
        with open(self._incoming(digest), "r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(data)

    @endpoint
    def run(self, index: int, orders: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Runs step ``index`` unless it is done. Says how it ended: ``code`` is 0, an exit code or None."""
        digests = [str(order["digest"]) for order in orders]
        try:
            with self._locked():
                states = self._states()
                done = _common(states, digests)
                if done == index:
                    self._save(states[:index])  # from here on, what follows is not done
                    say(f"step {index + 1}/{len(orders)}: {orders[index]['title']}")
                    after = self._do(orders[index], states[index - 1] if index else {})
                    self._save([*states[:index], {**after, "digest": digests[index]}])
        except StepFailed as failure:
            return {"code": failure.code, "output": failure.output}
        except (OSError, ValueError, tarfile.TarError) as error:
            return {"code": None, "output": f"{type(error).__name__}: {error}"}
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self._incoming(digests[index]))
        if done < index:
            return {"code": None, "output": "another session gave this host other steps meanwhile; try again"}
        return {"code": 0, "output": ""}

    # --- what has been done

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(os.path.join(self.home, "image", "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another session runs a step here; waiting for it")
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _states(self) -> list[dict[str, Any]]:
        try:
            with open(os.path.join(self.home, "image", "steps.json"), encoding="utf-8") as file:
                states: list[dict[str, Any]] = json.load(file)["steps"]
        except FileNotFoundError:
            return []
        return states

    def _save(self, states: Sequence[Mapping[str, Any]]) -> None:
        last = states[-1] if states else {}
        environment = {"variables": last.get("variables", {}), "directory": last.get("directory")}
        _write_json(os.path.join(self.home, "environment.json"), environment)
        _write_json(os.path.join(self.home, "image", "steps.json"), {"steps": states})

    def _incoming(self, digest: str) -> str:
        return os.path.join(self.home, "image", "incoming", f"{digest}.{os.getpid()}")

    def _clear_incoming(self) -> None:
        """Removes what sessions that ended in the middle have left."""
        incoming = os.path.join(self.home, "image", "incoming")
        for name in os.listdir(incoming):
            if not os.path.isdir(f"/proc/{name.rpartition('.')[2]}") and os.path.isdir("/proc/self"):
                os.unlink(os.path.join(incoming, name))

    # --- the steps

    def _do(self, order: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
        """Runs a step upon the state ``before`` it; returns the state after."""
        state: dict[str, Any] = {
            "variables": dict(before.get("variables", {})),
            "arguments": dict(before.get("arguments", {})),
            "directory": before.get("directory"),
        }
        match order["kind"]:
            case "env":
                state["variables"].update(self._expanded(order["variables"], order["expand"], state))
            case "arg":
                state["arguments"].update(order["variables"])
            case "workdir":
                state["directory"] = self._directory(order["path"], state, expanding=True)
            case "run":
                shell = shutil.which("bash") or "/bin/sh"
                execute([shell, "-c", order["command"]], self._environment(state), self._directory("", state))
            case "pip":
                self._install(order["options"], order["packages"], state)
            case "copy":
                self._copy(order, state)
            case "package":
                self._sync_package(order)
            case kind:
                raise ValueError(f"this host does not know steps of the kind {kind!r}")
        return state

    def _environment(self, state: Mapping[str, Any]) -> dict[str, str]:
        packages = os.path.join(self.home, "packages")
        environment = {**self.base, **state["arguments"], **state["variables"]}
        paths = (os.path.join(packages, "bin"), os.path.dirname(sys.executable), environment.get("PATH", os.defpath))
        environment["PATH"] = os.pathsep.join(paths)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (packages, environment.get("PYTHONPATH"))))
        return environment

    def _expanded(self, variables: Mapping[str, str], wanted: bool, state: Mapping[str, Any]) -> dict[str, str]:
        if not wanted:
            return dict(variables)
        known = {**self.base, **state["arguments"], **state["variables"]}
        return {name: expand(value, known.get) for name, value in variables.items()}

    def _directory(self, path: str, state: dict[str, Any], expanding: bool = False) -> str:
        """``path`` upon the working directory, made if need be."""
        start = state["directory"] or os.environ.get("MESHGATE_IMAGE_DIRECTORY") or os.getcwd()
        [path] = self._expanded({"": path}, expanding, state).values()
        full = os.path.normpath(os.path.join(start, os.path.expanduser(path)))
        os.makedirs(full, exist_ok=True)
        return full

    def _copy(self, order: Mapping[str, Any], state: dict[str, Any]) -> None:
        [destination] = self._expanded({"": order["destination"]}, order["expand"], state).values()
        start = self._directory("", state)
        target = os.path.join(start, os.path.expanduser(destination))
        name = order["file"]  # the name of the only source, when that is a file
        if name is None or destination in ("", ".") or destination.endswith("/") or os.path.isdir(target):
            os.makedirs(target, exist_ok=True)
            _extract(self._incoming(order["digest"]), target)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with tempfile.TemporaryDirectory(dir=os.path.dirname(target)) as aside:
                _extract(self._incoming(order["digest"]), aside)
                os.replace(os.path.join(aside, name), target)
        if os.environ.get("MESHGATE_IMAGE_DIRECTORY"):  # where relative names then mean what they meant to the copy
            state["directory"] = start

    def _sync_package(self, order: Mapping[str, Any]) -> None:
        """A copy of a local package, importable by a ``.pth``; copies that processes have loaded stay.

        Those hold a lock on them (``on_worker.hold_packages``), and so does this process on the one before.
        """
        place = os.path.join(self.home, "synced", order["name"], order["content"])
        if not os.path.isdir(place):
            with tempfile.TemporaryDirectory(dir=os.path.join(self.home, "synced")) as aside:
                whole = os.path.join(aside, "tree")
                os.mkdir(whole)
                _extract(self._incoming(order["digest"]), whole)
                os.makedirs(os.path.dirname(place), exist_ok=True)
                os.replace(whole, place)
        packages = os.path.join(self.home, "packages")
        os.makedirs(packages, exist_ok=True)
        _write(os.path.join(packages, f"_meshgate_{order['name']}.pth"), os.path.join(place, order["root"]) + "\n")

        for content in os.listdir(os.path.dirname(place)):
            if content != order["content"]:
                _remove_unused(os.path.join(os.path.dirname(place), content))

    def _install(self, options: Sequence[str], packages: Sequence[str], state: dict[str, Any]) -> None:
        """Installs into ``<home>/packages`` what the interpreter lacks, and leaves the interpreter as it is.

        ``pip --target`` alone would install every dependency once more, and removes the directories that namespace
        packages share: so pip is asked first what is missing, and installs that aside.
        """
        target = os.path.join(self.home, "packages")
        os.makedirs(target, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", *options]
        environment, directory = self._environment(state), self._directory("", state)
        with tempfile.TemporaryDirectory(dir=os.path.join(self.home, "image")) as aside:
            report = os.path.join(aside, "report.json")
            execute([*pip, "--quiet", "--dry-run", "--report", report, *packages], environment, directory)
            with open(report, encoding="utf-8") as file:
                missing = json.load(file)["install"]
            if not missing:
                say("everything is there already")
                return
            wanted = [_requirement(item) for item in missing]
            staged = os.path.join(aside, "packages")
            execute([*pip, "--no-deps", "--upgrade", "--target", staged, *wanted], environment, directory)
            _uninstall(target, {_normal(item["metadata"]["name"]) for item in missing})
            _merge(staged, target)


def _remove_unused(directory: str) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
    except BlockingIOError:
        return
    finally:
        os.close(handle)


def _requirement(item: Mapping[str, Any]) -> str:
    """What makes pip install just this, from an item of its report."""
    name, version = item["metadata"]["name"], item["metadata"]["version"]
    if not item.get("is_direct"):
        return f"{name}=={version}"
    info = item["download_info"]
    if "vcs_info" in info:
        return f"{name} @ {info['vcs_info']['vcs']}+{info['url']}@{info['vcs_info']['commit_id']}"
    return f"{name} @ {info['url']}"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _uninstall(place: str, names: set[str]) -> None:
    for found in list(importlib.metadata.distributions(path=[place])):
        if _normal(found.metadata["Name"]) in names:
            for file in found.files or ():
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(place, str(file)))


def _merge(source: str, target: str) -> None:
    for directory, _, files in os.walk(source):
        into = os.path.join(target, os.path.relpath(directory, source))
        os.makedirs(into, exist_ok=True)
        for name in files:
            os.replace(os.path.join(directory, name), os.path.join(into, name))


def _extract(archive: str, place: str) -> None:
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "fully_trusted_filter"):  # it came from the user's own laptop
            tar.extraction_filter = tarfile.fully_trusted_filter
        tar.extractall(place)


def _common(states: Sequence[Mapping[str, Any]], digests: Sequence[str]) -> int:
    """How many of the leading steps are the same."""
    count = 0
    for state, digest in zip(states, digests, strict=False):
        if state["digest"] != digest:
            break
        count += 1
    return count


def _environment_before() -> dict[str, str]:
    """This process's environment without what earlier steps of the image have set in it."""
    environment = dict(os.environ)
    replaced: dict[str, str | None] = json.loads(environment.pop("MESHGATE_IMAGE_REPLACED", "{}"))
    for name, value in replaced.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


def _host_name() -> str:
    return os.environ.get("MESHGATE_HOST_NAME") or socket.gethostname()


def _write_json(path: str, value: Any) -> None:
    _write(path, json.dumps(value))


def _write(path: str, text: str) -> None:
    """At once or not at all, and for this user alone."""
    handle, aside = tempfile.mkstemp(dir=os.path.dirname(path))
    with open(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(aside, path)
