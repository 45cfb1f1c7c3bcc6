"""The job in which this program runs: a submitted program attaches to it instead of starting another one.

The gateway describes the job in the environment of its runs. A job object of the same type, or of one that extends it,
is that job if it has its name and namespace or, without a name, its meshes: with the numbers of hosts that the job was
created with, or with those that it has been scaled to. It belongs to the user who submitted the program, so the end of
a ``with`` block and ``kill()`` only leave it.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from meshgate.errors import JobError, JobUnsupported
from meshgate.jobs.state import JobState
from meshgate.jobs.trait import JobTrait

if TYPE_CHECKING:
    from meshgate.session.dialing import UrlDialer


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The run of this program, and its job. ``name`` and ``namespace`` of the job are empty if it has none."""

    run: str
    kind: str
    name: str
    namespace: str
    meshes: Mapping[str, int]
    url: str
    token: str
    socket: str | None

    def dialer(self) -> UrlDialer:
        from meshgate.session.dialing import UrlDialer  # noqa: PLC0415 - only submitted programs come here

        return UrlDialer(self.url, self.token, unix_socket=self.socket, here=True)


def surroundings() -> Surroundings | None:
    """None if this program was not submitted to a job."""
    described = os.environ.get("MESHGATE_RUN_JOB")
    if not described:
        return None
    job = json.loads(described)
    return Surroundings(
        run=os.environ["MESHGATE_RUN"],
        kind=job["kind"],
        name=job["name"],
        namespace=job["namespace"],
        meshes=job["meshes"],
        url=os.environ["MESHGATE_RUN_URL"],
        token=os.environ["MESHGATE_RUN_TOKEN"],
        socket=os.environ.get("MESHGATE_RUN_SOCKET"),
    )


def join(job: JobTrait, name: str | None, namespace: str, meshes: Mapping[str, int]) -> JoinedJob | None:
    """The job of this program if ``job``, which has this name, namespace and these meshes, is that one.

    Raises JobError if it has the name, but other meshes, and GatewayError if the job's gateway does not say how many
    hosts they have.
    """
    here = surroundings()
    if here is None or here.kind not in (kind.__name__ for kind in type(job).__mro__):
        return None
    if name is not None and (name, namespace) != (here.name, here.namespace):
        return None
    found = JoinedJob(here)
    if not found.is_described_by(meshes, named=name is not None):
        if name is None:
            return None
        raise JobError(
            f"{job!r}: this program runs in the job of that name, whose meshes are {found.meshes}. Change the meshes "
            "of one of them, or give this job another name"
        )
    return found


class JoinedJob(JobTrait):
    """The running job of a submitted program."""

    def __init__(self, here: Surroundings) -> None:
        super().__init__()
        self._here = here
        self.meshes = self._created_with = dict(here.meshes)
        self._read_sizes()
        self._apply_id = os.environ.get("MESHGATE_JOB") or str(uuid.uuid4())
        self._status = "running"

    def __repr__(self) -> str:
        name = f"{self._here.namespace}/{self._here.name}" if self._here.name else dict(self._here.meshes)
        return f"{self._here.kind}({name}), the job of the run {self._here.run}"

    def _read_sizes(self) -> None:
        """Asks the job's gateway for the present numbers of hosts. Only jobs with a name can be scaled."""
        from meshgate.session.gateway_client import request_json  # noqa: PLC0415 - few programs need it

        if self._here.name:
            described = request_json(self._dialer(), "/v1/job")
            self.meshes = described["meshes"]
            self._created_with = described.get("created_with", self.meshes)

    def is_described_by(self, meshes: Mapping[str, int], *, named: bool) -> bool:
        """Whether these are its meshes. A program that has ``named`` it may leave them out. Prints a line if they are
        those that it was created with, and it has been scaled since."""
        if dict(meshes) == self.meshes or (named and not meshes):
            return True
        if dict(meshes) != self._created_with:
            return False
        _say_once(f"meshgate: {self!r}, has been scaled from {self._created_with} to {self.meshes} hosts")
        return True

    def _create(self, client_script: str | None) -> None:
        raise JobError(f"{self!r} runs already")

    def _state(self) -> JobState:
        return self._attach_meshes(self.meshes)

    def _kill(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        _say_once(f"meshgate: left {self!r}, running: it belongs to the user who submitted this program")

    @property
    def _ends_when_killed(self) -> bool:
        return False

    def can_run(self, spec: JobTrait) -> bool:
        return False

    def _is_running(self) -> bool:
        self._read_sizes()
        return True

    def _dialer(self) -> UrlDialer:
        return self._here.dialer()

    def _mesh_sizes(self) -> Mapping[str, int]:
        return self.meshes

    def _outlive_driver(self) -> None:
        """The job does so in any case."""

    def _spec(self) -> dict[str, Any]:
        return {}

    def _allocation(self) -> None:
        return None


def native_hosts(name: str) -> Any:
    """Monarch's own ``HostMesh`` of the job's host mesh ``name``, in a program that was submitted to the job.

    Such a program runs beside the workers, so it can have what needs that: distributed tensors, RDMA, and all else of
    Monarch. The hosts are the job's: stop the processes that you spawn, never shut the mesh down. Raises JobUnsupported
    elsewhere, and ValueError if the job has no mesh of this name.
    """
    from meshgate.actors.local_monarch import allow_local_monarch  # noqa: PLC0415 - few programs need it
    from meshgate.session.gateway_client import request_json  # noqa: PLC0415

    here = surroundings()
    if here is None:
        raise JobUnsupported(
            f"native_hosts({name!r}): Monarch's own HostMesh is for programs that run beside the workers. Submit this "
            "program to a job, with job.submit() or `meshgate submit`; here, take the hosts from job.state()"
        )
    hosts = request_json(here.dialer(), f"/v1/hosts?mesh={quote(name)}", refusals={404, 409})["hosts"]
    allow_local_monarch()
    # The gateway is installed where it runs. What is bound to a release of Monarch is in its adapter only.
    interface = importlib.import_module("meshgate_gateway.engine.monarch.interface")
    address = os.environ.get("MESHGATE_ENGINE_HOST")  # at which workers reach this pod or node
    return interface.native_hosts(name, hosts, interface.transport_at(address) if address else None)


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - for the reader of the output of the run
