"""Jobs whose hosts are processes of this machine: a gateway, and the worker hosts that it starts.

The protocol, the gateway, the engine and the sync are those of a cluster; only the scheduler is missing.
``GatewayProcessJob`` is what :class:`ProcessJob` and ``LocalJob`` have in common.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Self

from meshgate.client import Client
from meshgate.dialing import UrlDialer
from meshgate.errors import JobError, JobNotRunning
from meshgate.jobs import registry
from meshgate.jobs.gateway_process import GatewayProcess, GatewayRecord, Launch
from meshgate.jobs.image import Image
from meshgate.jobs.state import JobState, attached
from meshgate.jobs.trait import JobTrait

__all__ = ["GatewayProcessJob", "LocalSpec", "ProcessJob"]

MeshName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,62}$")]


class LocalSpec(BaseModel):
    """What was asked for, checked: it comes from a program or from a file. Times are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    meshes: dict[MeshName, Annotated[int, Field(ge=1, le=1024)]] = Field(min_length=1)
    env: dict[str, str] = {}
    lease: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3600.0
    idle_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 600.0

    @classmethod
    def of(cls, job: str, **given: Any) -> LocalSpec:
        """The spec of the arguments that are not None. Raises ValueError that names the argument at fault."""
        try:
            return cls.model_validate({name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            first = error.errors()[0]
            where = str(first["loc"][0]) + "".join(f"[{part!r}]" for part in first["loc"][1:] if part != "[key]")
            raise ValueError(f"{job}: {where}={first['input']!r}: {first['msg']}") from None


class GatewayProcessJob(JobTrait):
    """A job with a gateway process of its own."""

    def __init__(self, asked: LocalSpec, image: Image | None = None) -> None:
        super().__init__()
        self._asked = asked
        if image is not None:
            self._images = dict.fromkeys(asked.meshes, image)
        self._gateway: GatewayProcess | None = None
        self._client: Client | None = None

    def __repr__(self) -> str:
        where = f", {self._gateway.record.url}" if self._gateway else ""
        return f"{type(self).__name__}({self._asked.meshes}{where})"

    @property
    def gateway_url(self) -> str | None:
        """Where the job's gateway listens; None while the job is not running."""
        running = self._running
        gateway = running._gateway if isinstance(running, GatewayProcessJob) else None
        return gateway.record.url if gateway else None

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise JobError(f"{type(self).__name__} cannot run batch-mode scripts: run {client_script} yourself")
        apply_id = str(self._apply_id)
        launch = Launch(
            apply_id=apply_id,
            meshes=self._asked.meshes,
            environment=self._asked.env,
            log=registry.log_file(apply_id),
            lease=self._asked.lease,
            idle_timeout=0 if self._bound else self._asked.idle_timeout,
        )
        try:
            self._gateway = GatewayProcess.start(launch)
        except BaseException:
            registry.unregister(apply_id)
            raise
        record = self._gateway.record
        registry.register(
            registry.LocalEntry(
                apply_id=apply_id,
                kind=type(self).__name__,
                meshes=self._asked.meshes,
                url=record.url,
                pid=record.pid,
                started=record.started,
                directory=os.getcwd(),
                created=time.time(),
            )
        )

    def _state(self) -> JobState:
        gateway = self._gateway
        if gateway is None or not gateway.alive:
            raise JobNotRunning(f"{self!r} has ended; apply() starts it again")
        if self._client is not None and self._client.closed:
            self._client.close()  # its session is over: what it has running here ends too
            self._client = None
        if self._client is None:
            record = gateway.record
            self._client = Client.connect(
                UrlDialer(record.url, record.token, alive=lambda: gateway.alive, unix_socket=record.socket)
            )
        self._attached = attached(self._client, self._asked.meshes, self._attached)
        return self._attached

    @property
    def _bound(self) -> bool:
        """Whether it can only end with this process, so that it need not watch for being forgotten."""
        return self._scoped

    def _kill(self) -> None:
        hurried = False
        if self._client is not None:
            self._client.close()
            hurried = not self._client.ended_in_order  # the gateway would wait for the session in its turn
            self._client = None
        if self._gateway is not None:
            self._gateway.stop(hurried=hurried)
            registry.unregister(self._gateway.record.apply_id)
            self._gateway = None

    def _is_running(self) -> bool:
        return self._gateway is not None and self._gateway.alive

    def _outlive_driver(self) -> None:
        if self._gateway is not None:
            self._gateway.outlive_driver()

    def _spec(self) -> dict[str, Any]:
        return self._asked.model_dump()

    def _allocation(self) -> dict[str, Any] | None:
        if self._gateway is None:
            raise JobNotRunning(f"{self!r} is not running")
        return self._gateway.record.model_dump()


class ProcessJob(GatewayProcessJob):
    """Hosts are processes of this machine: ``ProcessJob({"trainers": 2, "dataloaders": 1})``.

    ``meshes`` maps names to numbers of hosts; ``env`` is added to the environment of the workers. Within ``with``,
    or with ``state(cached_path=None)``, everything ends with this process, even when it is killed. A job that was
    saved (``state()`` saves it in ``.monarch/job_state.pkl``) outlives it, for other processes to find, and ends
    itself ``idle_timeout`` seconds (600) after its last session; 0 is never. ``lease`` is how long, in seconds
    (3600), a session waits for a driver that went away without a word. The steps of ``image`` run on
    every host when ``state()`` hands it out; its base is this machine, whatever it names.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        env: Mapping[str, str] | None = None,
        *,
        lease: float | None = None,
        idle_timeout: float | None = None,
        image: Image | None = None,
    ) -> None:
        asked = LocalSpec.of("ProcessJob", meshes=meshes, env=env, lease=lease, idle_timeout=idle_timeout)
        super().__init__(asked, image)

    def can_run(self, spec: JobTrait) -> bool:
        """Whether ``spec`` is a ProcessJob that asks for just this, and the gateway answers."""
        gateway = self._gateway
        return isinstance(spec, ProcessJob) and spec._asked == self._asked and bool(gateway and gateway.healthy())

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self:
        job = cls(**LocalSpec.model_validate(spec).model_dump())
        if allocation is not None:
            job._gateway = GatewayProcess(GatewayRecord.model_validate(allocation))
        return job
