"""Whether the nodes of a cluster can pull the images of a job: each is pulled, by a pod that ends at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import NotFound
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
    end; those of a process that is killed end after ``timeout`` seconds.
    """
    pods = {pod["spec"]["containers"][0]["image"]: pod for pod in _pods(spec, timeout)}
    with contextlib.ExitStack() as made:
        for pod in pods.values():
            uid = api.create(pod)["metadata"]["uid"]
            made.callback(_delete, api, pod, uid)
        return _wait(api, {image: pod["metadata"]["name"] for image, pod in pods.items()}, spec.namespace, timeout)


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


def _delete(api: Api, pod: Object, uid: str) -> None:
    with contextlib.suppress(NotFound):  # others may have
        api.delete("Pod", pod["metadata"]["name"], pod["metadata"]["namespace"], uid=uid)


def _wait(api: Api, names: dict[str, str], namespace: str, timeout: float) -> dict[str, str]:
    """A problem counts once it has lasted as long as it would when a job starts."""
    started = time.monotonic()
    begun: dict[tuple[str, str], float] = {}
    found: dict[str, str] = {}
    while len(found) < len(names):
        time.sleep(LOOK_EVERY)
        now = time.monotonic()
        for image, name in names.items():
            pod = api.get("Pod", name, namespace)
            if _was_pulled(pod):
                found.setdefault(image, "")
                continue
            events = api.list_objects("Event", namespace, fields=f"involvedObject.uid={pod['metadata']['uid']}")[0]
            problems = examine_pod(pod, events).problems
            lasting = [each for each in problems if _lasts(each, begun.setdefault(each.key, now), now)]
            if lasting or now - started > timeout:
                reasons = "; ".join(map(str, lasting or problems)) or f"it was not pulled within {timeout:g} s"
                found.setdefault(image, reasons)
    return found


def _lasts(problem: Problem, begun: float, now: float) -> bool:
    return problem.timeout is not None and now - begun >= problem.timeout


def _was_pulled(pod: Object) -> bool:
    """Whether a container has begun; ``true`` may be missing in the image."""
    states = [each.get("state", {}) for each in pod.get("status", {}).get("containerStatuses") or []]
    return any("running" in state or "terminated" in state for state in states)
