"""Makes a job in a cluster, finds it and ends it.

The client does this with the user's kubeconfig, a gateway with its service account. Both are told how it goes
through a ``Listener``; nothing is printed here. ``readiness`` waits for what was made.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence

from meshgate_kubernetes import manifests
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import Conflict, Forbidden, KubernetesError, NotFound, Refused
from meshgate_kubernetes.names import JOB_LABEL, Names
from meshgate_kubernetes.observe import Observer, Source
from meshgate_kubernetes.readiness import Listener
from meshgate_kubernetes.spec import JobSpec, Object

__all__ = ["create_owned", "create_parent", "delete", "read_parent", "read_spec", "wait_gone"]

DELETE_TIMEOUT = 120.0
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


def create_parent(api: Api, spec: JobSpec, owner: str = "") -> Object:
    """Makes the job's parent, which all else will belong to. Conflict when there is a job of this name.

    An interruption leaves none, wherever it comes.
    """
    attempt = secrets.token_hex(8)
    try:
        return api.create(manifests.parent(spec, owner, attempt))
    except (Conflict, Forbidden, NotFound):
        raise
    except BaseException:  # the API server may have made it all the same
        with contextlib.suppress(KubernetesError):
            made = api.get("ConfigMap", Names(spec.name).parent, spec.namespace)
            if (made["metadata"].get("annotations") or {}).get(manifests.ATTEMPT_ANNOTATION) == attempt:
                api.delete("ConfigMap", made["metadata"]["name"], spec.namespace, uid=made["metadata"]["uid"])
        raise


def create_owned(api: Api, spec: JobSpec, parent: Object, listener: Listener) -> None:
    """Makes everything else that is not there yet. Does not wait, and does not clean up.

    Two programs may do so at once, and one may go on where another was killed: what there is of the job stays.
    """
    listener.created(parent)
    objects = [manifests.token_secret(spec, secrets.token_urlsafe(32)), *manifests.gateway_objects(spec)]
    objects += [obj for mesh in spec.meshes for obj in manifests.mesh_objects(spec, mesh)]
    for obj in manifests.owned_by(parent, objects):
        listener.created(_create_or_take(api, spec, obj))


def _create_or_take(api: Api, spec: JobSpec, obj: Object) -> Object:
    try:
        return api.create(obj)
    except Conflict:
        kind, name = obj["kind"], obj["metadata"]["name"]
        existing = api.get(kind, name, spec.namespace)["metadata"]
        (parent,) = obj["metadata"]["ownerReferences"]
        if any(owner["uid"] == parent["uid"] for owner in existing.get("ownerReferences") or []):
            return obj
        if (existing.get("labels") or {}).get(JOB_LABEL) != spec.name:
            raise Conflict(
                f"{kind} {name!r} in namespace {spec.namespace!r} exists already and is not of job {spec.name!r}: "
                "choose another name for the job"
            ) from None
        return _replace(api, obj, existing["uid"])


def _replace(api: Api, obj: Object, uid: str) -> Object:
    """Makes ``obj`` in the place of what a job of this name left, whose parent was deleted without it."""
    kind, name, namespace = obj["kind"], obj["metadata"]["name"], obj["metadata"]["namespace"]
    with contextlib.suppress(NotFound):
        api.delete(kind, name, namespace, propagation="Foreground", uid=uid)
    with Observer(api, namespace, [Source(kind)]) as seen:
        gone = seen.wait_for(lambda: all(each["metadata"]["uid"] != uid for each in seen.objects(kind)), DELETE_TIMEOUT)
    if not gone:
        raise Refused(f"{kind} {name!r}, left by an earlier job, was deleted, but is there after {DELETE_TIMEOUT:g} s")
    return api.create(obj)


def read_spec(api: Api, name: str, namespace: str) -> tuple[JobSpec, str]:
    """The specification of the job ``name``, and the uid of its parent. NotFound when there is none."""
    spec, parent = read_parent(api, name, namespace)
    return spec, str(parent["metadata"]["uid"])


def read_parent(api: Api, name: str, namespace: str) -> tuple[JobSpec, Object]:
    """The specification of the job ``name``, and its parent. NotFound when there is none or it is going, ValueError
    when another version of meshgate made it."""
    parent = api.get("ConfigMap", Names(name).parent, namespace)
    text = (parent.get("data") or {}).get(manifests.SPEC_KEY)
    if text is None or "deletionTimestamp" in parent["metadata"]:
        raise NotFound(f"there is no job {name!r} in namespace {namespace!r}")
    return JobSpec.model_validate(json.loads(text)), parent


def delete(api: Api, name: str, namespace: str, *, uid: str | None = None, timeout: float = DELETE_TIMEOUT) -> None:
    """Ends the job and returns when nothing of it is left; harmless when there is nothing.

    With ``uid`` only the job with that parent. Raises Refused when something is still there after ``timeout``.
    """
    names = Names(name)
    try:  # before anything else is asked: who is interrupted from here on has ended the job all the same
        api.delete("ConfigMap", names.parent, namespace, propagation="Foreground", uid=uid)
    except NotFound:
        if uid is not None:
            return
        _delete_leftovers(api, names, namespace)
    wait_gone(api, name, namespace, timeout)
    left = [name for kind in _kinds(api) for name in _names_left(api, kind, namespace, names.selector())]
    if left:
        raise Refused(
            f"job {name!r} was deleted, but after {timeout:g} s this is still there: {', '.join(left)}. "
            "A finalizer or an unreachable node may hold it back"
        )


def _kinds(api: Api) -> list[str]:
    return [*_EVERY_KIND, *(["MonarchMesh"] if api.serves("MonarchMesh") else [])]


def _names_left(api: Api, kind: str, namespace: str, selector: str) -> list[str]:
    try:
        return [f"{kind} {obj['metadata']['name']}" for obj in api.find(kind, namespace, selector)[0]]
    except Forbidden:  # whoever may not see it has not made it
        return []


def wait_gone(api: Api, name: str, namespace: str, timeout: float = DELETE_TIMEOUT) -> None:
    """Returns when the parent and the pods of a job that is being deleted are gone, or after ``timeout`` seconds."""
    sources = [Source(kind, Names(name).selector()) for kind in ("ConfigMap", "Pod")]
    with Observer(api, namespace, sources) as seen:

        def gone() -> bool:
            _bury(api, namespace, seen.objects("Pod"))
            return not seen.objects("ConfigMap") and not seen.objects("Pod")

        seen.wait_for(gone, timeout)


def _bury(api: Api, namespace: str, pods: Sequence[Object]) -> None:
    """Removes pods that are being deleted and of which nothing runs any more.

    The kubelet would do so itself, but one of an older cluster only looks every ten seconds.
    """
    for pod in pods:
        metadata, statuses = pod["metadata"], pod.get("status", {}).get("containerStatuses") or []
        if "deletionTimestamp" in metadata and not any("running" in each.get("state", {}) for each in statuses):
            with contextlib.suppress(NotFound, Forbidden):
                api.delete("Pod", metadata["name"], namespace, uid=metadata["uid"], grace=0)


def _delete_leftovers(api: Api, names: Names, namespace: str) -> None:
    """Objects of a job whose parent is gone: someone deleted that with ``--cascade=orphan``."""
    for kind in _kinds(api):
        for obj in api.find(kind, namespace, names.selector())[0]:
            try:
                api.delete(kind, obj["metadata"]["name"], namespace)
            except (NotFound, Conflict):
                continue
