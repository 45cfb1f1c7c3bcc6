"""Changes the number of hosts of a mesh of a running job, which is that of the replicas of its StatefulSet.

The number that counts is in the job's ConfigMap, and the job's gateway reads it there when it is asked to. New hosts
count once all of them are ready, and hosts that are removed no longer count when their pods are deleted: no session
attaches to a host that is not there. Repeating a change completes it after an interruption.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import ValidationError

from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import KubernetesError, Rejected
from meshgate_kubernetes.jobs.lifecycle import Permission, RunningJob, read_current, require_each
from meshgate_kubernetes.manifests.job_objects import sizes_data, with_sizes
from meshgate_kubernetes.manifests.names import Names
from meshgate_kubernetes.manifests.spec import JobSpec, MeshSpec
from meshgate_kubernetes.status.observer import Observer, WatchTarget
from meshgate_kubernetes.status.readiness import ProgressListener, wait_ready
from meshgate_wire.fields import first_problem
from meshgate_wire.status import JobStatus

log = logging.getLogger("meshgate.jobs.kubernetes")

PERMISSIONS = (Permission("patch", "ConfigMap"), Permission("patch", "StatefulSet"))


class AskGateway(Protocol):
    """Asks the job's gateway: to read the numbers of hosts, by ``POST /v1/job``, or what runs on which host."""

    def __call__(self, path: str, body: bytes | None, /) -> Any:
        """The JSON of the answer to ``GET path``, or to ``POST path`` if there is a ``body``."""


def scale(
    api: Api,
    job: RunningJob,
    name: str,
    hosts: int,
    listener: ProgressListener,
    *,
    timeout: float,
    ask_gateway: AskGateway,
    require_allowed: Callable[[JobSpec], None] = lambda grown: None,
) -> RunningJob:
    """``job`` with ``hosts`` hosts in the mesh ``name``: waits until new hosts are ready, or removed ones gone.

    ``require_allowed`` is called with the job as it will be, if the mesh grows, and raises if that may not be. Nothing
    is changed then, nor if processes run on hosts that would be removed. If new hosts do not become ready within
    ``timeout`` seconds, or cannot, they are removed, and KubernetesError says why. Raises what ``ask_gateway`` raises.
    """
    spec, uid = read_current(api, job.name, job.namespace)
    mesh = _scalable(spec, name)
    if hosts > mesh.replicas:
        require_allowed(with_sizes(spec, {name: hosts}))
    require_each(api, spec.namespace, PERMISSIONS)
    change = _Change(api, spec, mesh, hosts, timeout, ask_gateway)
    change.have_gateway_read()  # before anything is changed: one that cannot is too old, or cannot be reached
    if hosts < mesh.replicas:
        _require_unused(ask_gateway("/v1/status", None), change.leaving)
        change.shrink()
    else:
        change.grow(uid, listener)
    return job.model_copy(update={"meshes": {**job.meshes, name: hosts}})


def _scalable(spec: JobSpec, name: str) -> MeshSpec:
    mesh = spec.mesh(name)
    if mesh is None:
        raise Rejected(f"it has no such mesh, only {', '.join(each.name for each in spec.meshes)}")
    if mesh.way != "statefulset":
        creator = (
            "the MonarchMesh operator has created its pods" if mesh.way == "monarchmesh" else "its pods are others'"
        )
        raise Rejected(f"{creator}; only a mesh whose pods the job itself creates, with compute=, can be scaled")
    if mesh.worker is not None and mesh.worker.queue_name:
        raise Rejected(
            f"the queue {mesh.worker.queue_name!r} admits all of its pods together, as a group of fixed size"
        )
    return mesh


def _require_unused(answer: Any, hosts: Collection[str]) -> None:
    """Raises Rejected if the status ``answer`` has processes on ``hosts``, or does not say whether there are some."""
    try:
        status = JobStatus.model_validate(answer)
    except ValidationError as error:
        raise Rejected(
            "the job's gateway is of another version of meshgate and does not say what runs on its hosts "
            f"({first_problem(error)}). Nothing was changed; use that version"
        ) from error
    if unknown := [each for each in status.sessions if each.problem]:
        raise Rejected(
            f"it is not known what runs on {', '.join(sorted(hosts))}: session {unknown[0].session[:8]}: "
            f"{unknown[0].problem}. Nothing was changed; try again"
        )
    found = [
        f"{procs.name!r} of session {session.name or session.session[:8]} ({', '.join(used)})"
        for session in status.sessions
        for procs in session.meshes
        if (used := sorted(procs.hosts_in_use().intersection(hosts)))
    ]
    if found:
        raise Rejected(
            f"processes run on hosts that would be removed: {'; '.join(found)}. Nothing was changed. Stop them first "
            "(procs.stop()), or end their session (`meshgate kill JOB --session NAME`)"
        )


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of ``mesh``, as ``spec`` has it, to ``hosts`` hosts."""

    api: Api
    spec: JobSpec
    mesh: MeshSpec
    hosts: int
    timeout: float
    ask_gateway: AskGateway

    def have_gateway_read(self) -> None:
        """The numbers of hosts, as they are recorded now."""
        self.ask_gateway("/v1/job", b"")

    @property
    def leaving(self) -> set[str]:
        """The names of the pods that this removes."""
        stateful_set = Names(self.spec.name).mesh(self.mesh.name)
        return {f"{stateful_set}-{rank}" for rank in range(self.hosts, self.mesh.replicas)}

    def grow(self, uid: str, listener: ProgressListener) -> None:
        try:
            self._set_replicas(self.hosts)
            wait_ready(self.api, with_sizes(self.spec, {self.mesh.name: self.hosts}), uid, listener, self.timeout)
            self._record(self.hosts)
            self.have_gateway_read()
        except BaseException:
            try:
                self._record(self.mesh.replicas)
                self._set_replicas(self.mesh.replicas)
            except KubernetesError as error:  # the reason for the failure matters more
                log.warning("cannot take mesh %r back to %d hosts: %s", self.mesh.name, self.mesh.replicas, error)
            raise

    def shrink(self) -> None:
        self._record(self.hosts)
        self.have_gateway_read()
        self._set_replicas(self.hosts)
        with Observer(self.api, self.spec.namespace, [WatchTarget("Pod", self.mesh.selector)]) as observer:

            def left() -> list[str]:
                return sorted(self.leaving.intersection(pod["metadata"]["name"] for pod in observer.objects("Pod")))

            if not observer.wait_for(lambda: not left(), self.timeout):
                raise Rejected(
                    f"it has {self.hosts} hosts now, but after {self.timeout:g} s these pods still exist: "
                    f"{', '.join(left())}. Check for finalizers and unreachable nodes"
                )

    def _record(self, hosts: int) -> None:
        patch = {"data": sizes_data({self.mesh.name: hosts})}
        self.api.merge_patch("ConfigMap", Names(self.spec.name).parent, self.spec.namespace, patch)

    def _set_replicas(self, hosts: int) -> None:
        name = Names(self.spec.name).mesh(self.mesh.name)
        self.api.merge_patch("StatefulSet", name, self.spec.namespace, {"spec": {"replicas": hosts}})
