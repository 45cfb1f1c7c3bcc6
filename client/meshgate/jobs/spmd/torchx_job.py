"""A job whose hosts torchx starts on this machine, as processes or containers, and whose gateway runs here.

torchx is optional, and only this module imports it.
"""

from __future__ import annotations

import copy
import importlib
import os
import shutil
import sys
import tempfile
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from meshgate.code_sync.project import driver_import_paths
from meshgate.errors import JobStartFailed
from meshgate.jobs.local_gateway import JOB_VARIABLE
from meshgate.jobs.process import LocalGatewayJob, LocalRequest
from meshgate.jobs.signals import keep_handlers
from meshgate.jobs.spmd.torchrun import is_command
from meshgate.jobs.trait import JobTrait

START_TIMEOUT = 300.0  # seconds; a replica starts in a few, and its image may have to be pulled
POLL = 0.2
LOG_LINES = 20
STARTING = ("UNSUBMITTED", "SUBMITTED", "PENDING", "RUNNING")
PORT = 26600
# The host of a container serves the container's own address, by which this machine reaches it.
CONTAINER_HOST = (
    "import socket; from monarch.actor import run_worker_loop_forever; "
    "run_worker_loop_forever(address='tcp://%s:{port}' % socket.gethostbyname(socket.gethostname()), "
    "ca='trust_all_connections')"
)
# Adds to the command of a host its identity, and a pipe that this process holds open: the host ends at its end, however
# this process ends. The arguments are the pipe, the start of a UUID, the number of the replica, and the command.
START_HOST = (
    'pipe=$$1; identity=$$2$$(printf %012d "$$3"); shift 3; '
    'exec "$$@" --identity "$$identity" --lifetime-fd 3 3<"$$pipe"'
)


class TorchXJob(LocalGatewayJob):
    """One host for each replica of an AppDef's role. It ends with this process, and no other process finds it."""

    def __init__(self, appdef: Any, scheduler: str, config: Mapping[str, Any]) -> None:
        require_torchx()
        super().__init__(LocalRequest(meshes={"workers": appdef.roles[0].num_replicas}))
        self._appdef, self._scheduler, self._config = appdef, scheduler, dict(config)
        self._app: TorchXApp | None = None

    def can_run(self, spec: JobTrait) -> bool:
        """Always False: a TorchXJob is never reused."""
        return False

    @property
    def shares_files(self) -> bool:
        """Whether the hosts see this machine's files."""
        return self._scheduler == "local_cwd"

    def _start_hosts(self, apply_id: str) -> tuple[Mapping[str, Sequence[str]], Mapping[str, str]]:
        self._app = TorchXApp(self._appdef, self._scheduler, self._config, {JOB_VARIABLE: apply_id})
        try:
            addresses = self._app.wait_addresses()
            host = self._app.engine_host()
        except BaseException:
            self._app.end()
            self._app = None
            raise
        return {"workers": addresses}, {"MESHGATE_ENGINE_HOST": host} if host is not None else {}

    def _is_running(self) -> bool:
        return super()._is_running() and self._app is not None and self._app.running()

    def _kill(self) -> None:
        try:
            super()._kill()
        finally:
            if self._app is not None:
                self._app.end()
                self._app = None

    @property
    def _ends_with_driver(self) -> bool:
        return True

    def _outlive_driver(self) -> None:
        """Does nothing: the replicas end with this process."""


# torchx starts the replicas of a role; each runs a Monarch host in place of the role's command. The apps of
# ``local_cwd`` live in the torchx runner of this process, so no other process can find them.


def require_torchx() -> Any:
    """The module ``torchx.runner``. Raises JobStartFailed if torchx is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("torchx.runner")
    except ImportError as error:
        raise JobStartFailed(f"torchx is not installed ({error}): pip install torchx-nightly") from None


class TorchXApp:
    """The replicas of ``appdef``'s role on the torchx scheduler ``scheduler``: ``local_cwd`` or ``local_docker``."""

    def __init__(self, appdef: Any, scheduler: str, config: Mapping[str, Any], mark: Mapping[str, str]) -> None:
        """``mark``: variables by which the job's processes are found. Submits the app; raises JobStartFailed."""
        self._directory = tempfile.mkdtemp(prefix="meshgate_torchx_")
        self._identity = str(uuid.uuid4())[:-12]
        self._lifetime: int | None = None
        self._scheduler = scheduler
        self._role, self._replicas = appdef.roles[0].name, appdef.roles[0].num_replicas
        self._handle: str | None = None
        app = copy.deepcopy(appdef)
        try:
            self._runner = self._quietly(require_torchx().get_runner)
            role = app.roles[0]
            {"local_cwd": self._on_this_machine, "local_docker": self._in_containers}[scheduler](role, mark)
            self._handle = self._quietly(lambda: self._runner.run(app, scheduler, cfg=dict(config)))
        except JobStartFailed:
            self.end()
            raise
        except Exception as error:
            self.end()
            raise JobStartFailed(f"torchx did not start {appdef.name!r} on {scheduler}: {error}") from error

    @property
    def handle(self) -> str | None:
        """torchx's name of the app."""
        return self._handle

    def wait_addresses(self) -> list[str]:
        """The Monarch addresses of the replicas, in order, once all of them run. Raises JobStartFailed."""
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            addresses = self._addresses()
            if len(addresses) == self._replicas:
                return addresses
            if (state := self._state()) not in STARTING:
                raise JobStartFailed(f"the app {self._handle} is {state}", self._logs())
            if time.monotonic() > deadline:
                found = f"{len(addresses)} of {self._replicas} replicas run"
                raise JobStartFailed(f"the app {self._handle}: {found} after {START_TIMEOUT:.0f} s", self._logs())
            time.sleep(POLL)

    def running(self) -> bool:
        return self._handle is not None and self._state() == "RUNNING"

    def end(self) -> None:
        """Cancels the app. May be called again."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._quietly(lambda: self._runner.cancel(handle))
        if self._lifetime is not None:
            os.close(self._lifetime)
            self._lifetime = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def engine_host(self) -> str | None:
        """The address of this machine at which the replicas reach the engine; None: a unix socket."""
        if self._scheduler == "local_cwd":
            return None
        network = _docker().networks.get("torchx")
        return str(network.attrs["IPAM"]["Config"][0]["Gateway"])

    def _on_this_machine(self, role: Any, mark: Mapping[str, str]) -> None:
        pipe = os.path.join(self._directory, "lifetime")
        os.mkfifo(pipe, 0o600)
        self._lifetime = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
        address = f"ipc://{self._directory}/host_${{replica_id}}"
        host = [sys.executable, "-m", "meshgate_worker", "--address", address, "--name", "workers-${replica_id}"]
        _replace_command(role, ["/bin/sh", "-c", START_HOST, "sh", pipe, self._identity, "${replica_id}", *host])
        paths = [*driver_import_paths(), *role.env.get("PYTHONPATH", "").split(os.pathsep)]
        role.env.update(
            mark,
            PYTHONPATH=os.pathsep.join(filter(None, paths)),
            MESHGATE_HOME=f"{self._directory}/homes/${{replica_id}}",
            MESHGATE_HOST_NAME="workers-${replica_id}",
        )

    def _in_containers(self, role: Any, mark: Mapping[str, str]) -> None:
        _replace_command(role, ["python", "-c", CONTAINER_HOST.format(port=PORT)])
        role.env.update(MESHGATE_HOST_NAME="workers-${replica_id}", MESHGATE_HOME="/tmp/meshgate")

    def _state(self) -> str:
        status = self._quietly(lambda: self._runner.status(self._handle))
        return str(status.state.name) if status is not None else "unknown to torchx"

    def _addresses(self) -> list[str]:
        """Those of the replicas that run."""
        if self._scheduler == "local_cwd":
            paths = [f"{self._directory}/host_{replica}" for replica in range(self._replicas)]
            return [f"{self._identity}{n:012d}@ipc://{path}" for n, path in enumerate(paths) if os.path.exists(path)]
        app = str(self._handle).rpartition("/")[2]
        containers = _docker().containers.list(filters={"label": f"torchx.pytorch.org/app-id={app}"})
        containers.sort(key=lambda container: int(container.labels["torchx.pytorch.org/replica-id"]))
        networks = [container.attrs["NetworkSettings"]["Networks"]["torchx"] for container in containers]
        return [f"tcp://{network['IPAddress']}:{PORT}" for network in networks if network["IPAddress"]]

    def _logs(self) -> str:
        """The last lines of the replicas."""
        text: list[str] = []
        for replica in range(self._replicas):
            lines = self._quietly(partial(self._runner.log_lines, self._handle, self._role, replica))
            text += [f"replica {replica}: {line.rstrip()}\n" for line in deque(lines, LOG_LINES)]
        return "".join(text)

    @staticmethod
    def _quietly(call: Callable[[], Any]) -> Any:
        """torchx warns of its own deprecations, which a caller cannot avoid, and replaces the handler of Ctrl-C by one
        that does not raise KeyboardInterrupt."""
        with warnings.catch_warnings(), keep_handlers():
            warnings.simplefilter("ignore")
            return call()


def _replace_command(role: Any, host: list[str]) -> None:
    """Makes a replica run ``host``, by the role's entrypoint if that is a program that runs its arguments."""
    if is_command(role.entrypoint):
        role.entrypoint, role.args = host[0], host[1:]
    else:
        role.args = host


def _docker() -> Any:
    return importlib.import_module("docker").from_env()
