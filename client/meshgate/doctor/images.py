"""Whether the nodes of a cluster can pull the images of a job: each is pulled, by a pod that ends at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import NotFound, Unreachable
from meshgate_kubernetes.manifests.names import Names
from meshgate_kubernetes.manifests.pods import gateway_template, worker_template
from meshgate_kubernetes.manifests.spec import JobSpec, Object
from meshgate_kubernetes.status.diagnosis import Problem, examine_pod

TIMEOUT = 600.0  # seconds; an image of many GB takes minutes
LOOK_EVERY = 0.5
LABEL = "meshgate.dev/doctor"
_PLACEMENT = ("nodeSelector", "tolerations", "affinity", "imagePullSecrets", "serviceAccountName", "securityContext")
_AMOUNTS = {"cpu": "10m", "memory": "64Mi"}  # quotas may require them; those of the job are another check


def check_pulls(api: Api, spec: JobSpec, timeout: float = TIMEOUT) -> dict[str, str]:
    """Why a node cannot pull an image, for each image of the job; "" if it can. Raises KubernetesError.

    The pods have the placement, pull secrets and rights of the job's pods, but not their GPUs. They are deleted in the
    end, by names derived from that of ``spec``, which must be new. A process that is killed leaves them: those that a
    node has accepted end after ``timeout`` seconds, and all stay until they are deleted by their label.
    """
    pods = {pod["spec"]["containers"][0]["image"]: pod for pod in _pods(spec, timeout)}
    with contextlib.ExitStack() as made:
        for pod in pods.values():
            made.callback(_delete, api, pod)  # first: an interrupted request may have created it
            api.create(pod)
        return _wait(api, pods, timeout)


def _pods(spec: JobSpec, timeout: float) -> Iterator[Object]:
    names = Names(spec.name)
    gateway = gateway_template(spec)
    if spec.gateway.service_account_name is None:
        del gateway["spec"]["serviceAccountName"]  # the job creates it
    yield _pod(spec, f"{names.gateway}-image", gateway["spec"], timeout)
    for mesh in spec.meshes:
        yield _pod(spec, f"{names.mesh(mesh.name)}-image", worker_template(spec, mesh)["spec"], timeout)


def _pod(spec: JobSpec, name: str, job_pod: Object, timeout: float) -> Object:
    of_job = job_pod["containers"][0]
    container = {key: of_job[key] for key in ("name", "image", "imagePullPolicy", "securityContext") if key in of_job}
    resources = {"requests": _AMOUNTS, "limits": _AMOUNTS}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": spec.namespace, "labels": {LABEL: spec.name}},
        "spec": {
            **{key: job_pod[key] for key in _PLACEMENT if key in job_pod},
            "containers": [{**container, "command": ["true"], "resources": resources}],
            "restartPolicy": "Never",
            "activeDeadlineSeconds": int(timeout) + 60,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
        },
    }


def _delete(api: Api, pod: Object) -> None:
    with contextlib.suppress(NotFound):  # it was not created, or others have deleted it
        api.delete("Pod", pod["metadata"]["name"], pod["metadata"]["namespace"])


def _wait(api: Api, pods: Mapping[str, Object], timeout: float) -> dict[str, str]:
    """A problem counts once it has lasted as long as it would when a job starts."""
    started = time.monotonic()
    begun: dict[tuple[str, str], float] = {}
    found: dict[str, str] = {}
    while len(found) < len(pods):
        time.sleep(LOOK_EVERY)
        now = time.monotonic()
        timed_out = now - started > timeout
        try:
            seen = {image: _problems(api, pod) for image, pod in pods.items() if image not in found}
        except Unreachable:
            if timed_out:
                raise
            continue
        begun = {each.key: begun.get(each.key, now) for problems in seen.values() for each in problems or ()}
        for image, problems in seen.items():
            if problems is None:
                found[image] = ""
                continue
            lasting = [each for each in problems if each.timeout is not None and now - begun[each.key] >= each.timeout]
            if lasting or timed_out:
                reasons = "; ".join(map(str, lasting or problems))
                found[image] = reasons or f"it was not pulled within {timeout:g} s"
    return {image: found[image] for image in pods}


def _problems(api: Api, made: Object) -> Sequence[Problem] | None:
    """What keeps the image from the pod; None if it was pulled."""
    namespace = made["metadata"]["namespace"]
    pod = api.get("Pod", made["metadata"]["name"], namespace)
    if _was_pulled(pod, made["spec"]["containers"][0]["name"]):
        return None
    events = api.list_objects("Event", namespace, fields=f"involvedObject.uid={pod['metadata']['uid']}")[0]
    return examine_pod(pod, events).problems


def _was_pulled(pod: Object, container: str) -> bool:
    """Whether ``container`` has begun; ``true`` may be missing in the image. Others may have been added to the pod."""
    states = [
        each.get("state", {})
        for each in pod.get("status", {}).get("containerStatuses") or []
        if each["name"] == container
    ]
    return any("running" in state or "terminated" in state for state in states)
