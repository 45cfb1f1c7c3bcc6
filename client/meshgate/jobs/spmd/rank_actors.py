"""The actors that run a script on each rank; they need nothing but torchmonarch.

Each process of the mesh has one ``RankRunner`` and one ``RankStopper``. The runner starts the script in a process of
its own and waits for it; the stopper ends it meanwhile. The runner of a rank that fails asks all stoppers to end the
other ranks, so this takes no round trip to the laptop.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.machinery
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from meshgate.proxies.torch_variables import HeldPort, hold_master_port, host_name, rank_variables  # sent along
from meshgate.ranks.processes import STACKS_MARK, find_marks, start_guard, write_startup  # sent along
from meshgate.serialization.sent_as_source import Actor, SentAsSource, endpoint
from meshgate_sync.store.place import default_home  # sent along

RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
COUNT_DEVICES = """
import os, sys
kind = sys.argv[1]
if kind != "cpu":
    import torch
if kind == "auto":
    kind = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
if kind == "cpu":
    print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
else:
    print(getattr(torch, {"gpu": "cuda"}.get(kind, kind)).device_count())
"""
TAIL_BYTES = 16384
DRAIN_TIMEOUT = 5.0  # seconds for a process that left the group and still holds the pipe


class Output:
    """Reads one stream of the process to its end, and copies it to ``descriptor`` (-1: not shown) and to ``file``.

    ``tail`` gets whole lines, so that those of the other stream, which another thread reads, do not mix with them.
    ``unfinished`` is what follows the last one. Each state of a progress bar, which ends with a carriage return, is a
    line.
    """

    def __init__(self, descriptor: int, file: str | None, tail: bytearray, lock: threading.Lock) -> None:
        self._descriptor, self._tail, self._lock = descriptor, tail, lock
        self.unfinished = bytearray()
        self._file = open(file, "wb", buffering=0) if file is not None else None  # noqa: SIM115 - until _copy ends
        self.read_end, self.write_end = os.pipe()
        self._thread = threading.Thread(target=self._copy, name="meshgate-rank-output", daemon=True)

    def start(self) -> None:
        os.close(self.write_end)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(DRAIN_TIMEOUT)

    def _copy(self) -> None:
        while data := os.read(self.read_end, 65536):
            self._write(data)
            with self._lock:
                self.unfinished += data
                end = max(self.unfinished.rfind(b"\n"), self.unfinished.rfind(b"\r")) + 1
                self._tail += self.unfinished[:end]
                del self.unfinished[: max(end, len(self.unfinished) - TAIL_BYTES)], self._tail[:-TAIL_BYTES]
            with contextlib.suppress(OSError):  # the session has ended, which ends this process too
                while data and self._descriptor >= 0:
                    data = data[os.write(self._descriptor, data) :]
        os.close(self.read_end)
        if self._file is not None:
            self._file.close()

    def _write(self, data: bytes) -> None:
        """Into the file. The script goes on without it if it cannot be written, as on a full disk."""
        if (file := self._file) is None:
            return
        try:
            while data:
                data = data[file.write(data) :]
        except OSError as error:
            self._file = None
            sys.stderr.write(f"meshgate: cannot write {file.name}: {error.strerror}; it ends here\n")
            sys.stderr.flush()
            with contextlib.suppress(OSError):
                file.close()


class RankProcess:
    """A script in a process group of its own, which ends with the script and with this process.

    ``files`` are paths for (stdout, stderr), or None; ``shown`` says whether each is also printed here. Raises OSError
    if the script cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        files: Sequence[str | None],
        shown: Sequence[bool],
    ) -> None:
        self._tail, self._tail_lock = bytearray(), threading.Lock()
        self._ended, self._ending = threading.Event(), threading.Lock()
        self._outputs: list[Output] = []
        try:
            for descriptor, file, show in zip((1, 2), files, shown, strict=True):
                self._outputs.append(Output(descriptor if show else -1, file, self._tail, self._tail_lock))
            self._process = subprocess.Popen(
                list(command),
                env=dict(environment),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=self._outputs[0].write_end,
                stderr=self._outputs[1].write_end,
                start_new_session=True,
            )
            self._guard = self._start_guard()
        finally:
            for output in self._outputs:
                output.start()  # without a process they end at once

    def _start_guard(self) -> subprocess.Popen[bytes]:
        try:
            return start_guard(self._process.pid)
        except OSError:
            self._kill_group(signal.SIGKILL)
            self._process.wait()
            raise

    def wait(self) -> int:
        """The exit code; negative for a signal. Ends what the script has started and left behind."""
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # not reaped yet: its group id is not reused
        with self._ending:
            self._ended.set()
            self._guard.kill()
            self._kill_group(signal.SIGKILL)
            code = self._process.wait()
        self._guard.communicate()
        for output in self._outputs:
            output.join()
        return code

    def stop(self, timeout: float) -> None:
        """Sends SIGTERM, and SIGKILL after ``timeout`` seconds. Returns when the script has ended."""
        with self._ending:
            if self._ended.is_set():
                return
            os.kill(self._process.pid, signal.SIGTERM)  # send_signal() reaps a script that has ended, before wait()
        if self._ended.wait(timeout):
            return
        with self._ending:
            if not self._ended.is_set():
                self._kill_group(signal.SIGKILL)
        self._ended.wait()

    def tail(self) -> str:
        with self._tail_lock:
            tail = b"".join([self._tail, *(output.unfinished for output in self._outputs)])
        return tail[-TAIL_BYTES:].decode(errors="replace")

    def _kill_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class _Current:
    """The script of this process, for both actors."""

    lock = threading.Lock()
    process: RankProcess | None = None
    stopped = False


class RankRunner(Actor, metaclass=SentAsSource):
    """Runs the script of this process's rank. A plan and a program are mappings, which ``run.py`` makes."""

    rank: int  # worker processes add it to every actor

    def __init__(self) -> None:
        self.held: HeldPort | None = None

    @endpoint
    def count_devices(self, kind: str) -> tuple[str, int, str]:
        """This host's name, the number of its devices of a kind, and why they cannot be counted, or ""."""
        command = [_python(), "-c", COUNT_DEVICES, kind]
        ran = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
        if ran.returncode != 0:
            return host_name(), 0, ran.stderr.strip().rpartition("\n")[2] or f"exit code {ran.returncode}"
        return host_name(), int(ran.stdout), ""

    @endpoint
    def check(self, program: Mapping[str, Any]) -> str:
        """Why the program cannot be started here, or ""."""
        directory = _directory(program)
        if not os.path.isdir(directory):
            return f"the directory {directory} does not exist on {host_name()}"
        if program["wrapper"] and not _is_executable(program["wrapper"][0], directory):
            return f"the entrypoint {program['wrapper'][0]} is not an executable program on {host_name()}"
        if program["kind"] == "module":
            return _missing_module(str(program["name"]), directory)
        path = _path(program)
        if program["kind"] == "executable":
            return "" if _is_executable(path, directory) else f"{path} is not an executable program on {host_name()}"
        return "" if os.path.isfile(os.path.join(directory, path)) else f"{path} does not exist on {host_name()}"

    @endpoint
    def hold_port(self, address: str | None, port: int, hosts: int) -> tuple[str, int, str]:
        """The address and port for rank 0, and why they cannot be used, or "". The port is held until the run ends."""
        self.held, answer = hold_master_port(address, port, hosts)
        return answer

    @endpoint
    def run(self, plan: Mapping[str, Any], stoppers: Any) -> dict[str, Any]:
        """Runs the script; returns when it and what it has started have ended. ``stoppers`` are those of all ranks.

        ``code`` in the result is the exit code (negative for a signal; None if the script was not started), ``stopped``
        whether another rank or the laptop ended the script, ``error`` what it wrote to ``$TORCHELASTIC_ERROR_FILE``, or
        why it could not be started.
        """
        rank, local_rank = self.rank, self.rank % plan["local_world"]
        environment = _environment()
        named = {name: plan[name] for name in ("run_id", "role", "restart", "max_restarts", "virtual_local_rank")}
        variables = rank_variables(rank, plan["world"], plan["local_world"], plan["master"], environment, **named)
        logs, error_file, problem = None, "", ""
        with contextlib.ExitStack() as stack:
            try:
                temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="meshgate-rank-"))
                logs = _log_directory(plan, rank, local_rank)
                error_file = os.path.join(logs or temporary, "error.json")
                _show_stacks(environment, temporary)
                environment |= {**variables, "TORCHELASTIC_ERROR_FILE": error_file}
                with _Current.lock:
                    if not _Current.stopped:
                        _Current.process = _start(plan, local_rank, logs, environment)
            except OSError as error:  # a failure of this rank, as if the script had exited
                problem = _why_not_started(plan["program"], error)
            process = _Current.process
            code = process.wait() if process is not None else None
            stopped = _Current.stopped  # read once: the broadcast below reaches this process, too
            if code != 0 and not stopped:
                stoppers.end.broadcast(plan["shutdown_timeout"])
            return {
                "rank": rank,
                "host": host_name(),
                "code": code,
                "stopped": stopped,
                "tail": process.tail() if process is not None and code != 0 else "",
                "error": problem or _read_error(error_file),
                "logs": logs or "",
            }


class RankStopper(Actor, metaclass=SentAsSource):
    @endpoint
    def end(self, timeout: float) -> None:
        """Ends the script of this process, with SIGTERM and after ``timeout`` seconds with SIGKILL."""
        with _Current.lock:
            _Current.stopped = True
        if _Current.process is not None:
            _Current.process.stop(timeout)


def _start(plan: Mapping[str, Any], local_rank: int, logs: str | None, environment: Mapping[str, str]) -> RankProcess:
    redirects, tee = (_streams_of(plan[name], local_rank) for name in ("redirects", "tee"))
    files = [
        os.path.join(str(logs), f"{name}.log") if (redirects | tee) & bit else None
        for name, bit in (("stdout", 1), ("stderr", 2))
    ]
    shown_ranks = plan["shown_local_ranks"]
    is_shown = shown_ranks is None or local_rank in shown_ranks
    shown = [is_shown and (not redirects & bit or bool(tee & bit)) for bit in (1, 2)]
    program = plan["program"]
    return RankProcess(_command(program, local_rank), environment, _directory(program), files, shown)


def _why_not_started(program: Mapping[str, Any], error: OSError) -> str:
    path, reason = _path(program), error.strerror or str(error)
    place = "" if error.filename in (None, path) else f"{error.filename}: "
    remedy = "; begin it with a line such as #!/bin/sh" if error.errno == errno.ENOEXEC else ""
    return f"{path}: {place}{reason}{remedy}"


def _show_stacks(environment: dict[str, str], directory: str) -> None:
    """Makes the script's interpreter answer ``meshgate stacks``, as this rank of this process's mesh."""
    for descriptor, about in find_marks(os.getpid(), STACKS_MARK):
        os.close(descriptor)
        write_startup(directory, {name: about[name] for name in ("session", "mesh", "rank", "host")})
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [directory, environment.get("PYTHONPATH")]))


def _streams_of(streams: Any, local_rank: int) -> int:
    return int(streams.get(local_rank, 0) if isinstance(streams, dict) else streams)


def _command(program: Mapping[str, Any], local_rank: int) -> list[str]:
    return [*program["wrapper"], *_own_command(program, local_rank)]


def _own_command(program: Mapping[str, Any], local_rank: int) -> list[str]:
    arguments = [argument.replace("${local_rank}", str(local_rank)) for argument in program["arguments"]]
    match program["kind"]:
        case "module":
            return [_python(), "-u", "-m", program["name"], *arguments]
        case "executable":
            return [_path(program), *arguments]
        case "run_path":
            return [_python(), "-u", "-c", RUN_PATH, _path(program), *arguments]
    return [_python(), "-u", _path(program), *arguments]


def _python() -> str:
    return os.environ.get("PYTHON_EXEC", sys.executable)


def _environment() -> dict[str, str]:
    """This process's environment, without what Monarch sets for its own processes, and with the synced code first."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HYPERACTOR_")}
    version = _version()
    if version is not None:
        synced = [path for path in sys.path if _is_within(path, version)]
        environment["PYTHONPATH"] = os.pathsep.join([*synced, *filter(None, [environment.get("PYTHONPATH")])])
    return environment


def _version() -> str | None:
    """The directory of the synced version that this process runs from."""
    snapshots = os.path.join(default_home(), "snapshots")
    for path in sys.path:
        if _is_within(path, snapshots) and path != snapshots:
            return os.path.join(snapshots, os.path.relpath(path, snapshots).split(os.sep)[0])
    return None


def _is_within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory + os.sep)


def _directory(program: Mapping[str, Any]) -> str:
    """Where the script runs: in the synced version, the laptop's working directory."""
    version = _version()
    return os.getcwd() if version is None else os.path.join(version, program["directory"])


def _path(program: Mapping[str, Any]) -> str:
    version = _version()
    if version is None or program["synced"] is None:
        return str(program["name"])
    return os.path.join(version, program["synced"])


def _is_executable(program: str, directory: str) -> bool:
    place = os.path.join(directory, program) if "/" in program else program
    return shutil.which(place, path=_environment().get("PATH")) is not None


def _missing_module(name: str, directory: str) -> str:
    top = name.partition(".")[0]
    places = [directory, *_environment().get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    found = importlib.machinery.PathFinder.find_spec(top, [place for place in places if place])
    if found is not None or top in sys.builtin_module_names:
        return ""
    return f"there is no module {top!r} on {host_name()}. Python looked in:\n  " + "\n  ".join(dict.fromkeys(places))


def _log_directory(plan: Mapping[str, Any], rank: int, local_rank: int) -> str | None:
    """The directory for this rank's files, created if the command asks for files; below the one that it names."""
    if plan["log_directory"] is None and not plan["redirects"] and not plan["tee"]:
        return None
    base = plan["log_directory"] or os.path.join(tempfile.gettempdir(), "torchelastic")
    host = rank // plan["local_world"]
    run = f"{plan['run_id']}_{plan['token']}" + (f"_{host}" if plan["world"] > plan["local_world"] else "")
    path = os.path.join(_directory(plan["program"]), base, run, f"attempt_{plan['restart']}", str(local_rank))
    os.makedirs(path, exist_ok=True)
    return path


def _read_error(path: str) -> str:
    """The message that torch's ``@record`` has written, or ""."""
    try:
        with open(path, encoding="utf-8") as file:
            message = json.load(file)["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return str(message["message"] if isinstance(message, dict) else message)
