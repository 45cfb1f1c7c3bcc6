"""One gateway as a process of this machine: started, found again, let go of, ended with everything it started.

It is a process of its own session, so a Ctrl-C in the driver's terminal does not reach it. Two things decide how
long it lives. A pipe whose other end the driver holds: the kernel closes it when the driver ends, however that
happens, and the gateway follows. And, once the driver has let go of it, the time it has been without a session.

The token goes through the environment, never through arguments, which every user of a machine can read.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshgate.errors import JobStartFailed
from meshgate.jobs.import_paths import driver_import_paths
from meshgate.jobs.processes import ProcessName, end_marked, process_name

__all__ = ["JOB_VARIABLE", "GatewayProcess", "GatewayRecord", "Launch", "end_gateway"]

JOB_VARIABLE = "MESHGATE_JOB"  # in the environment of every process of a job: its apply_id
START_TIMEOUT = 60.0
STOP_TIMEOUT = 10.0
HURRIED_TIMEOUT = 1.0
HEALTH_TIMEOUT = 2.0
LAST_OUTPUT = 4096
NOT_INHERITED = frozenset(  # they would make it the gateway of something else
    f"MESHGATE_{name}"
    for name in ("TOKEN_FILE", "HOST", "PORT", "MESH", "LOCAL_MESH", "LIFETIME_FD", "ANNOUNCE_FD", "KUBERNETES_JOB")
)
LET_GO = b"\n"  # on the lifetime pipe: end of file means nothing any more

_children: dict[int, subprocess.Popen[bytes]] = {}  # kept so that they are reaped
_lifetimes: set[int] = set()  # the driver's ends of the pipes


def _close_in_forked_child() -> None:
    # Otherwise a forked child would hold the pipe open when the driver is gone.
    for descriptor in _lifetimes:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _lifetimes.clear()


os.register_at_fork(after_in_child=_close_in_forked_child)


class GatewayRecord(BaseModel):
    """What it takes to find a running gateway again from another process of this machine."""

    model_config = ConfigDict(frozen=True)

    apply_id: str
    url: str
    socket: str | None = None  # a unix socket, which is quicker
    token: str = Field(repr=False)
    pid: int
    started: str


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a gateway. ``lease`` and ``idle_timeout`` are in seconds."""

    apply_id: str
    meshes: Mapping[str, int]
    environment: Mapping[str, str]
    log: Path
    lease: float
    idle_timeout: float

    def arguments(self, announce: int, lifetime: int) -> list[str]:
        meshes = [part for name, count in self.meshes.items() for part in ("--local-mesh", f"{name}={count}")]
        descriptors = ["--local-socket", "--announce-fd", str(announce), "--lifetime-fd", str(lifetime)]
        times = ["--lease", str(self.lease), "--idle-timeout", str(self.idle_timeout)]
        return [sys.executable, "-m", "meshgate_gateway", *meshes, *descriptors, *times]

    def process_environment(self, token: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        environment = {**inherited, **self.environment}
        paths = [*driver_import_paths(), *environment.get("PYTHONPATH", "").split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
        environment["MESHGATE_TOKEN"] = token
        environment[JOB_VARIABLE] = self.apply_id
        return environment


class GatewayProcess:
    """A gateway of this machine, started here or by another process."""

    def __init__(self, record: GatewayRecord, lifetime: int | None = None) -> None:
        self.record = record
        self._lifetime = lifetime
        self._process = ProcessName(record.pid, record.started)

    @classmethod
    def start(cls, launch: Launch) -> GatewayProcess:
        """Starts one and returns when it serves. Raises JobStartFailed, with nothing left running."""
        _require_gateway()
        token = secrets.token_urlsafe(32)
        announce, announce_there = os.pipe()
        lifetime_there, lifetime = os.pipe()
        _lifetimes.add(lifetime)
        try:
            with launch.log.open("ab") as log:
                child = subprocess.Popen(
                    launch.arguments(announce_there, lifetime_there),
                    env=launch.process_environment(token),
                    pass_fds=(announce_there, lifetime_there),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            _children[child.pid] = child
            name = process_name(child.pid)
            for descriptor in (announce_there, lifetime_there):
                os.close(descriptor)
            said = _read_line(announce, time.monotonic() + START_TIMEOUT)
            announced = _announced(said, launch, child)
            record = GatewayRecord(
                apply_id=launch.apply_id,
                url=announced.url,
                socket=announced.socket,
                token=token,
                pid=child.pid,
                started=name.started if name else "",
            )
            return cls(record, lifetime)
        except BaseException:
            _close_lifetime(lifetime)
            end_marked(JOB_VARIABLE, launch.apply_id)
            _reap()
            raise
        finally:
            os.close(announce)

    @property
    def alive(self) -> bool:
        """Whether the process that was started is still there. Asks the kernel, not the network."""
        return self._process.alive

    def healthy(self) -> bool:
        """Whether it lives and answers."""
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
        """From now on it does not end with this process, but when it has been idle for its idle timeout."""
        if self._lifetime is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._lifetime, LET_GO)
            _close_lifetime(self._lifetime)
            self._lifetime = None

    def stop(self, *, hurried: bool = False) -> None:
        """Ends it and every process it has started; they are gone on return. Harmless when it has ended. ``hurried``:
        it gets a second only to do so in good order."""
        end_gateway(self._process, self.record.apply_id, HURRIED_TIMEOUT if hurried else STOP_TIMEOUT)
        if self._lifetime is not None:
            _close_lifetime(self._lifetime)
            self._lifetime = None


def end_gateway(process: ProcessName, apply_id: str, timeout: float = STOP_TIMEOUT) -> None:
    """Asks the gateway to end in good order, then kills what is left of its job."""
    process.signal(signal.SIGTERM)
    process.wait_ended(timeout)
    end_marked(JOB_VARIABLE, apply_id)
    _reap()


def last_output(log: Path) -> str:
    """The last lines of a log, at most 4 KiB."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_OUTPUT))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def _require_gateway() -> None:
    missing = [name for name in ("monarch", "pydantic_settings", "structlog") if not importlib.util.find_spec(name)]
    if missing:
        raise JobStartFailed(
            f"a job on this machine runs the gateway and its workers here, and {', '.join(missing)} is not installed: "
            f"pip install 'meshgate[gateway,worker]'"
        )


def _read_line(descriptor: int, deadline: float) -> bytes:
    """What comes until a line end, the end of file, or the deadline (``time.monotonic``)."""
    said = b""
    while not said.endswith(b"\n") and (remaining := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select([descriptor], [], [], remaining)
        if not readable or not (more := os.read(descriptor, 4096)):
            break
        said += more
    return said


class _Announcement(BaseModel):
    url: str
    pid: int
    socket: str | None = None


def _announced(said: bytes, launch: Launch, child: subprocess.Popen[bytes]) -> _Announcement:
    """What the gateway announced. Raises JobStartFailed with the reason why it did not."""
    try:
        return _Announcement.model_validate_json(said)
    except ValidationError:
        if said:
            reason = f"it announced {said[:200]!r}, which is no address; are client and gateway of one version?"
        else:
            try:
                reason = f"it ended with code {child.wait(timeout=1)} before it served"
            except subprocess.TimeoutExpired:
                reason = f"it did not serve within {START_TIMEOUT:.0f} s"
        failure = f"the gateway (pid {child.pid}) did not start: {reason}"
        raise JobStartFailed(failure, last_output(launch.log)) from None


def _close_lifetime(descriptor: int) -> None:
    if descriptor in _lifetimes:
        _lifetimes.discard(descriptor)
        os.close(descriptor)


def _reap() -> None:
    for pid, child in list(_children.items()):
        if child.poll() is not None:
            del _children[pid]
