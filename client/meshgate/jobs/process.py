"""ProcessJob and LocalJob: a gateway and worker hosts that are processes of this machine.

Protocol, gateway, engine and sync are the same as in a cluster; only the scheduler is missing. ``LocalGatewayJob`` is
the common base of ``ProcessJob`` and ``LocalJob``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from typing_extensions import Self

from meshgate.errors import JobError, JobNotRunning, JobUnsupported
from meshgate.jobs import registry
from meshgate.jobs.joined import JoinedJob, join
from meshgate.jobs.local_gateway import (
    SHORT_STOP_TIMEOUT,
    STOP_TIMEOUT,
    GatewayRecord,
    LaunchOptions,
    LocalGateway,
    require_gateway_packages,
)
from meshgate.jobs.saved import DEFAULT_JOB_PATH, read_record
from meshgate.jobs.sessions import check_detached
from meshgate.jobs.state import JobState
from meshgate.jobs.trait import JobTrait
from meshgate.suggestions import counts_as_meshes, explains_arguments

if TYPE_CHECKING:
    from meshgate.images.image import Image
    from meshgate.session.dialing import UrlDialer

LOG_DIRECTORY = ".monarch/logs"
MAX_HOSTS = 1024  # of a mesh
_MESH_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")
_VARIABLE = re.compile(r"[^\0=]+")


@dataclass(frozen=True, kw_only=True)
class LocalRequest:
    """The arguments of a job on this machine. Times are in seconds."""

    meshes: dict[str, int]
    env: dict[str, str]
    lease: float
    idle_timeout: float

    @classmethod
    def from_arguments(
        cls, job: str, meshes: Any, env: Any = None, lease: Any = None, idle_timeout: Any = None
    ) -> LocalRequest:
        """From a program or a file: those that are None have their default. Raises ValueError that names the invalid
        argument."""
        env, lease = {} if env is None else env, 3600.0 if lease is None else lease
        idle_timeout = 600.0 if idle_timeout is None else idle_timeout
        if not isinstance(meshes, Mapping) or not meshes:
            raise _invalid(job, "meshes", meshes, "the number of hosts of each mesh, such as {'workers': 2}")
        for name, count in meshes.items():
            if not isinstance(name, str) or not _MESH_NAME.fullmatch(name):
                wanted = "a name that begins with a letter or '_'; letters, digits, '_' and '-' follow"
                raise _invalid(job, f"meshes[{name!r}]", name, wanted)
            if not _is_number(count) or not 1 <= count <= MAX_HOSTS or count != int(count):
                raise _invalid(job, f"meshes[{name!r}]", count, f"a whole number of hosts, from 1 to {MAX_HOSTS}")
        if not isinstance(env, Mapping):
            raise _invalid(job, "env", env, "the variables of the workers, such as {'DEBUG': '1'}")
        for name, value in env.items():
            if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
                raise _invalid(job, f"env[{name!r}]", name, "the name of a variable, without '=' and null bytes")
            if not isinstance(value, str) or "\0" in value:
                raise _invalid(job, f"env[{name!r}]", value, "a string without null bytes")
        if not _is_number(lease) or lease <= 0:
            raise _invalid(job, "lease", lease, "a number of seconds above 0")
        if not _is_number(idle_timeout) or idle_timeout < 0:
            raise _invalid(job, "idle_timeout", idle_timeout, "a number of seconds, or 0 for never")
        counts = {name: int(count) for name, count in meshes.items()}
        return cls(meshes=counts, env=dict(env), lease=float(lease), idle_timeout=float(idle_timeout))


def _invalid(job: str, where: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{job}: {where}={value!r}: expected {expected}")


def _is_number(value: Any) -> bool:
    """Whether it is a real number, of numpy as well, and neither nan nor too large for a float."""
    return issubclass(type(value), Real) and abs(value) <= sys.float_info.max


class LocalGatewayJob(JobTrait):
    """A job with its own gateway process on this machine."""

    _unfinished_end = "What is left of it ends with the program"  # when the gateway finds that the program is gone

    def __init__(self, request: LocalRequest, image: Image | None = None) -> None:
        super().__init__()
        self._request = request
        if image is not None:
            from meshgate.images.image import Image  # noqa: PLC0415 - few local jobs have one

            if not isinstance(image, Image):
                raise TypeError(f"{type(self).__name__}: image={image!r}: expected an Image(…), whose steps run here")
            self._images = dict.fromkeys(request.meshes, image)
        self._gateway: LocalGateway | None = None

    def __repr__(self) -> str:
        url = f", {self._gateway.record.url}" if self._gateway else ""
        return f"{type(self).__name__}({self._request.meshes}{url})"

    @property
    def gateway_url(self) -> str | None:
        """The URL of the job's gateway; None while the job is not running."""
        running = self._running
        gateway = running._gateway if isinstance(running, LocalGatewayJob) else None
        return gateway.record.url if gateway else None

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise JobError(f"{type(self).__name__} cannot run batch-mode scripts: run {client_script} yourself")
        apply_id = str(self._apply_id)
        require_gateway_packages()  # before any host is started
        try:
            addresses, variables = self._start_hosts(apply_id)
            options = LaunchOptions(
                apply_id=apply_id,
                meshes=self._request.meshes,
                environment={**self._request.env, **variables},
                log=registry.log_file(apply_id),
                lease=self._request.lease,
                idle_timeout=0 if self._ends_with_driver else self._request.idle_timeout,
                addresses=addresses,
            )
            self._gateway = LocalGateway.start(options)
            self._register(self._gateway.record)
        except BaseException:
            registry.unregister(apply_id)
            self._kill()  # also the hosts that exist already
            raise

    def _register(self, record: GatewayRecord) -> None:
        registry.prune()
        registry.register(
            registry.LocalEntry(
                apply_id=record.apply_id,
                kind=type(self).__name__,
                meshes=self._request.meshes,
                url=record.url,
                pid=record.pid,
                started=record.started,
                directory=os.fsencode(os.getcwd()).decode(errors="replace"),
                created=time.time(),
                token=record.token,
                socket=record.socket,
                temporary=record.directory,
            )
        )

    def _start_hosts(self, apply_id: str) -> tuple[Mapping[str, Sequence[str]], Mapping[str, str]]:
        """The addresses of hosts that the gateway does not start itself, and variables that it needs to reach them."""
        return {}, {}

    def _state(self) -> JobState:
        gateway = self._gateway
        if gateway is None or not gateway.alive:
            raise JobNotRunning(f"the gateway of {self!r} has ended; call apply() to start it again")
        return self._attach_meshes(self._request.meshes)

    def _dialer(self) -> UrlDialer:
        from meshgate.session.dialing import UrlDialer  # noqa: PLC0415 - imported once the job runs, not with its type

        gateway = self._gateway
        if gateway is None:
            raise JobNotRunning(f"{self!r} is not running")
        record = gateway.record
        return UrlDialer(record.url, record.token, alive=lambda: gateway.alive, unix_socket=record.socket)

    def _find_joined(self) -> JobTrait | None:
        return join(self, None, "", self._request.meshes)

    def _push_code(self, running: JobTrait) -> None:
        """Hosts import from where the gateway was started; those of a submitted program need its version."""
        if isinstance(running, JoinedJob):
            from meshgate.code_sync.session_sync import push_automatically  # noqa: PLC0415 - only such programs sync

            assert running._client is not None
            push_automatically(running._client, None, watch=False)

    def _mesh_names(self) -> Collection[str]:
        return self._request.meshes

    def _mesh_sizes(self) -> Mapping[str, int]:
        return self._request.meshes

    @property
    def _ends_with_driver(self) -> bool:
        """Whether the job always ends with this process, so that it needs no idle timeout."""
        return self._scoped

    def _kill(self) -> None:
        timeout = STOP_TIMEOUT
        if self._client is not None:
            self._client.close()
            if not self._client.closed_cleanly:  # the gateway cannot end the session in order either
                timeout = SHORT_STOP_TIMEOUT
            self._client = None
        if self._gateway is not None:
            self._gateway.stop(timeout=timeout)
            registry.unregister(self._gateway.record.apply_id)
            self._gateway = None

    def _is_running(self) -> bool:
        return self._gateway is not None and self._gateway.alive

    def _outlive_driver(self) -> None:
        if self._gateway is not None:
            self._gateway.outlive_driver()

    def _spec(self) -> dict[str, Any]:
        return asdict(self._request)

    def _allocation(self) -> dict[str, Any] | None:
        if self._gateway is None:
            raise JobNotRunning(f"{self!r} is not running")
        return asdict(self._gateway.record)


class ProcessJob(LocalGatewayJob):
    """A job whose hosts are processes of this machine: ``ProcessJob({"trainers": 2, "dataloaders": 1})``.

    ``meshes`` maps names to numbers of hosts; ``env`` is added to the environment of the workers. In a ``with`` block,
    or with ``state(cached_path=None)``, everything ends with this process, even if it is killed. A saved job
    (``state()`` saves it in ``.monarch/job_state.pkl``) outlives this process so that others can find it, and ends
    ``idle_timeout`` seconds (600) after its last session; 0 means never. ``lease`` is how long, in seconds (3600), a
    session waits for a driver that has disconnected. The steps of ``image`` run on every host in ``state()``; its base
    image is ignored. With ``detached``, which may be a name for the session, a session keeps running for its lease when
    its driver leaves, also at the end of a ``with`` block, and ``attach`` takes it over.
    """

    @explains_arguments(counts_as_meshes)
    def __init__(
        self,
        meshes: Mapping[str, int],
        env: Mapping[str, str] | None = None,
        *,
        lease: float | None = None,
        idle_timeout: float | None = None,
        image: Image | None = None,
        detached: bool | str = False,
    ) -> None:
        request = LocalRequest.from_arguments(
            "ProcessJob", meshes=meshes, env=env, lease=lease, idle_timeout=idle_timeout
        )
        super().__init__(request, image)
        self._detached = check_detached(detached)

    def can_run(self, spec: JobTrait) -> bool:
        """Whether ``spec`` is a ProcessJob with the same arguments and the gateway answers."""
        gateway = self._gateway
        return isinstance(spec, ProcessJob) and spec._request == self._request and bool(gateway and gateway.healthy())

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self:
        job = cls(**asdict(LocalRequest.from_arguments(cls.__name__, **spec)))
        if allocation is not None:
            job._gateway = LocalGateway(read_record(GatewayRecord, allocation))
        return job


class LocalJob(LocalGatewayJob):
    """One host for each name in ``hosts``; a mapping, in ``hosts`` or ``meshes``, gives the number of hosts.

    The job ends with this process, and no other process finds it.
    """

    def __init__(
        self,
        hosts: Sequence[str] | Mapping[str, int] = ("hosts",),
        *,
        meshes: Mapping[str, int] | None = None,
        image: Image | None = None,
    ) -> None:
        if isinstance(hosts, str):
            raise TypeError(f"LocalJob: hosts must be a sequence of names, not {hosts!r}: write LocalJob([{hosts!r}])")
        names = meshes if meshes is not None else hosts
        if not isinstance(names, Iterable):
            raise TypeError(f"LocalJob: {names!r}: expected the names of hosts, or numbers of hosts by name")
        counts = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, 1)
        super().__init__(LocalRequest.from_arguments("LocalJob", meshes=counts), image)
        self._script: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The script that ``apply(client_script=...)`` started."""
        if self._script is None:
            raise ValueError("no local batch job")
        return self._script

    def state(self, cached_path: str | None = DEFAULT_JOB_PATH, *, wait: bool | float = False) -> JobState:
        """The host meshes; applies the job if necessary. Ignores ``cached_path``."""
        return super().state(None, wait=wait)

    def can_run(self, spec: JobTrait) -> bool:
        """Always False: a LocalJob is never reused."""
        return False

    def _create(self, client_script: str | None) -> None:
        if client_script is None:
            super()._create(None)
        else:
            self._script = _start_script(client_script)

    def _is_running(self) -> bool:
        if self._script is not None:
            return self._script.poll() is None
        return super()._is_running()

    def _kill(self) -> None:
        if self._script is not None:
            self._script.terminate()
            self._script.wait()
            self._script = None
        super()._kill()

    @property
    def _ends_with_driver(self) -> bool:
        return True

    def detach(self, name: str | None = None, cached_path: str | None = DEFAULT_JOB_PATH) -> NoReturn:
        """Raises JobUnsupported: a LocalJob always ends with its driver."""
        raise JobUnsupported("a LocalJob ends with its driver and cannot be detached: use ProcessJob")

    def _outlive_driver(self) -> None:
        """Does nothing: a LocalJob always ends with its driver."""

    def _spec(self) -> dict[str, Any]:
        return {"meshes": self._request.meshes}

    def _allocation(self) -> None:
        return None

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self:
        return cls(meshes=LocalRequest.from_arguments(cls.__name__, **spec).meshes)


def _start_script(script: str) -> subprocess.Popen[bytes]:
    """Starts the user's script with its output in a new directory under ``.monarch/logs``."""
    Path(LOG_DIRECTORY).mkdir(parents=True, exist_ok=True)
    logs = Path(tempfile.mkdtemp(prefix="job_", dir=LOG_DIRECTORY))
    environment = {**os.environ, "MONARCH_BATCH_JOB": "1"}
    with (logs / "stdout.log").open("wb") as out, (logs / "stderr.log").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, script],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
