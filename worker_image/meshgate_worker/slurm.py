"""``python -m meshgate_worker.slurm``: the worker on one node of a Slurm job.

It connects to the job's gateway before it serves, so the gateway learns its address at once, without a file, and its
end by the end of the connection. The connection also ends this worker, and with it the job, when the gateway is gone.

Slurm sends SIGTERM when it ends a job, and, if a job has a grace time before its preemption, also at the beginning of
that. Only the gateway can find out which of them it is, so it decides whether the worker continues.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Any

from meshgate_worker.host import HostOptions, log, serve

CONNECT_TIMEOUT = 60.0
ATTEMPT_TIMEOUT = 10.0
LONGEST_DELAY = 2.0
REPLY_TIMEOUT = 30.0
GRACE = 2.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What the batch script and Slurm say, in the environment. ``port`` 0: any free one."""

    gateways: tuple[str, ...]
    secret: str
    port: int
    rank: int
    node: str

    @classmethod
    def take(cls) -> Settings:
        """Removes the secret from the environment, which user code can read. Raises KeyError outside a job."""
        return cls(
            gateways=tuple(os.environ["MESHGATE_SLURM_GATEWAY"].split(",")),
            secret=os.environ.pop("MESHGATE_SLURM_SECRET"),
            port=int(os.environ.get("MESHGATE_SLURM_PORT", "0")),
            rank=int(os.environ["SLURM_PROCID"]),
            node=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        )


def connect(gateways: tuple[str, ...], timeout: float = CONNECT_TIMEOUT) -> socket.socket:
    """A connection to the first gateway that answers. Raises OSError after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    delay = 0.1
    while True:
        failures = []
        for gateway in gateways:
            host, _, port = gateway.rpartition(":")
            try:
                connection = socket.create_connection((host.strip("[]"), int(port)), timeout=ATTEMPT_TIMEOUT)
            except OSError as error:
                failures.append(f"{gateway}: {error}")
            else:
                _keep_alive(connection)
                return connection
        if time.monotonic() + delay > deadline:
            raise OSError(
                f"cannot reach the gateway within {timeout:g} s ({'; '.join(failures)}); is there a firewall between "
                "this node and the gateway's machine?"
            )
        time.sleep(delay)
        delay = min(2 * delay, LONGEST_DELAY)


def _keep_alive(connection: socket.socket) -> None:
    """A peer that lost its power is noticed within two minutes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def free_port(address: str) -> int:
    """A port of ``address`` that nothing uses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


class Registration:
    """Registers the host once it is ready, and ends it (by closing ``lifetime``) when the gateway is gone."""

    def __init__(self, connection: socket.socket, facts: dict[str, Any], ready: int, lifetime: int) -> None:
        self._connection, self._facts, self._ready, self._lifetime = connection, facts, ready, lifetime
        self._accepted = self._signalled = False
        threading.Thread(target=self._run, name="meshgate-slurm", daemon=True).start()

    def report_sigterm(self) -> bool:
        """Tells the gateway of SIGTERM, which ends the connection unless Slurm gives the job a grace time. Returns
        False if it cannot be reached."""
        if not self._accepted:
            return False
        if not self._signalled:  # Slurm repeats it
            log("SIGTERM: continues until the gateway ends this worker")  # before the gateway reads the log
        self._signalled = True
        try:
            self._connection.sendall(b'{"signal": "SIGTERM"}\n')
        except OSError as error:
            log(f"cannot tell the gateway of SIGTERM: {error}")
            return False
        return True

    def _run(self) -> None:
        try:
            with os.fdopen(self._ready) as ready:
                if not ready.readline():  # the host could not start, and says why
                    return
            self._register()
        except (OSError, ValueError) as error:
            log(f"ending: the gateway did not accept this worker: {error}")
        else:
            log(f"ending: {'SIGTERM' if self._signalled else 'the connection to the gateway is closed'}")
        finally:
            os.close(self._lifetime)

    def _register(self) -> None:
        self._connection.settimeout(REPLY_TIMEOUT)
        with self._connection.makefile("rwb") as stream:
            stream.write(json.dumps(self._facts).encode() + b"\n")
            stream.flush()
            reply = json.loads(stream.readline(4096) or b"{}")
            if "error" in reply or not reply:
                raise ValueError(reply.get("error", "it closed the connection"))
            self._connection.settimeout(None)
            self._accepted = True
            log(f"{self._facts['node']}: connected to the gateway")
            while stream.readline(4096):
                pass


def main() -> None:
    try:
        settings = Settings.take()
    except (KeyError, ValueError) as error:
        raise SystemExit(f"meshgate_worker.slurm runs in jobs that meshgate submits: {error} is missing") from None
    try:
        connection = connect(settings.gateways)
    except OSError as error:
        raise SystemExit(f"meshgate_worker {settings.node}: {error}") from None
    home = tempfile.mkdtemp(prefix="meshgate-", dir=os.environ.get("TMPDIR") or tempfile.gettempdir())
    code = 1
    try:
        code = _serve(settings, connection, home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # Monarch's threads do not survive an orderly interpreter shutdown


def _serve(settings: Settings, connection: socket.socket, home: str) -> int:
    host = connection.getsockname()[0]
    port = settings.port or free_port(host)
    address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    identity = str(uuid.uuid4())
    _use_directory(home)
    os.environ["MESHGATE_HOST_NAME"] = settings.node
    facts = {"secret": settings.secret, "rank": settings.rank, "node": settings.node, "address": address, **_versions()}
    ready, ready_there = os.pipe()
    lifetime_there, lifetime = os.pipe()
    registration = Registration(connection, {**facts, "identity": identity}, ready, lifetime)
    return serve(
        HostOptions(
            address=address,
            name=settings.node,
            identity=identity,
            cookie=uuid.uuid4().hex,
            lifetime_fd=lifetime_there,
            ready_fd=ready_there,
            grace=GRACE,
            on_sigterm=registration.report_sigterm,
        )
    )


def _use_directory(home: str) -> None:
    """Everything that this host's processes leave in files is removed with ``home``. Monarch's, also of processes that
    are killed, and those of the programs are in ``TMPDIR``."""
    temporary = os.path.join(home, "tmp")
    os.mkdir(temporary)
    os.environ.update(MESHGATE_HOME=home, MESHGATE_IMAGE_DIRECTORY=os.path.join(home, "files"), TMPDIR=temporary)
    tempfile.tempdir = None  # found again, in the new TMPDIR


def _versions() -> dict[str, str]:
    """The versions that must fit the gateway's. A Monarch built from source has none."""
    try:
        monarch = importlib.metadata.version("torchmonarch")
    except importlib.metadata.PackageNotFoundError:
        monarch = ""
    return {"python": platform.python_version(), "monarch": monarch}


if __name__ == "__main__":
    main()
