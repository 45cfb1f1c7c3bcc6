"""A gateway process on this machine: started, found again, detached, and stopped with everything it started.

It runs in its own session, so a Ctrl-C in the driver's terminal does not reach it. Two things limit its lifetime: a
pipe that the driver holds open, which the kernel closes however the driver ends; and, once the driver has detached it,
the time without a session.

The token is passed in the environment, never in arguments, which every user of the machine can read.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import logging
import os
import pwd
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from meshgate.caller import warn_caller
from meshgate.code_sync.project import driver_import_paths
from meshgate.errors import JobStartFailed
from meshgate.jobs.registry import refuse_foreign
from meshgate.jobs.saved import read_record
from meshgate_processes.identity import ProcessIdentity, identify_process
from meshgate_processes.marks import end_processes

JOB_VARIABLE = "MESHGATE_JOB"  # in the environment of every process of a job: its apply_id
START_TIMEOUT = 60.0
EXIT_TIMEOUT = 10.0  # for a process that has closed its pipes
STOP_TIMEOUT = 10.0
SHORT_STOP_TIMEOUT = 1.0
HEALTH_TIMEOUT = 2.0
LOG_TAIL_BYTES = 4096
NOT_INHERITED = frozenset(  # settings of the gateway whose worker may be running this driver
    f"MESHGATE_{name}"
    for name in ("TOKEN_FILE", "HOST", "PORT", "MESH", "LOCAL_MESH", "LIFETIME_FD", "ANNOUNCE_FD", "KUBERNETES_JOB")
) | frozenset(  # a job that a submitted program starts is not the one that it runs in
    f"MESHGATE_RUN{name}" for name in ("", "_JOB", "_URL", "_TOKEN", "_SOCKET", "_PROJECT")
)
DETACH = b"\n"  # sent through the lifetime pipe: the gateway then ignores the end of file

_children: dict[int, subprocess.Popen[bytes]] = {}  # kept to be reaped
_lifetimes: set[int] = set()  # the driver's ends of the lifetime pipes
PREFIX = "meshgate-job-"
MAX_PARENT = 40  # characters; the path of a unix socket has at most 107 (103 on macOS)
MIN_AGE = 60.0  # seconds; a younger directory may not be locked yet
log = logging.getLogger("meshgate.jobs")

FIRST_USER = 1000  # user IDs below are the system's own
NOBODY = 65534
_warned: set[str] = set()


def _close_in_forked_child() -> None:
    # a forked child would keep the pipe open after the driver has ended
    for descriptor in _lifetimes:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _lifetimes.clear()


os.register_at_fork(after_in_child=_close_in_forked_child)


@dataclass(frozen=True, kw_only=True)
class GatewayRecord:
    """What another process of this machine needs to find a running gateway."""

    apply_id: str
    url: str
    socket: str | None = None  # the path of a unix socket, which is faster than the URL
    token: str = field(repr=False)
    pid: int
    started: str
    directory: str | None = None  # of the job's temporary files


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How to start a gateway. ``lease`` and ``idle_timeout`` are in seconds. ``addresses`` are those of the hosts of
    meshes that exist already; the gateway starts the hosts of the others."""

    apply_id: str
    meshes: Mapping[str, int]
    environment: Mapping[str, str]
    log: Path
    lease: float
    idle_timeout: float
    addresses: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def arguments(self, announce: int, lifetime: int, directory: str) -> list[str]:
        meshes: list[str] = []
        for name, count in self.meshes.items():
            addresses = self.addresses.get(name)
            meshes += ["--mesh", f"{name}={','.join(addresses)}"] if addresses else ["--local-mesh", f"{name}={count}"]
        descriptors = ["--local-socket", "--announce-fd", str(announce), "--lifetime-fd", str(lifetime)]
        times = ["--lease", str(self.lease), "--idle-timeout", str(self.idle_timeout)]
        removed = ["--remove-at-end", directory]
        return [sys.executable, "-m", "meshgate_gateway", *meshes, *descriptors, *times, *removed]

    def process_environment(self, token: str, directory: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        environment = {**inherited, **self.environment}
        paths = [*driver_import_paths(), *environment.get("PYTHONPATH", "").split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
        environment["MESHGATE_TOKEN"] = token
        environment[JOB_VARIABLE] = self.apply_id
        environment["TMPDIR"] = directory
        return environment


class LocalGateway:
    """A gateway process on this machine, started by this process or another.

    Raises JobError if it was started on another machine or in another container.
    """

    def __init__(self, record: GatewayRecord, lifetime: int | None = None) -> None:
        self.record = record
        self._lifetime = lifetime
        self._process = ProcessIdentity(record.pid, record.started)
        refuse_foreign(self._process, record.apply_id)

    @classmethod
    def start(cls, options: LaunchOptions) -> LocalGateway:
        """Starts a gateway and returns once it is serving. Raises JobStartFailed and leaves no process behind."""
        require_gateway_packages()
        warn_of_other_users()
        token = secrets.token_urlsafe(32)
        temporary = options.environment.get("TMPDIR")
        prune_job_directories(temporary)
        directory, lock = create_job_directory(temporary)
        announce, gateway_announce = os.pipe()
        gateway_lifetime, lifetime = os.pipe()
        _lifetimes.add(lifetime)
        try:
            with options.log.open("ab") as log:
                child = subprocess.Popen(
                    options.arguments(gateway_announce, gateway_lifetime, directory),
                    env=options.process_environment(token, directory),
                    pass_fds=(gateway_announce, gateway_lifetime, lock),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            _children[child.pid] = child
            process = identify_process(child.pid)
            for descriptor in (gateway_announce, gateway_lifetime, lock):
                os.close(descriptor)
            import meshgate.proxies.client  # noqa: F401, PLC0415 - the session's modules, while the gateway starts

            deadline = time.monotonic() + START_TIMEOUT
            line = _read_line(announce, deadline)
            announcement = _parse_announcement(line, options, child, late=time.monotonic() >= deadline)
            record = GatewayRecord(
                apply_id=options.apply_id,
                url=announcement.url,
                socket=announcement.socket,
                token=token,
                pid=child.pid,
                started=process.started if process else "",
                directory=directory,
            )
            return cls(record, lifetime)
        except BaseException:
            _close_lifetime(lifetime)
            end_processes(f"{JOB_VARIABLE}={options.apply_id}")
            remove_job_directory(directory)
            _reap()
            raise
        finally:
            os.close(announce)

    @property
    def alive(self) -> bool:
        """Whether the process is running. Does not use the network."""
        return self._process.alive

    def healthy(self) -> bool:
        """Whether the process is running and answers requests."""
        import http.client  # noqa: PLC0415 - 25 ms of a program's start that pass while the gateway starts

        address = urlsplit(self.record.url)
        if not self.alive:
            return False
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=HEALTH_TIMEOUT)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def outlive_driver(self) -> None:
        """From now on the gateway ends after its idle timeout instead of with this process."""
        if self._lifetime is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._lifetime, DETACH)
            _close_lifetime(self._lifetime)
            self._lifetime = None

    def stop(self, *, timeout: float = STOP_TIMEOUT) -> None:
        """Ends the gateway and every process it started, by force after ``timeout`` seconds; may be called again."""
        stop_gateway(self._process, self.record.apply_id, self.record.directory, timeout)
        if self._lifetime is not None:
            _close_lifetime(self._lifetime)
            self._lifetime = None


def stop_gateway(process: ProcessIdentity, apply_id: str, directory: str | None, timeout: float = STOP_TIMEOUT) -> None:
    """Asks the gateway to shut down, then kills the remaining processes of its job and removes its directory."""
    process.signal(signal.SIGTERM)
    process.wait_ended(timeout)
    end_processes(f"{JOB_VARIABLE}={apply_id}")
    if directory is not None:
        remove_job_directory(directory)
    _reap()


def log_tail(log: Path) -> str:
    """The end of a log, at most 4 KiB."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def require_gateway_packages() -> None:
    """Raises JobStartFailed if this Python lacks what a gateway and its workers need."""
    missing = [name for name in ("monarch", "pydantic_settings") if not importlib.util.find_spec(name)]
    if missing:
        are = f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} not installed"
        raise JobStartFailed(
            f"cannot start a gateway and workers on this machine: {are}. Run pip install 'meshgate[gateway,worker]'"
        )


def _read_line(descriptor: int, deadline: float) -> bytes:
    """Reads until a newline, the end of file, or the deadline (``time.monotonic``)."""
    line = b""
    while not line.endswith(b"\n") and (remaining := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select([descriptor], [], [], remaining)
        if not readable or not (data := os.read(descriptor, 4096)):
            break
        line += data
    return line


@dataclass(frozen=True)
class _Announcement:
    url: str
    pid: int
    socket: str | None = None


def _parse_announcement(
    line: bytes, options: LaunchOptions, child: subprocess.Popen[bytes], *, late: bool
) -> _Announcement:
    """The gateway's announcement. Raises JobStartFailed with the reason if ``line`` is not one.

    ``late``: it had no more time. Else it has closed its pipe.
    """
    try:
        return read_record(_Announcement, line)
    except ValueError:
        if line:
            reason = f"invalid announcement {line[:200]!r}; client and gateway may have different versions"
        else:
            try:
                reason = f"it exited with code {child.wait(0 if late else EXIT_TIMEOUT)}"
            except subprocess.TimeoutExpired:
                reason = f"it was not ready within {START_TIMEOUT:.0f} s"
        message = f"the gateway (pid {child.pid}) did not start: {reason}"
        raise JobStartFailed(message, log_tail(options.log)) from None


def _close_lifetime(descriptor: int) -> None:
    if descriptor in _lifetimes:
        _lifetimes.discard(descriptor)
        os.close(descriptor)


def _reap() -> None:
    for pid, child in list(_children.items()):
        if child.poll() is not None:
            del _children[pid]


# The gateway's supervisor removes it after every other process of the job has ended. The gateway holds a lock on it,
# which the kernel releases however the gateway ends, so what killed gateways have left is recognized and removed
# later.


def create_job_directory(parent: str | None) -> tuple[str, int]:
    """A new directory in ``parent`` (default: the usual place of temporary files), and a descriptor that locks it."""
    path = tempfile.mkdtemp(prefix=PREFIX, dir=_parent(parent))  # mode 0700
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        remove_job_directory(path)
        raise
    with contextlib.suppress(OSError):  # a file system without locks: the directory is then not pruned
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return path, lock


def remove_job_directory(path: str) -> None:
    """Does nothing if the directory does not exist. Warns if it cannot be removed."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        warn_caller(f"cannot remove the temporary files of a job in {path}: {error}")


def prune_job_directories(parent: str | None) -> None:
    """Removes the directories of jobs whose gateways have ended without doing so.

    The next job removes what remains, such as files that the last processes of a killed gateway still write.
    """
    for path in Path(_parent(parent)).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it too, or it belongs to another user
            status = path.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_ctime > MIN_AGE and _unlocked(path):
                shutil.rmtree(path)


def _unlocked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _parent(parent: str | None) -> str:
    found = parent or tempfile.gettempdir()
    return found if len(found) <= MAX_PARENT or not os.access("/tmp", os.W_OK) else "/tmp"


# Monarch opens abstract unix sockets in hosts and engines, in addition to the one in the job's private directory, and
# no setting of it changes that. They have no permissions, so each user who shares the network namespace can connect.


def warn_of_other_users() -> None:
    """Logs a warning if other users have processes here: once for the same users."""
    new = [user for user in other_users() if user not in _warned]
    if new:
        _warned.update(new)
        log.warning(
            "other users of this machine (%s) can run code as you while a local job runs, through sockets of Monarch "
            "that have no permissions. Use a container or a machine of your own: see docs/security.md",
            ", ".join(new),
        )


def other_users() -> list[str]:
    """The names of other people's accounts that have processes in this network namespace, as far as can be seen."""
    try:
        entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    except OSError:  # not Linux, which alone has abstract sockets
        return []
    namespace = _namespace(Path("/proc/self"))
    users = set()
    for entry in entries:
        try:
            user = entry.stat().st_uid
            if user >= FIRST_USER and user not in (NOBODY, os.getuid()) and _namespace(entry) in (namespace, None):
                users.add(user)
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return sorted(map(_name, users))


def _namespace(process: Path) -> str | None:
    """The network namespace of a process; None if this user may not see it.

    Raises FileNotFoundError or ProcessLookupError if it has ended, even if its parent has not waited for it yet.
    """
    try:
        return os.readlink(process / "ns" / "net")
    except PermissionError:
        return None


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:  # such as in a container
        return f"user {user}"
