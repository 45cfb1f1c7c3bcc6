"""Changes the number of hosts of a mesh of a running job, which is that of the replicas of its StatefulSet.

The number that counts is in the job's ConfigMap, and the job's gateway reads it there when it is asked to. New hosts
count once all of them are ready, and hosts that are removed no longer count when their pods are deleted: no session
attaches to a host that is not there. Repeating a change completes it after an interruption.

A job has one change at a time, from all programs together: the ConfigMap says which. Each patch of it has the version
that was seen last, which the API server compares, so of two programs that begin at once, one is refused.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import ValidationError

from meshgate_kubernetes.api.client import Api, patient
from meshgate_kubernetes.errors import Conflict, KubernetesError, Rejected
from meshgate_kubernetes.jobs.lifecycle import Permission, RunningJob, read_current, replaced, require_each
from meshgate_kubernetes.manifests.job_objects import CHANGE_ANNOTATION, sizes_data, with_sizes
from meshgate_kubernetes.manifests.names import Names
from meshgate_kubernetes.manifests.spec import JobSpec, MeshSpec, Object
from meshgate_kubernetes.status.observer import Observer, WatchTarget
from meshgate_kubernetes.status.readiness import ProgressListener, wait_ready
from meshgate_wire.fields import first_problem
from meshgate_wire.status import JobStatus

log = logging.getLogger("meshgate.jobs.kubernetes")

PATCH_ATTEMPTS = 5
PERMISSIONS = (Permission("patch", "ConfigMap"), Permission("patch", "StatefulSet"))


class AskGateway(Protocol):
    """Asks the job's gateway: to read the numbers of hosts, by ``POST /v1/job``, or what runs on which host."""

    def __call__(self, path: str, body: bytes | None, /) -> Any:
        """The JSON of the answer to ``GET path``, or to ``POST path`` if there is a ``body``."""


@patient
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
    ``timeout`` seconds, or cannot, they are removed, and KubernetesError says why: Conflict if another change is in
    progress; NotFound if another job has its name. Raises what ``ask_gateway`` raises.
    """
    spec, parent = read_current(api, job.name, job.namespace)
    if job.uid not in ("", parent["metadata"]["uid"]):
        raise replaced(job.name, job.namespace)
    mesh = _scalable(spec, name)
    if hosts > mesh.replicas:
        require_allowed(with_sizes(spec, {name: hosts}))
    require_each(api, spec.namespace, PERMISSIONS)
    change = _Change(api, spec, mesh, hosts, timeout, ask_gateway, parent)
    change.have_gateway_read()  # before anything is changed: one that cannot is too old, or cannot be reached
    if hosts < mesh.replicas:
        _require_unused(ask_gateway("/v1/status", None), change.leaving)
    try:
        change.begin()
        if hosts < mesh.replicas:
            change.shrink()
        else:
            change.grow(listener)
    finally:
        change.end()
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


@dataclass(slots=True)
class _Change:
    """A change of ``mesh``, as ``spec`` has it, to ``hosts`` hosts. ``parent``: the job's ConfigMap as it is now."""

    api: Api
    spec: JobSpec
    mesh: MeshSpec
    hosts: int
    timeout: float
    ask_gateway: AskGateway
    parent: Object
    begun: bool = False  # and no other program has taken it over
    id: str = field(default_factory=lambda: secrets.token_hex(4))

    def have_gateway_read(self) -> None:
        """The numbers of hosts, as they are recorded now."""
        self.ask_gateway("/v1/job", b"")

    @property
    def leaving(self) -> set[str]:
        """The names of the pods that this removes."""
        stateful_set = Names(self.spec.name).mesh(self.mesh.name)
        return {f"{stateful_set}-{rank}" for rank in range(self.hosts, self.mesh.replicas)}

    def begin(self) -> None:
        """Raises Conflict if another change has begun, unless it is the same one, which may have been interrupted."""
        this = f"{self.mesh.name}={self.hosts}"
        begun = (_recorded(self.parent)[0] or this).partition(" ")[0]
        if begun != this:
            mesh, _, hosts = begun.partition("=")
            raise Conflict(
                f"another program is changing mesh {mesh!r} to {hosts} hosts: repeat this when that has ended. If that "
                f"program was killed, `meshgate scale -n {self.spec.namespace} {self.spec.name} {mesh} {hosts}` "
                "completes its change. Nothing was changed"
            )
        self.begun = True
        self._patch_parent({"metadata": {"annotations": {CHANGE_ANNOTATION: f"{this} {self.id}"}}})

    def end(self) -> None:
        if not self.begun:
            return
        try:
            self._patch_parent({"metadata": {"annotations": {CHANGE_ANNOTATION: None}}})
        except KubernetesError as error:  # the result of the change matters more
            if isinstance(error, Conflict) and _recorded(self.parent)[0] is None:
                return  # an earlier attempt, whose answer was lost, has recorded it
            log.warning(
                "cannot record that the change of mesh %r has ended, so others may be refused until it is repeated: %s",
                self.mesh.name,
                error,
            )

    def grow(self, listener: ProgressListener) -> None:
        try:
            self._set_replicas(self.hosts)
            grown, uid = with_sizes(self.spec, {self.mesh.name: self.hosts}), self.parent["metadata"]["uid"]
            wait_ready(self.api, grown, uid, listener, self.timeout)
            self._record(self.hosts)
            self.have_gateway_read()
        except BaseException:
            try:
                if self.begun:
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
        self._patch_parent({"data": sizes_data({self.mesh.name: hosts})})

    def _patch_parent(self, patch: Object) -> None:
        """Raises Conflict if another program has changed the number of hosts since ``parent``, which becomes what it is
        now. What others write beside it, such as labels, and a patch whose answer was lost do not count."""
        name, namespace = Names(self.spec.name).parent, self.spec.namespace
        for attempt in range(PATCH_ATTEMPTS):
            seen = {"resourceVersion": self.parent["metadata"]["resourceVersion"], **patch.get("metadata", {})}
            try:
                self.parent = self.api.merge_patch("ConfigMap", name, namespace, {**patch, "metadata": seen})
                return
            except Conflict as error:
                before, self.parent = self.parent, self.api.get("ConfigMap", name, namespace)
                change, _ = now = _recorded(self.parent)
                mine = change is not None and change.endswith(self.id)
                if (mine or now == _recorded(before)) and attempt + 1 < PATCH_ATTEMPTS:
                    continue
                self.begun = False
                raise Conflict(
                    "another program has changed the job at the same time: look at its number of hosts (`meshgate ls "
                    f"-n {namespace}`), and repeat this if it is still wanted"
                ) from error

    def _set_replicas(self, hosts: int) -> None:
        name = Names(self.spec.name).mesh(self.mesh.name)
        self.api.merge_patch("StatefulSet", name, self.spec.namespace, {"spec": {"replicas": hosts}})


def _recorded(parent: Object) -> tuple[str | None, Object]:
    """The change in progress, if there is one, and the job."""
    return (parent["metadata"].get("annotations") or {}).get(CHANGE_ANNOTATION), parent.get("data") or {}
