"""Creates, reads and deletes the objects of a job. ``readiness`` waits for its pods."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
import warnings
from collections.abc import Iterable, Sequence

from meshgate_kubernetes.api.client import Api, patient
from meshgate_kubernetes.errors import Conflict, Forbidden, KubernetesError, NotFound, Rejected
from meshgate_kubernetes.jobs.wheel import packed_wheel
from meshgate_kubernetes.manifests import job_objects as manifests
from meshgate_kubernetes.manifests.names import JOB_LABEL, Names
from meshgate_kubernetes.manifests.spec import JobSpec, Object
from meshgate_kubernetes.status.observer import Observer, WatchTarget
from meshgate_kubernetes.status.readiness import ProgressListener

DELETE_TIMEOUT = 120.0
FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0  # seconds
_SHOWN_NAMES = 10
_EVERY_KIND = [
    "ConfigMap",
    "Secret",
    "ServiceAccount",
    "Role",
    "RoleBinding",
    "NetworkPolicy",
    "Service",
    "Deployment",
    "StatefulSet",
    "Pod",
]


def create_parent(api: Api, spec: JobSpec, owner: str = "", groups: Sequence[str] = ()) -> Object:
    """Creates the parent of the job, which owns all its other objects. Raises Conflict if the name is in use.

    An interruption at any point leaves no parent behind.
    """
    attempt = secrets.token_hex(8)
    try:
        return api.create(manifests.parent(spec, owner, attempt, groups))
    except (Forbidden, NotFound):
        raise
    except BaseException as error:  # the API server may have created it nevertheless
        with contextlib.suppress(KubernetesError):
            existing = api.get("ConfigMap", Names(spec.name).parent, spec.namespace)
            if (existing["metadata"].get("annotations") or {}).get(manifests.ATTEMPT_ANNOTATION) == attempt:
                if isinstance(error, (Conflict, Rejected)):  # with the first of two requests, whose answer was lost,
                    return existing  # so that the second finds the name, or all of the quota, in use
                api.delete("ConfigMap", existing["metadata"]["name"], spec.namespace, uid=existing["metadata"]["uid"])
        raise


def create_owned(api: Api, spec: JobSpec, parent: Object, listener: ProgressListener) -> None:
    """Creates all other objects that do not exist yet. Neither waits nor cleans up.

    Safe to run concurrently; if one program is killed midway, the next completes the work.
    """
    objects = [manifests.token_secret(spec, secrets.token_urlsafe(32))]
    if spec.gateway.install_monarch:
        objects.append(manifests.wheel_secret(spec, packed_wheel()))
    objects += manifests.gateway_objects(spec)
    objects += [obj for mesh in spec.meshes for obj in manifests.mesh_objects(spec, mesh)]
    for obj in manifests.owned_by(parent, objects):
        try:
            if (created := _create_in_served_version(api, spec, obj)) is not None:
                listener.created(created)
        except (Forbidden, NotFound) as error:
            if obj["kind"] not in manifests.OPTIONAL_KINDS:
                raise
            warnings.warn(
                f"job {spec.name!r} has no {obj['kind']}, so draining a node may evict its gateway and end its "
                f"sessions: {error}",
                stacklevel=2,
            )


def _create_in_served_version(api: Api, spec: JobSpec, obj: Object) -> Object | None:
    """Creates ``obj`` unless it exists, in the version that older clusters serve if they do not have its own; a Role of
    a user who may not grant the rule that it can do without, without it."""
    try:
        return _create_or_keep(api, spec, obj)
    except Forbidden:
        if manifests.EVENTS_RULE not in obj.get("rules", ()):
            raise
        rules = [rule for rule in obj["rules"] if rule != manifests.EVENTS_RULE]
        return _create_or_keep(api, spec, {**obj, "rules": rules})
    except NotFound:
        version = manifests.OLDER_VERSIONS.get(obj["kind"])
        if version is None:
            raise
        older = {**obj, "apiVersion": version}
        with contextlib.suppress(Conflict):  # another program that starts this job has created it
            return api.create(older)
        return None


def _create_or_keep(api: Api, spec: JobSpec, obj: Object) -> Object | None:
    try:
        return api.create(obj)
    except Conflict:
        kind, name = obj["kind"], obj["metadata"]["name"]
        existing = api.get(kind, name, spec.namespace)["metadata"]
        (parent,) = obj["metadata"]["ownerReferences"]
        if parent["uid"] in _owners(existing):
            return None
        if (existing.get("labels") or {}).get(JOB_LABEL) != spec.name:
            raise Conflict(
                f"{kind} {name!r} in namespace {spec.namespace!r} exists and does not belong to job {spec.name!r}: "
                "choose another name for the job"
            ) from None
        _delete_earlier(api, kind, name, spec.namespace, existing["uid"])
        return _create_or_keep(api, spec, obj)  # a conflict again if the answer is lost and the request repeated


def _delete_earlier(api: Api, kind: str, name: str, namespace: str, uid: str) -> None:
    """Deletes an object of an earlier job of this name, whose parent was deleted without it."""
    with contextlib.suppress(NotFound):
        api.delete(kind, name, namespace, propagation="Foreground", uid=uid)
    with Observer(api, namespace, [WatchTarget(kind)]) as observer:
        gone = observer.wait_for(
            lambda: all(each["metadata"]["uid"] != uid for each in observer.objects(kind)), DELETE_TIMEOUT
        )
    if not gone:
        raise Rejected(f"{kind} {name!r} of an earlier job was deleted, but still exists after {DELETE_TIMEOUT:g} s")


def read_spec(api: Api, name: str, namespace: str) -> tuple[JobSpec, str]:
    """The specification of the job ``name``, and the uid of its parent. Raises NotFound."""
    spec, parent = read_parent(api, name, namespace)
    return spec, str(parent["metadata"]["uid"])


def read_parent(api: Api, name: str, namespace: str) -> tuple[JobSpec, Object]:
    """The specification of the job ``name``, with the numbers of hosts that it has now, and its parent.

    Raises NotFound if it does not exist or is being deleted, ValueError if another version of meshgate created it.
    """
    parent = api.get("ConfigMap", Names(name).parent, namespace)
    if manifests.SPEC_KEY not in (parent.get("data") or {}) or "deletionTimestamp" in parent["metadata"]:
        raise NotFound(f"no job {name!r} in namespace {namespace!r}")
    return manifests.current_spec(parent), parent


@patient
def delete(api: Api, name: str, namespace: str, *, uid: str | None = None, timeout: float = DELETE_TIMEOUT) -> None:
    """Deletes the job and returns when nothing of it is left. Does nothing if it does not exist.

    With ``uid``, deletes only the job with that parent. Raises Rejected if objects remain and none of them has gone for
    ``timeout`` seconds: the cluster's own controllers delete only some pods per second.
    """
    names = Names(name)
    try:  # first of all: an interruption after this still deletes the job
        api.delete("ConfigMap", names.parent, namespace, propagation="Foreground", uid=uid)
    except NotFound:
        if uid is not None:
            return
        _delete_leftovers(api, names, namespace)
    if api.serves("MonarchMesh"):
        with contextlib.suppress(Forbidden):  # then the garbage collector alone deletes them
            _delete_meshes_of_operator(api, names, namespace, uid)
    gone = wait_gone(api, name, namespace, timeout)
    deadline = time.monotonic() + (timeout if gone else 0)
    delay = FIRST_DELAY
    while remaining := [each for kind in _kinds(api) for each in _remaining(api, kind, namespace, names.selector())]:
        if time.monotonic() > deadline:
            raise Rejected(
                f"job {name!r} was deleted, but these objects still exist, and none has gone for {timeout:g} s: "
                f"{_some(remaining)}. Check for finalizers and unreachable nodes"
            )
        time.sleep(delay)  # between two requests: watching needs permissions that deleting does not
        delay = min(2 * delay, LONGEST_DELAY)


def _kinds(api: Api) -> list[str]:
    optional = ["MonarchMesh", *manifests.OPTIONAL_KINDS]
    return [*_EVERY_KIND, *(kind for kind in optional if api.serves(kind))]


def _remaining(api: Api, kind: str, namespace: str, selector: str) -> list[str]:
    try:
        return [f"{kind} {obj['metadata']['name']}" for obj in api.list_objects(kind, namespace, selector)[0]]
    except Forbidden:  # a user who may not list the kind has not created objects of it
        return []


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES} more"


def wait_gone(api: Api, name: str, namespace: str, timeout: float = DELETE_TIMEOUT) -> bool:
    """Waits until the parent and the pods of a job that is being deleted are gone. Returns False if some remain, and
    none has gone for ``timeout`` seconds."""
    sources = [WatchTarget(kind, Names(name).selector()) for kind in ("ConfigMap", "Pod")]
    forced: set[str] = set()
    stuck: list[Object] = []
    fewest, since = math.inf, time.monotonic()
    with Observer(api, namespace, sources) as observer:

        def gone_or_stuck() -> bool:
            nonlocal fewest, since, stuck
            pods = observer.objects("Pod")
            left = len(pods) + len(observer.objects("ConfigMap"))
            if left < fewest:
                fewest, since = left, time.monotonic()
            stuck = [pod for pod in pods if _is_stuck(pod) and pod["metadata"]["uid"] not in forced]
            return left == 0 or bool(stuck)

        while True:
            if observer.wait_for(gone_or_stuck, since + timeout - time.monotonic()):
                if not stuck:
                    return True
                for pod in stuck:  # not in the condition: the more time that takes, the later it is evaluated again
                    metadata = pod["metadata"]
                    forced.add(metadata["uid"])
                    with contextlib.suppress(NotFound, Forbidden):
                        api.delete("Pod", metadata["name"], namespace, uid=metadata["uid"], grace=0)
            elif time.monotonic() >= since + timeout:
                return False


def _is_stuck(pod: Object) -> bool:
    """Whether the pod is terminating and has no running containers. The kubelet of its node would delete it, but in
    older clusters only every ten seconds."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return (
        "deletionTimestamp" in pod["metadata"]
        and bool(pod["spec"].get("nodeName"))
        and not any("running" in each.get("state", {}) for each in statuses)
    )


def _delete_leftovers(api: Api, names: Names, namespace: str) -> None:
    """Deletes the objects of a job whose parent was deleted with ``--cascade=orphan``."""
    for kind in _kinds(api):
        _delete_each(api, api.list_objects(kind, namespace, names.selector())[0])


def _delete_meshes_of_operator(api: Api, names: Names, namespace: str, parent: str | None) -> None:
    """Deletes the job's MonarchMeshes, and the StatefulSets that the operator made of them.

    ``parent``: only those of the job whose parent has this uid. The garbage collector would be late: it learns of a new
    kind within half a minute, and objects of it that it tried to look up before it retries with delays that double, up
    to a quarter of an hour.
    """
    selector = names.selector()
    meshes = [
        mesh
        for mesh in api.list_objects("MonarchMesh", namespace, selector)[0]
        if parent is None or parent in _owners(mesh["metadata"])
    ]
    uids = {mesh["metadata"]["uid"] for mesh in meshes}
    sets = api.list_objects("StatefulSet", namespace, selector)[0]
    _delete_each(api, [*meshes, *(each for each in sets if uids & _owners(each["metadata"]))])


def _owners(metadata: Object) -> set[str]:
    return {owner["uid"] for owner in metadata.get("ownerReferences") or ()}


def _delete_each(api: Api, found: Iterable[Object]) -> None:
    for obj in found:
        metadata = obj["metadata"]
        with contextlib.suppress(NotFound, Conflict):
            api.delete(obj["kind"], metadata["name"], metadata["namespace"], uid=metadata["uid"])
