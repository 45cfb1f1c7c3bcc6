"""The actor that runs image steps on a host, one per host; it needs nothing but torchmonarch.

``<home>/image/steps.json`` records each completed step, under a lock that is held while a step runs: if two sessions
want the same step, one runs it and the other finds it completed. New processes use ``<home>/environment.json`` and
``<home>/packages`` (``apply_image`` in the engine).

::

    <home>/image/steps.json    for each completed step its digest, and the variables and directory after it
    <home>/image/lock          held while a step runs
    <home>/image/incoming/     content being received for copies
    <home>/synced/<name>/      local packages in development, one directory for each content
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshgate.images.expansion import expand  # sent along
from meshgate.serialization.sent_as_source import Actor, SentAsSource, endpoint
from meshgate_sync.store.place import default_home, disk_full  # sent along

TAIL_LINES = 20
_TAIL_BYTES = 65536

# Kills the process group $1 when its standard input is closed.
_GUARD = 'read _; kill -9 -"$1" 2>/dev/null'


class StepRunner(Actor, metaclass=SentAsSource):
    """The steps of one host. A step is a mapping with ``kind``, ``title``, ``digest`` and the fields of its kind."""

    def __init__(self, home: str | None = None) -> None:
        self.home = home or default_home()
        self.base = _environment_before()

    @endpoint
    def completed_steps(self, digests: Sequence[str]) -> tuple[str, int, str]:
        """This host's name, the number of leading steps that are completed, and why none can run, or ``""``. If all are
        completed, forgets later ones."""
        try:
            with self._locked():
                self._clear_incoming()
                states = self._states()
                completed = _common_prefix(states, digests)
                if completed == len(digests) < len(states):
                    self._save(states[:completed])
        except OSError as error:
            return _host_name(), 0, self._problem(error)
        return _host_name(), completed, ""

    @endpoint
    def receive_content(self, digest: str, offset: int, data: Any) -> str:
        """Receives a part of the content of the step ``digest``. Returns what is wrong, or ``""``."""
        try:
            with (
                _named(path := self._incoming(digest)),
                open(path, "r+b" if offset else "wb", buffering=0) as file,
            ):
                file.seek(offset)
                view = memoryview(data).cast("B")
                while view:
                    view = view[file.write(view) :]
        except OSError as error:
            return self._problem(error)
        return ""

    @endpoint
    def run_step(self, index: int, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Runs step ``index`` unless it is completed. ``code`` in the result is 0, an exit code, or None if the step
        could not run."""
        digests = [str(step["digest"]) for step in steps]
        try:
            with self._locked():
                states = self._states()
                completed = _common_prefix(states, digests)
                if completed == index:
                    self._save(states[:index])  # from here on, later steps count as not completed
                    print_line(f"step {index + 1}/{len(steps)}: {steps[index]['title']}")
                    after = self._run(steps[index], states[index - 1] if index else {})
                    self._save([*states[:index], {**after, "digest": digests[index]}])
        except StepFailed as failure:
            return {"code": failure.code, "output": failure.output}
        except OSError as error:
            return {"code": None, "output": self._problem(error)}
        except (ValueError, tarfile.TarError) as error:
            return {"code": None, "output": f"{type(error).__name__}: {error}"}
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self._incoming(digests[index]))
        if completed < index:
            return {"code": None, "output": "another session ran different steps on this host meanwhile; try again"}
        return {"code": 0, "output": ""}

    def _problem(self, error: OSError) -> str:
        if error.errno == errno.EROFS:
            return f"{error.filename} is read-only: in a pod, write to /tmp, the home directory or a volume"
        return disk_full(error, self.home, self.home) or f"{type(error).__name__}: {error}"

    # --- completed steps

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # Variables may be secret, so only the owner may access the directory and the files that contain them.
        os.makedirs(self.home, exist_ok=True)
        os.makedirs(os.path.join(self.home, "image"), mode=0o700, exist_ok=True)
        for part in ("image/incoming", "synced"):
            os.makedirs(os.path.join(self.home, part), exist_ok=True)
        handle = os.open(os.path.join(self.home, "image", "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print_line("waiting for another session that is running a step on this host")
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
        """Removes the content of sessions that ended before using it."""
        incoming = os.path.join(self.home, "image", "incoming")
        for name in os.listdir(incoming):
            if not os.path.isdir(f"/proc/{name.rpartition('.')[2]}") and os.path.isdir("/proc/self"):
                os.unlink(os.path.join(incoming, name))

    # --- kinds of steps

    def _run(self, step: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
        """Runs a step in the state ``before`` it; returns the state after it."""
        state: dict[str, Any] = {
            "variables": dict(before.get("variables", {})),
            "arguments": dict(before.get("arguments", {})),
            "directory": before.get("directory"),
        }
        match step["kind"]:
            case "env":
                state["variables"].update(self._expand(step["variables"], step["expand"], state))
            case "arg":
                state["arguments"].update(step["variables"])
            case "workdir":
                state["directory"] = self._directory(step["path"], state, expanding=True)
            case "run":
                shell = shutil.which("bash") or "/bin/sh"
                execute([shell, "-c", step["command"]], self._environment(state), self._directory("", state))
            case "pip":
                self._install(step["options"], step["packages"], state)
            case "copy":
                self._copy(step, state)
            case "package":
                self._sync_package(step)
            case kind:
                raise ValueError(f"unknown kind of step {kind!r}; the client may have another version")
        return state

    def _environment(self, state: Mapping[str, Any]) -> dict[str, str]:
        packages = os.path.join(self.home, "packages")
        environment = {**self.base, **state["arguments"], **state["variables"]}
        paths = (os.path.join(packages, "bin"), os.path.dirname(sys.executable), environment.get("PATH", os.defpath))
        environment["PATH"] = os.pathsep.join(paths)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (packages, environment.get("PYTHONPATH"))))
        return environment

    def _expand(self, variables: Mapping[str, str], expanding: bool, state: Mapping[str, Any]) -> dict[str, str]:
        if not expanding:
            return dict(variables)
        known = {**self.base, **state["arguments"], **state["variables"]}
        return {name: expand(value, known.get) for name, value in variables.items()}

    def _directory(self, path: str, state: dict[str, Any], expanding: bool = False) -> str:
        """``path`` relative to the working directory; created if missing."""
        start = state["directory"] or os.environ.get("MESHGATE_IMAGE_DIRECTORY") or os.getcwd()
        [path] = self._expand({"": path}, expanding, state).values()
        full = os.path.normpath(os.path.join(start, os.path.expanduser(path)))
        os.makedirs(full, exist_ok=True)
        return full

    def _copy(self, step: Mapping[str, Any], state: dict[str, Any]) -> None:
        [destination] = self._expand({"": step["destination"]}, step["expand"], state).values()
        start = self._directory("", state)
        target = os.path.join(start, os.path.expanduser(destination))
        name = step["file"]  # the name of the source if it is a single file
        if name is None or destination in ("", ".") or destination.endswith("/") or os.path.isdir(target):
            os.makedirs(target, exist_ok=True)
            _extract(self._incoming(step["digest"]), target)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with tempfile.TemporaryDirectory(dir=os.path.dirname(target)) as temporary:
                _extract(self._incoming(step["digest"]), temporary)
                os.replace(os.path.join(temporary, name), target)
        if os.environ.get("MESHGATE_IMAGE_DIRECTORY"):  # worker processes resolve relative names as the copy did
            state["directory"] = start

    def _sync_package(self, step: Mapping[str, Any]) -> None:
        """Copies a local package and makes it importable by a ``.pth`` file; keeps older copies that are in use.

        Processes lock the copies that they have loaded (``lock_packages``), and so does this process.
        """
        copies = os.path.join(self.home, "synced", step["name"])
        copy = os.path.join(copies, step["content"])
        if not os.path.isdir(copy):
            with tempfile.TemporaryDirectory(dir=os.path.join(self.home, "synced")) as temporary:
                tree = os.path.join(temporary, "tree")
                os.mkdir(tree)
                _extract(self._incoming(step["digest"]), tree)
                os.makedirs(copies, exist_ok=True)
                os.replace(tree, copy)
        packages = os.path.join(self.home, "packages")
        os.makedirs(packages, exist_ok=True)
        _write(os.path.join(packages, f"_meshgate_{step['name']}.pth"), os.path.join(copy, step["root"]) + "\n")
        for content in os.listdir(copies):
            if content != step["content"]:
                _remove_unused(os.path.join(copies, content))

    def _install(self, options: Sequence[str], packages: Sequence[str], state: dict[str, Any]) -> None:
        """Installs the packages that the interpreter lacks into ``<home>/packages``; does not change the interpreter.

        ``pip --target`` alone would install every dependency again and remove directories that namespace packages
        share. So a dry run finds the missing packages, and pip installs only those into a staging directory.
        """
        target = os.path.join(self.home, "packages")
        os.makedirs(target, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", *options]
        environment, directory = self._environment(state), self._directory("", state)
        with tempfile.TemporaryDirectory(dir=os.path.join(self.home, "image")) as temporary:
            report = os.path.join(temporary, "report.json")
            execute([*pip, "--quiet", "--dry-run", "--report", report, *packages], environment, directory)
            with open(report, encoding="utf-8") as file:
                missing = json.load(file)["install"]
            if not missing:
                print_line("all packages are already installed")
                return
            requirements = [_requirement(item) for item in missing]
            staged = os.path.join(temporary, "packages")
            execute([*pip, "--no-deps", "--upgrade", "--target", staged, *requirements], environment, directory)
            _uninstall(target, {_normalize(item["metadata"]["name"]) for item in missing})
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
    """The exact requirement for an item of pip's report."""
    name, version = item["metadata"]["name"], item["metadata"]["version"]
    if not item.get("is_direct"):
        return f"{name}=={version}"
    info = item["download_info"]
    if "vcs_info" in info:
        return f"{name} @ {info['vcs_info']['vcs']}+{info['url']}@{info['vcs_info']['commit_id']}"
    return f"{name} @ {info['url']}"


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _uninstall(directory: str, names: set[str]) -> None:
    for found in list(importlib.metadata.distributions(path=[directory])):
        if _normalize(found.metadata["Name"]) in names:
            for file in found.files or ():
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(directory, str(file)))


def _merge(source: str, target: str) -> None:
    for directory, _, files in os.walk(source):
        into = os.path.join(target, os.path.relpath(directory, source))
        os.makedirs(into, exist_ok=True)
        for name in files:
            os.replace(os.path.join(directory, name), os.path.join(into, name))


def _extract(archive: str, directory: str) -> None:
    with _named(directory), tarfile.open(archive) as tar:
        if hasattr(tarfile, "fully_trusted_filter"):  # it comes from the user's own laptop
            tar.extraction_filter = tarfile.fully_trusted_filter
        tar.extractall(directory)


def _common_prefix(states: Sequence[Mapping[str, Any]], digests: Sequence[str]) -> int:
    """The number of leading steps with the same digest."""
    count = 0
    for state, digest in zip(states, digests, strict=False):
        if state["digest"] != digest:
            break
        count += 1
    return count


def _environment_before() -> dict[str, str]:
    """This process's environment without the variables that earlier image steps have set."""
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
    """Writes atomically, for this user only."""
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with _named(path), open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Gives ``path`` to an OSError that has none, as those of writes."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


class StepFailed(Exception):
    """A command ended with exit code ``code``; ``output`` holds its last lines."""

    def __init__(self, code: int, output: str) -> None:
        super().__init__(code, output)
        self.code = code
        self.output = output


def execute(argv: Sequence[str], environment: Mapping[str, str], directory: str) -> None:
    """Runs a command in a new process group, which ends with the command and with this process.

    Prints its output as it comes. Raises StepFailed with the last lines.
    """
    process = subprocess.Popen(
        argv,
        env=dict(environment),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "guard", str(process.pid)], stdin=subprocess.PIPE, start_new_session=True
    )
    tail: deque[bytes] = deque()
    assert process.stdout is not None
    reader = threading.Thread(target=_forward_output, args=(process.stdout.fileno(), tail), daemon=True)
    reader.start()
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not reaped yet, so the group id is not reused
    finally:
        guard.kill()
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        guard.communicate()
    reader.join(5.0)  # a daemon that left the group may keep the pipe open
    if not reader.is_alive():
        process.stdout.close()
    if code:
        lines = b"".join(tail)[-_TAIL_BYTES:].decode(errors="replace").splitlines()
        raise StepFailed(code if code > 0 else 128 - code, "\n".join(lines[-TAIL_LINES:]))


def _forward_output(descriptor: int, tail: deque[bytes]) -> None:
    kept = 0
    while data := os.read(descriptor, 65536):
        _print(data)
        tail.append(data)
        kept += len(data)
        while kept - len(tail[0]) > _TAIL_BYTES:
            kept -= len(tail.popleft())


def print_line(text: str) -> None:
    _print(f"{text}\n".encode())


def _print(data: bytes) -> None:
    sys.stdout.flush()
    while data:
        data = data[os.write(1, data) :]
