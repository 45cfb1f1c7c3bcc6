"""The life of a job in a cluster, whole: started and up, or gone without a trace; found again; ended.

This is what the client does with a user's kubeconfig, and a gateway for those who have no rights of their own.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from meshgate_kubernetes import provision, rights
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.discovery import ranked
from meshgate_kubernetes.errors import Conflict, KubernetesError, NotFound, Refused
from meshgate_kubernetes.manifests import OPERATOR_SELECTOR, OWNER_ANNOTATION, SPEC_KEY, monarch_mesh_name, own_selector
from meshgate_kubernetes.names import COMPONENT_LABEL, JOB_LABEL, Names
from meshgate_kubernetes.readiness import JobNotReady, Listener, wait_ready
from meshgate_kubernetes.spec import JobSpec, MeshSpec, Object

__all__ = [
    "ListedJob",
    "RunningJob",
    "end",
    "end_by_name",
    "end_listed",
    "find",
    "listed",
    "owner_of",
    "resolve",
    "runs",
    "start",
]

log = logging.getLogger("meshgate.kubernetes")


class RunningJob(BaseModel):
    """What it takes to use and to end a job in a cluster, from any machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    namespace: str
    uid: str
    token: str = Field(repr=False)
    meshes: dict[str, int]


def resolve(api: Api, spec: JobSpec) -> JobSpec:
    """``spec`` as this cluster can have it: pods are left to the MonarchMesh operator where it is installed, and a
    mesh that takes the pods it finds gets their number. Raises NotFound when it finds none.

    How pods that are made will be found is said here, whatever ``spec`` says: it may come from someone who would
    rather have those of another job, which its network policies would then open.
    """
    monarch = any(mesh.worker is not None for mesh in spec.meshes) and api.serves("MonarchMesh")
    return spec.model_copy(update={"meshes": tuple(_resolved(api, spec, mesh, monarch) for mesh in spec.meshes)})


def _resolved(api: Api, spec: JobSpec, mesh: MeshSpec, monarch: bool) -> MeshSpec:
    if mesh.way == "selector":
        if mesh.replicas:
            return mesh
        pods, _ = api.find("Pod", spec.namespace, mesh.selector)
        count = len(ranked(mesh, pods))
        if not count:
            raise NotFound(f"no pod in namespace {spec.namespace!r} matches the selector {mesh.selector!r}")
        return mesh.model_copy(update={"replicas": count})
    if not monarch:
        return mesh.model_copy(update={"way": "statefulset", "selector": own_selector(spec.name, mesh.name)})
    selector = f"{OPERATOR_SELECTOR}{monarch_mesh_name(spec.name, mesh.name)}"
    return mesh.model_copy(update={"way": "monarchmesh", "selector": selector})


def start(
    api: Api,
    asked: JobSpec,
    listener: Listener,
    *,
    timeout: float | None,
    owner: str = "",
    forward: bool = False,
) -> RunningJob:
    """Makes the job and waits until it is up, or takes the one of its name that is there if it is the same.

    ``owner`` is written down as who asked for it; ``forward``: it will be reached by a port-forward. Whatever goes
    wrong, a Ctrl-C too, nothing of a new job remains. Raises JobNotReady and the other KubernetesErrors: Forbidden
    with every right that is missing, before anything is made, and Conflict when a different job has the name.
    """
    spec = resolve(api, asked)
    rights.require(api, spec, forward=forward)
    parent, new = _create_or_find(api, spec, owner)
    uid = str(parent["metadata"]["uid"])
    try:
        provision.create_owned(api, spec, parent, listener)
        wait_ready(api, spec, uid, listener, timeout)
        return find(api, spec.name, spec.namespace)
    except JobNotReady as error:
        if not new:
            raise error.with_note(f"it is another program's, and left as it is; {_how_to_end(spec)}") from None
        _clean_up(api, spec, uid)
        raise
    except BaseException:
        if new:
            _clean_up(api, spec, uid)
        raise


def _create_or_find(api: Api, spec: JobSpec, owner: str) -> tuple[Object, bool]:
    """The parent of the job, and whether it is new."""
    try:
        return provision.create_parent(api, spec, owner), True
    except Conflict as error:
        conflict = error
    try:
        existing, parent = provision.read_parent(api, spec.name, spec.namespace)
    except NotFound:  # it was on its way out
        provision.wait_gone(api, spec.name, spec.namespace)
        return provision.create_parent(api, spec, owner), True
    except ValueError:
        raise conflict from None
    if existing != spec or _owner(parent) != owner:
        raise Conflict(
            f"a job {spec.name!r} runs already in namespace {spec.namespace!r}, and is not what is asked for now: "
            f"choose another name, or end that one first; {_how_to_end(spec)}"
        ) from conflict
    return parent, False


def _how_to_end(spec: JobSpec) -> str:
    return f"`meshgate kill -n {spec.namespace} {spec.name}` ends it"


def _clean_up(api: Api, spec: JobSpec, uid: str) -> None:
    try:
        provision.delete(api, spec.name, spec.namespace, uid=uid)
    except KubernetesError as error:  # the reason why the job failed matters more
        log.warning("what was made of job %r could not be removed: %s", spec.name, error)


def find(api: Api, name: str, namespace: str) -> RunningJob:
    """The running job of this name. Raises NotFound, and Refused where another version of meshgate made it."""
    try:
        spec, uid = provision.read_spec(api, name, namespace)
    except ValueError:
        raise Refused(
            f"job {name!r} in namespace {namespace!r} was made by another version of meshgate: use it with that one, "
            f"or end it; `meshgate kill -n {namespace} {name}` does"
        ) from None
    secret = api.get("Secret", Names(name).secret, namespace)
    token = base64.b64decode(secret["data"]["token"]).decode()
    meshes = {mesh.name: mesh.replicas for mesh in spec.meshes}
    return RunningJob(name=name, namespace=namespace, uid=uid, token=token, meshes=meshes)


@dataclass(frozen=True, slots=True)
class ListedJob:
    """A job that is there. ``created``: seconds since 1970; ``owner``: who asked a gateway for it, or "". ``meshes`` is
    None where another version of meshgate made it."""

    name: str
    namespace: str
    uid: str
    meshes: Mapping[str, int] | None
    created: float
    owner: str


def listed(api: Api, namespace: str = "") -> list[ListedJob]:
    """The jobs of a namespace, or of all of them, oldest first."""
    parents, _ = api.find("ConfigMap", namespace, f"{JOB_LABEL},{COMPONENT_LABEL}=job")
    return sorted(map(_listed, parents), key=lambda job: job.created)


def _listed(parent: Object) -> ListedJob:
    metadata = parent["metadata"]
    meshes = None
    with suppress(ValueError):
        spec = JobSpec.model_validate_json((parent.get("data") or {}).get(SPEC_KEY, ""))
        meshes = {mesh.name: mesh.replicas for mesh in spec.meshes}
    return ListedJob(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        meshes=meshes,
        created=datetime.fromisoformat(metadata["creationTimestamp"].replace("Z", "+00:00")).timestamp(),
        owner=_owner(parent),
    )


def end_listed(api: Api, job: ListedJob) -> None:
    """As ``end``."""
    provision.delete(api, job.name, job.namespace, uid=job.uid)


def owner_of(api: Api, name: str, namespace: str) -> str:
    """Who asked a gateway for the job, "" when nobody did. Raises NotFound."""
    return _owner(api.get("ConfigMap", Names(name).parent, namespace))


def _owner(parent: Object) -> str:
    return str((parent["metadata"].get("annotations") or {}).get(OWNER_ANNOTATION, ""))


def runs(api: Api, job: RunningJob) -> bool:
    """Whether it is there and not on its way out, whichever version of meshgate made it."""
    try:
        metadata = api.get("ConfigMap", Names(job.name).parent, job.namespace)["metadata"]
    except NotFound:
        return False
    return bool(metadata["uid"] == job.uid) and "deletionTimestamp" not in metadata


def end_by_name(api: Api, name: str, namespace: str) -> None:
    """As ``end``, whether the job is up, coming up, or on its way out already."""
    provision.delete(api, name, namespace)


def end(api: Api, job: RunningJob) -> None:
    """Returns when nothing of the job is left. Harmless when nothing was."""
    provision.delete(api, job.name, job.namespace, uid=job.uid)
