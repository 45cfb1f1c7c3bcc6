"""The hosts of an SPMD job by the name of a torchx scheduler: which job starts them, and what of torchx it takes.

An ``AppDef`` has one role that runs a torchrun command on its replicas. It is read without importing torchx, which is
optional: only the job whose hosts torchx starts needs it. They are processes or containers of this machine, and the
job's gateway runs here.
"""

from __future__ import annotations

import copy
import importlib
import math
import os
import shutil
import socket
import sys
import tempfile
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshgate.code_sync.project import driver_import_paths
from meshgate.errors import JobStartFailed
from meshgate.jobs.kubernetes.compute import Compute
from meshgate.jobs.kubernetes.job import KubernetesJob
from meshgate.jobs.local_gateway import JOB_VARIABLE
from meshgate.jobs.process import LocalGatewayJob, LocalRequest, ProcessJob
from meshgate.jobs.signals import keep_handlers
from meshgate.jobs.slurm.job import SlurmJob
from meshgate.jobs.spmd.torchrun import FORMS, TorchrunCommand, is_command
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
MESH = "workers"
NO_MONARCH = "No module named 'monarch'"


class TorchXJob(LocalGatewayJob):
    """One host for each replica of an AppDef's role. It ends with this process, and no other process finds it."""

    def __init__(self, appdef: Any, scheduler: str, config: Mapping[str, Any]) -> None:
        require_torchx()
        meshes = {MESH: appdef.roles[0].num_replicas}
        super().__init__(LocalRequest.from_arguments("TorchXJob", meshes=meshes))
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
        self._image = appdef.roles[0].image
        self._handle: str | None = None
        app = copy.deepcopy(appdef)
        try:
            self._runner = self._quietly(require_torchx().get_runner)
            role = app.roles[0]
            {"local_cwd": self._on_this_machine, "local_docker": self._in_containers}[scheduler](role, mark)
            start = self._quietly(lambda: self._runner.dryrun(app, scheduler, cfg=dict(config)))
            # Known before anything is started, so that Ctrl-C in between leaves no replica.
            name = importlib.import_module("torchx.specs").make_app_handle
            self._handle = name(scheduler, self._runner.name(), start.request.app_id)
            self._quietly(lambda: self._runner.schedule(start))
        except JobStartFailed:
            self.end()
            raise
        except Exception as error:
            problem = f"torchx did not start {appdef.name!r} on {scheduler}: {error}"
            try:
                self.end()
            except Exception as again:  # noqa: BLE001 - whatever the scheduler raises; as without Docker
                problem += f". What it may have started on {scheduler} could not be ended: {again}"
            raise JobStartFailed(problem) from error
        except BaseException:
            self.end()
            raise

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
                logs = self._logs()
                lacks = NO_MONARCH in logs and self._scheduler == "local_docker"
                why = f": its image {self._image} lacks torchmonarch, which each container runs" if lacks else ""
                raise JobStartFailed(f"the app {self._handle} is {state}{why}", logs)
            if time.monotonic() > deadline:
                found = f"{len(addresses)} of {self._replicas} replicas run"
                raise JobStartFailed(f"the app {self._handle}: {found} after {START_TIMEOUT:.0f} s", self._logs())
            time.sleep(POLL)

    def running(self) -> bool:
        return self._handle is not None and self._state() == "RUNNING"

    def end(self) -> None:
        """Cancels the app. May be called again."""
        try:
            if self._handle is not None:
                handle, self._handle = self._handle, None
                self._quietly(lambda: self._runner.cancel(handle))
        finally:
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
        """Those of the replicas that run. A container may run before its host fails, which listens only in the end."""
        if self._scheduler == "local_cwd":
            paths = [f"{self._directory}/host_{replica}" for replica in range(self._replicas)]
            return [f"{self._identity}{n:012d}@ipc://{path}" for n, path in enumerate(paths) if os.path.exists(path)]
        app = str(self._handle).rpartition("/")[2]
        containers = _docker().containers.list(filters={"label": f"torchx.pytorch.org/app-id={app}"})
        containers.sort(key=lambda container: int(container.labels["torchx.pytorch.org/replica-id"]))
        networks = [container.attrs["NetworkSettings"]["Networks"]["torchx"] for container in containers]
        addresses = [network["IPAddress"] for network in networks]
        return [f"tcp://{address}:{PORT}" for address in addresses if address and _listens(address, PORT)]

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


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _docker() -> Any:
    return importlib.import_module("docker").from_env()


@dataclass(frozen=True, slots=True)
class AppRole:
    """What the job of an AppDef needs. ``wrapper`` is the entrypoint, if that is a program that runs its arguments.
    ``cpus``, ``gpus`` and ``memory_mb`` are those of each replica, or None."""

    name: str
    image: str
    command: tuple[str, ...]
    wrapper: tuple[str, ...]
    environment: Mapping[str, str]
    replicas: int
    cpus: float | None
    gpus: int | None
    memory_mb: int | None
    workspace: str | None


def read_appdef(appdef: Any) -> AppRole:
    """Raises TypeError if ``appdef`` is not an AppDef, and ValueError if it does not run torchrun in one role."""
    roles = getattr(appdef, "roles", None)
    if not isinstance(roles, list):
        raise TypeError(f"serve() takes a command as a list of strings, or a torchx AppDef, not {appdef!r}")
    if len(roles) != 1:
        raise ValueError(f"the AppDef {appdef.name!r} has {len(roles)} roles: SPMD jobs have one")
    [role] = roles
    entrypoint, arguments = str(role.entrypoint), tuple(map(str, role.args))
    command: tuple[str, ...]
    wrapper: tuple[str, ...]
    if is_command(entrypoint):
        command, wrapper = (entrypoint, *arguments), ()
    elif arguments and is_command(arguments[0]):
        command, wrapper = arguments, (entrypoint,)
    else:
        found = " ".join([entrypoint, *arguments[:2]])
        raise ValueError(
            f"role {role.name!r} runs {found!r}: expected {FORMS}, or an entrypoint that runs such a command"
        )
    if role.num_replicas < 1:
        raise ValueError(f"role {role.name!r} has num_replicas={role.num_replicas}: expected at least 1")
    return AppRole(
        name=role.name,
        image=role.image,
        command=command,
        wrapper=wrapper,
        environment=dict(role.env),
        replicas=role.num_replicas,
        cpus=_positive(role.resource.cpu),
        gpus=_positive(role.resource.gpu),
        memory_mb=_positive(role.resource.memMB),
        workspace=_workspace(role),
    )


def refuse_unmapped(appdef: Any, scheduler: str) -> None:
    """Raises ValueError if the role has a field that a meshgate job of ``scheduler`` does not take."""
    [role] = appdef.roles
    unmapped = {
        "min_replicas": role.min_replicas is not None,
        "max_retries": role.max_retries > 0,
        "port_map": bool(role.port_map),
        "mounts": bool(role.mounts),
        "resource.capabilities": bool(role.resource.capabilities),
        "resource.devices": bool(role.resource.devices),
    }
    for field, is_set in unmapped.items():
        if is_set:
            hint = "; use torchrun --max-restarts" if field == "max_retries" else ""
            raise ValueError(f"role {role.name!r}: {field} is not supported with the scheduler {scheduler}{hint}")


def _positive(value: Any) -> Any:
    return value if value is not None and value > 0 else None


def _workspace(role: Any) -> str | None:
    """The directory on this machine whose files the role runs, its first project, as Monarch takes it."""
    projects = getattr(role.workspace, "projects", None) if role.workspace is not None else None
    if not projects:
        return None
    directory = os.path.abspath(os.path.expanduser(str(next(iter(projects)))))
    if not os.path.isdir(directory):
        raise ValueError(f"role {role.name!r}: its workspace {directory} is not a directory on this machine")
    return directory


@dataclass(frozen=True, slots=True)
class _Asked:
    """The arguments of ``job_of``."""

    scheduler: str
    config: Mapping[str, Any]
    command: TorchrunCommand
    appdef: Any
    role: AppRole | None
    name: str | None

    @property
    def hosts(self) -> int:
        if self.role is not None:
            return self.role.replicas
        return self.command.nodes[1] if self.command.nodes is not None else 1

    def take(self, names: Mapping[str, str]) -> dict[str, Any]:
        """The values of ``config`` under our names. Raises ValueError for keys that are not in ``names``."""
        for key, value in self.config.items():
            if key not in names and value is not None:
                known = f"; supported: {', '.join(names)}" if names else ""
                raise ValueError(f"scheduler_cfg of {self.scheduler}: {key} is not supported{known}")
        return {names[key]: value for key, value in self.config.items() if key in names}


def job_of(
    scheduler: str,
    config: Mapping[str, Any],
    command: TorchrunCommand,
    appdef: Any,
    role: AppRole | None,
    name: str | None,
) -> JobTrait:
    """The job, not started, whose hosts run ``command``; ``appdef`` and ``role`` are None for a command alone.

    Raises ValueError for an unknown scheduler, with a list, and for what the scheduler's job does not take.
    """
    make = SCHEDULERS.get(scheduler)
    if make is None:
        known = ", ".join(sorted(SCHEDULERS))
        raise ValueError(f"unknown scheduler {scheduler!r}: the schedulers are {known}; or pass job=…")
    return make(_Asked(scheduler, config, command, appdef, role, name))


def _local_cwd(asked: _Asked) -> JobTrait:
    if asked.role is not None:
        return TorchXJob(asked.appdef, asked.scheduler, asked.config)
    asked.take({})
    nodes = asked.command.nodes
    if nodes is not None and nodes != (1, 1):
        raise ValueError(
            f"the scheduler local_cwd has one host, and --nnodes is {nodes[0]}:{nodes[1]}. For several "
            "hosts on this machine, pass job=ProcessJob({'workers': 2})"
        )
    return ProcessJob({MESH: 1})


def _local_docker(asked: _Asked) -> JobTrait:
    if asked.role is None:
        raise ValueError("the scheduler local_docker needs an AppDef, whose role names the image")
    return TorchXJob(asked.appdef, asked.scheduler, asked.config)


def _kubernetes(asked: _Asked) -> JobTrait:
    role = asked.role
    names = {
        "namespace": "namespace",
        "service_account": "service_account_name",
        "priority_class": "priority_class_name",
        "queue": "queue_name",
    }
    options = asked.take(names)
    if role is not None:
        refuse_unmapped(asked.appdef, asked.scheduler)
        options.update(image=role.image or None, env_vars=dict(role.environment) or None)
        options.update(cpus=role.cpus, gpus=role.gpus, memory=f"{role.memory_mb}Mi" if role.memory_mb else None)
    given = {key: value for key, value in options.items() if value is not None}
    return KubernetesJob(name=asked.name, compute=Compute(replicas=asked.hosts, **given))


def _slurm(asked: _Asked) -> JobTrait:
    role = asked.role
    names = {
        "account": "account",
        "partition": "partition",
        "time": "time_limit",
        "qos": "qos",
        "comment": "--comment",
        "constraint": "--constraint",
        "mail-user": "--mail-user",
        "mail-type": "--mail-type",
        "login": "login",
        "python_exe": "python_exe",
        "log_dir": "log_dir",
        "job_name": "job_name",
    }
    taken = asked.take(names)
    options = {key: value for key, value in taken.items() if value is not None}
    if asked.name is not None:
        options.setdefault("job_name", asked.name)
    flags = [key for key in options if key.startswith("--")]
    options["slurm_args"] = [f"{key}={options.pop(key)}" for key in flags]
    if role is not None:
        refuse_unmapped(asked.appdef, asked.scheduler)
        if role.image:
            raise ValueError(
                f"role {role.name!r}: image={role.image!r} is not supported with the scheduler {asked.scheduler}"
            )
        # As torchx: a replica with resources of its own shares its node.
        options["exclusive"] = role.cpus is None and role.gpus is None and role.memory_mb is None
        options["cpus_per_task"] = None if role.cpus is None else math.ceil(role.cpus)
        options["mem"] = None if role.memory_mb is None else f"{role.memory_mb}M"
        options.update(gpus_per_node=role.gpus, env=dict(role.environment) or None)
    return SlurmJob({MESH: asked.hosts}, **options)


SCHEDULERS: Mapping[str, Callable[[_Asked], JobTrait]] = {
    "k8s": _kubernetes,
    "kubernetes": _kubernetes,
    "local_cwd": _local_cwd,
    "local_docker": _local_docker,
    "slurm": _slurm,
}
