"""Starts, finds and ends jobs. A job that fails to start leaves nothing behind.

The client uses it with a kubeconfig, a provisioning gateway for callers without permissions of their own. The
permissions that a job needs are checked before anything is created; those that only improve diagnostics (events, logs,
nodes) are not required.
"""

from __future__ import annotations

import base64
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from meshgate_kubernetes.api.client import KINDS, Api, patient
from meshgate_kubernetes.errors import Conflict, Forbidden, KubernetesError, NotFound, Rejected
from meshgate_kubernetes.jobs import objects
from meshgate_kubernetes.manifests import job_objects as manifests
from meshgate_kubernetes.manifests.job_objects import (
    GROUPS_ANNOTATION,
    OPERATOR_SELECTOR,
    OWNER_ANNOTATION,
    monarch_mesh_name,
    statefulset_selector,
)
from meshgate_kubernetes.manifests.names import COMPONENT_LABEL, ENGINES, FORWARDER, GATEWAY, JOB_LABEL, Names
from meshgate_kubernetes.manifests.pods import GATEWAY_PORT
from meshgate_kubernetes.manifests.spec import JobSpec, MeshSpec, Object
from meshgate_kubernetes.status.discovery import container_id, is_ready, pods_by_rank, termination_reason
from meshgate_kubernetes.status.readiness import JobNotReady, ProgressListener, wait_ready

log = logging.getLogger("meshgate.jobs.kubernetes")


@dataclass(frozen=True, slots=True)
class Permission:
    """The permission to ``verb`` objects of ``kind``, or their ``subresource``, in a namespace."""

    verb: str
    kind: str
    subresource: str = ""

    @property
    def resource(self) -> str:
        """The name that kubectl prints: ``statefulsets.apps``, ``pods/portforward``."""
        return f"{KINDS[self.kind].plural}/{self.subresource}" if self.subresource else KINDS[self.kind].resource

    def granted_by(self, rules: Iterable[Object]) -> bool:
        """Whether one of the RBAC ``rules`` grants it for every object name."""
        known = KINDS[self.kind]
        resource = f"{known.plural}/{self.subresource}" if self.subresource else known.plural
        required = (("verbs", self.verb), ("apiGroups", known.group), ("resources", resource))
        return any(
            not rule.get("resourceNames") and all({value, "*"} & set(rule.get(key) or []) for key, value in required)
            for rule in rules
        )

    def resource_attributes(self, namespace: str) -> dict[str, str]:
        """The resourceAttributes of an access review."""
        known = KINDS[self.kind]
        subresource = {"subresource": self.subresource} if self.subresource else {}
        return {
            "namespace": namespace,
            "verb": self.verb,
            "group": known.group,
            "resource": known.plural,
            **subresource,
        }


def required_permissions(spec: JobSpec, *, forward: bool) -> Iterator[Permission]:
    """The permissions to create, watch, reach and delete ``spec``; ``forward``: reach it by port-forward."""
    objects = [*manifests.gateway_objects(spec)]
    objects += [obj for mesh in spec.meshes for obj in manifests.mesh_objects(spec, mesh)]
    for kind in dict.fromkeys(["ConfigMap", "Secret", *(obj["kind"] for obj in objects)]):
        if kind not in manifests.OPTIONAL_KINDS:
            yield Permission("create", kind)
    # These include the permissions of the gateway's Role, because users can only grant permissions they have. Without
    # that to watch events, they create one without it.
    for kind in ("ConfigMap", "Pod"):
        for verb in ("get", "list", "watch"):
            yield Permission(verb, kind)
    yield Permission("get", "Secret")
    yield Permission("delete", "ConfigMap")
    if forward:  # a websocket is a GET request, but newer API servers also require create
        yield Permission("get", "Pod", "portforward")
        yield Permission("create", "Pod", "portforward")


def require_permissions(api: Api, spec: JobSpec, *, forward: bool) -> None:
    """Raises Forbidden with all missing permissions."""
    require_each(api, spec.namespace, required_permissions(spec, forward=forward))


def require_each(api: Api, namespace: str, permissions: Iterable[Permission]) -> None:
    """Raises Forbidden with all of ``permissions`` that are missing."""
    rules = api.list_rules(namespace)
    unlisted = [each for each in permissions if not each.granted_by(rules)]
    missing = [each for each in unlisted if not api.is_allowed(each.resource_attributes(namespace))]
    if missing:
        first = missing[0]
        user = api.denied_user(first.verb, first.kind, namespace) if not first.subresource else ""
        raise Forbidden(first.verb, first.resource, namespace, user=user, detail=_others(missing))


def _others(missing: Sequence[Permission]) -> str:
    by_verb: dict[str, list[str]] = {}
    for permission in missing[1:]:
        by_verb.setdefault(permission.verb, []).append(permission.resource)
    others = [f"nor {verb} {', '.join(resources)}" for verb, resources in by_verb.items()]
    hint = "docs/kubernetes.md has a Role with the required permissions"
    if any(KINDS[permission.kind].group == "rbac.authorization.k8s.io" for permission in missing):
        hint += "; without permissions for roles, name an existing account: gateway=Compute(service_account_name=…)"
    return "; ".join([*others, hint])


class RunningJob(BaseModel):
    """What any machine needs to use and end a job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    namespace: str
    uid: str
    token: str = Field(repr=False)
    meshes: dict[str, int]

    def without_token(self) -> RunningJob:
        """For callers whose own identity leads to the job."""
        return self.model_copy(update={"token": ""})


def resolve(api: Api, spec: JobSpec) -> JobSpec:
    """``spec`` adapted to the cluster: the MonarchMesh operator creates the pods if it is installed, and a mesh of
    existing pods gets their number. Raises NotFound if there are none.

    The selectors of pods to be created are set here, regardless of ``spec``: an untrusted caller might send one that
    matches the pods of another job, which the network policies would then open.
    """
    monarch = any(mesh.worker is not None for mesh in spec.meshes) and api.serves("MonarchMesh")
    if any(mesh.worker is not None and mesh.worker.cpu for mesh in spec.meshes):
        spec = _with_cpu_limits(spec, _limits_cpu(api, spec.namespace))
    return spec.model_copy(update={"meshes": tuple(_resolved(api, spec, mesh, monarch) for mesh in spec.meshes)})


def _limits_cpu(api: Api, namespace: str) -> bool:
    """Whether a quota or a limit range refuses pods without a CPU limit, or a limit range gives them one, which may be
    below what they request. False for users who may not know."""
    try:
        quotas, _ = api.list_objects("ResourceQuota", namespace)
        ranges, _ = api.list_objects("LimitRange", namespace)
    except Forbidden:
        return False
    limits = [each for limit in ranges for each in limit["spec"]["limits"]]  # of containers and of whole pods
    return any("limits.cpu" in (quota["spec"].get("hard") or {}) for quota in quotas) or any(
        "cpu" in (each.get(key) or {}) for each in limits for key in ("default", "max", "maxLimitRequestRatio")
    )


def _with_cpu_limits(spec: JobSpec, limited: bool) -> JobSpec:
    meshes = [
        mesh.model_copy(update={"worker": mesh.worker.model_copy(update={"cpu_is_limit": limited})})
        if mesh.worker is not None
        else mesh
        for mesh in spec.meshes
    ]
    return spec.model_copy(update={"meshes": tuple(meshes)})


def _resolved(api: Api, spec: JobSpec, mesh: MeshSpec, monarch: bool) -> MeshSpec:
    if mesh.way == "selector":
        if mesh.replicas:
            return mesh
        pods, _ = api.list_objects("Pod", spec.namespace, mesh.selector)
        count = len(pods_by_rank(mesh, pods))
        if not count:
            raise NotFound(f"no pod in namespace {spec.namespace!r} matches the selector {mesh.selector!r}")
        return mesh.model_copy(update={"replicas": count})
    if not monarch:
        return mesh.model_copy(update={"way": "statefulset", "selector": statefulset_selector(spec.name, mesh.name)})
    selector = f"{OPERATOR_SELECTOR}{monarch_mesh_name(spec.name, mesh.name)}"
    return mesh.model_copy(update={"way": "monarchmesh", "selector": selector})


@patient
def start(
    api: Api,
    requested: JobSpec,
    listener: ProgressListener,
    *,
    timeout: float | None,
    owner: str = "",
    groups: Sequence[str] = (),
    forward: bool = False,
    on_new: Callable[[RunningJob], None] = lambda job: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> RunningJob:
    """Creates the job and waits until it is ready. If the same job runs already, uses that.

    ``owner``, and the ``groups`` it shares the job with, are recorded in the job; ``forward``: it will be reached by
    port-forward. ``on_new`` is called as soon as a new job exists, with what ``end`` needs and neither token nor
    meshes, and ``meanwhile`` while pods start. On any failure, Ctrl-C included, a new job is deleted. Raises
    KubernetesError: JobNotReady; Forbidden with all missing permissions, before anything is created; Conflict if a
    different job has the name.
    """
    spec = resolve(api, requested)
    require_permissions(api, spec, forward=forward)
    parent, new = _create_or_find(api, spec, owner, groups)
    spec = manifests.with_sizes(spec, manifests.sizes_of(parent))
    uid = str(parent["metadata"]["uid"])
    try:
        if new:
            on_new(RunningJob(name=spec.name, namespace=spec.namespace, uid=uid, token="", meshes={}))
            listener.created(parent)
        objects.create_owned(api, spec, parent, listener)
        meanwhile()
        wait_ready(api, spec, uid, listener, timeout)
        return find(api, spec.name, spec.namespace)
    except JobNotReady as error:
        if not new:
            raise error.with_note(f"the job existed before and is kept; {_how_to_end(spec)}") from None
        _clean_up(api, spec, uid)
        raise
    except BaseException:
        if new:
            _clean_up(api, spec, uid)
        raise


def _create_or_find(api: Api, spec: JobSpec, owner: str, groups: Sequence[str]) -> tuple[Object, bool]:
    """The parent of the job, and whether it is new."""
    try:
        return objects.create_parent(api, spec, owner, groups), True
    except Conflict as error:
        conflict = error
    try:
        existing, parent = objects.read_parent(api, spec.name, spec.namespace)
    except NotFound:  # it is being deleted
        objects.wait_gone(api, spec.name, spec.namespace)
        return objects.create_parent(api, spec, owner, groups), True
    except ValueError:
        raise conflict from None
    if _owner(parent) != owner:
        whose = f"of {_owner(parent)}" if _owner(parent) else "that was created with a kubeconfig"
        raise Conflict(
            f"a job {spec.name!r} {whose} is already running in namespace {spec.namespace!r}: choose another name"
        ) from conflict
    same = (_with_cpu_limits(each, False) for each in (existing, manifests.asked_spec(parent)))
    if _with_cpu_limits(spec, False) not in same:  # the limits of the namespace may have changed
        raise Conflict(
            f"a job {spec.name!r} with a different specification is already running in namespace "
            f"{spec.namespace!r}: choose another name, or end it first; {_how_to_end(spec)}"
        ) from conflict
    return parent, False


def _how_to_end(spec: JobSpec) -> str:
    return f"`meshgate kill -n {spec.namespace} {spec.name}` ends it"


def _clean_up(api: Api, spec: JobSpec, uid: str) -> None:
    try:
        objects.delete(api, spec.name, spec.namespace, uid=uid)
    except KubernetesError as error:  # the reason for the failed start matters more
        log.warning("cannot delete the objects of job %r: %s", spec.name, error)


def find(api: Api, name: str, namespace: str) -> RunningJob:
    """The running job of this name. Raises as ``read_current`` does."""
    spec, parent = read_current(api, name, namespace)
    secret = api.get("Secret", Names(name).secret, namespace)
    token = base64.b64decode(secret["data"]["token"]).decode()
    meshes = {mesh.name: mesh.replicas for mesh in spec.meshes}
    return RunningJob(name=name, namespace=namespace, uid=parent["metadata"]["uid"], token=token, meshes=meshes)


def read_current(api: Api, name: str, namespace: str) -> tuple[JobSpec, Object]:
    """As ``objects.read_parent``. Raises NotFound, and Rejected if another version of meshgate created the job."""
    try:
        return objects.read_parent(api, name, namespace)
    except ValueError:
        raise Rejected(
            f"job {name!r} in namespace {namespace!r} was created by another version of meshgate: use that version, "
            f"or end the job with `meshgate kill -n {namespace} {name}`"
        ) from None


class ListedJob(BaseModel):
    """An existing job. ``created``: seconds since the epoch; ``owner``: of a provisioned job, or "", and the ``groups``
    it shares the job with. ``meshes`` and ``gpus`` are None if another version of meshgate created it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    namespace: str
    uid: str
    meshes: dict[str, int] | None
    created: float
    owner: str
    groups: tuple[str, ...] = ()
    gpus: int | None = None


def list_jobs(api: Api, namespace: str = "") -> list[ListedJob]:
    """The jobs of a namespace, or of all namespaces, oldest first."""
    parents, _ = api.list_objects("ConfigMap", namespace, f"{JOB_LABEL},{COMPONENT_LABEL}=job")
    return sorted(map(_listed, parents), key=lambda job: job.created)


def _listed(parent: Object) -> ListedJob:
    metadata = parent["metadata"]
    meshes = gpus = None
    with suppress(ValueError):
        spec = manifests.current_spec(parent)
        meshes, gpus = {mesh.name: mesh.replicas for mesh in spec.meshes}, spec.gpu_count
    return ListedJob(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        meshes=meshes,
        created=datetime.fromisoformat(metadata["creationTimestamp"].replace("Z", "+00:00")).timestamp(),
        owner=_owner(parent),
        groups=_groups(parent),
        gpus=gpus,
    )


def read_listed(api: Api, name: str, namespace: str) -> ListedJob:
    """The job as ``list_jobs`` has it. Raises NotFound, also if the ConfigMap of this name is not that of a job."""
    parent = api.get("ConfigMap", Names(name).parent, namespace)
    labels = parent["metadata"].get("labels") or {}
    if (labels.get(JOB_LABEL), labels.get(COMPONENT_LABEL)) != (name, "job"):
        raise NotFound(f"the ConfigMap {name!r} in namespace {namespace!r} is not that of a job")
    return _listed(parent)


def replaced(name: str, namespace: str) -> NotFound:
    """The error for a request that is for an earlier job of this name."""
    return NotFound(f"job {name!r} in namespace {namespace!r} has ended, and another job has its name now")


def _owner(parent: Object) -> str:
    return str((parent["metadata"].get("annotations") or {}).get(OWNER_ANNOTATION, ""))


def _groups(parent: Object) -> tuple[str, ...]:
    try:
        groups = json.loads((parent["metadata"].get("annotations") or {}).get(GROUPS_ANNOTATION, "[]"))
    except ValueError:  # it was edited by hand: shared with no group
        return ()
    return tuple(map(str, groups)) if isinstance(groups, list) else ()


def refreshed(api: Api, job: RunningJob) -> RunningJob | None:
    """The job with the numbers of hosts that it has now, whichever version of meshgate created it. None if it does not
    exist, or is being deleted."""
    try:
        parent = api.get("ConfigMap", Names(job.name).parent, job.namespace)
    except NotFound:
        return None
    if parent["metadata"]["uid"] != job.uid or "deletionTimestamp" in parent["metadata"]:
        return None
    return job.model_copy(update={"meshes": {**job.meshes, **manifests.sizes_of(parent)}})


def end(api: Api, job: RunningJob | ListedJob) -> None:
    """Deletes the job and returns when nothing of it is left. Does nothing if it is gone."""
    objects.delete(api, job.name, job.namespace, uid=job.uid)


@dataclass(frozen=True, slots=True)
class GatewayPod:
    """One gateway process: the pod and the container ID, which changes when the container restarts."""

    name: str
    host: str
    uid: str
    container: str
    port: int = GATEWAY_PORT
    engines: GatewayPod | None = None
    """The pod that it forwards to; None if its engines are in the pod itself."""

    @property
    def address(self) -> str:
        """As in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_gateway(api: Api, job: str, namespace: str) -> GatewayPod | None:
    """The gateway of the job if it is ready; the newest if an old one is still being deleted. Any of several that
    forward, if the pod of the engines is ready too: a lost node's gateway looks ready for a while."""
    ready = _ready_gateways(api, job, namespace)
    if FORWARDER not in ready:
        return _newest(ready.get(GATEWAY, ()))
    engines = _newest(ready.get(ENGINES, ()))
    return None if engines is None else replace(_gateway_pod(random.choice(ready[FORWARDER])), engines=engines)


def find_engines(api: Api, job: str, namespace: str) -> GatewayPod | None:
    """The engines' pod of a job whose gateways forward, if it is ready."""
    return _newest(_ready_gateways(api, job, namespace).get(ENGINES, ()))


def _ready_gateways(api: Api, job: str, namespace: str) -> dict[str, list[Object]]:
    """The pods of the job's gateway by component."""
    found: dict[str, list[Object]] = {}
    for pod in api.list_objects("Pod", namespace, Names(job).gateway_selector())[0]:
        if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]:
            found.setdefault(pod["metadata"]["labels"].get(COMPONENT_LABEL, ""), []).append(pod)
    return found


def _newest(pods: Sequence[Object]) -> GatewayPod | None:
    newest = max(pods, key=lambda each: str(each["metadata"]["creationTimestamp"]), default=None)
    return None if newest is None else _gateway_pod(newest)


def _gateway_pod(pod: Object) -> GatewayPod:
    metadata = pod["metadata"]
    return GatewayPod(metadata["name"], pod["status"]["podIP"], metadata["uid"], container_id(pod, GATEWAY_PORT))


def gateway_gone_reason(api: Api, job: str, namespace: str, known: GatewayPod | None) -> str | None:
    """Why the gateway process ``known`` is gone for good; None if it may still respond. Raises KubernetesError."""
    try:
        parent = api.get("ConfigMap", Names(job).parent, namespace)
    except NotFound:
        return "the job was deleted"
    if known is None:
        return None
    reason: str | None
    try:
        reason = termination_reason(api.get("Pod", known.name, namespace), known.uid, known.container)
    except NotFound:
        reason = "was deleted"
    if reason and "deletionTimestamp" in parent["metadata"]:  # the parent goes last
        return "the job was deleted"
    return f"its pod {known.name} {reason}" if reason else None
