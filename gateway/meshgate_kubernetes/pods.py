"""The pod templates of workers and gateway, rendered from data alone.

Both pass the "restricted" pod security profile: not root, no privileges, no capabilities, the runtime's
seccomp profile. A raw ``pod_spec`` may relax that, and then says so itself.
"""

from __future__ import annotations

from meshgate_kubernetes.names import COMPONENT_LABEL, JOB_LABEL, MESH_LABEL, Names
from meshgate_kubernetes.spec import GPU_RESOURCE, GPU_TYPE_LABEL, JobSpec, MeshSpec, Object, WorkerSpec

__all__ = ["GATEWAY_PORT", "gateway_template", "job_labels", "worker_labels", "worker_template"]

GATEWAY_PORT = 8650
_USER = 1000
_HOME = "/home/meshgate"

# A worker image need not know meshgate: torchmonarch is enough. Without meshgate_worker Monarch's own loop
# runs in a child, because the first process of a container ignores a SIGTERM that it has no handler for, and
# Monarch's loop never comes back to Python to run one.
WORKER_BOOTSTRAP = """\
import importlib.util, os, signal, sys
address = sys.argv[1]
if importlib.util.find_spec("meshgate_worker"):
    os.execv(sys.executable, [sys.executable, "-u", "-m", "meshgate_worker", "--address", address,
              "--name", os.environ.get("POD_NAME", "worker")])
if not importlib.util.find_spec("monarch"):
    sys.exit("this image holds neither meshgate[worker] nor torchmonarch: pip install one of them into it")
child = os.fork()
if child:
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=address, ca="trust_all_connections")
"""


def job_labels(spec: JobSpec, component: str) -> dict[str, str]:
    return {
        JOB_LABEL: spec.name,
        COMPONENT_LABEL: component,
        "app.kubernetes.io/managed-by": "meshgate",
    }


def worker_labels(spec: JobSpec, mesh: MeshSpec) -> dict[str, str]:
    return {**job_labels(spec, "worker"), MESH_LABEL: mesh.name}


def worker_template(spec: JobSpec, mesh: MeshSpec) -> Object:
    """The pod template of a mesh that is made for the job."""
    worker = mesh.worker
    assert worker is not None, mesh
    labels = worker_labels(spec, mesh)
    if worker.template is not None:
        return _labelled(worker.template, labels)
    pod = _overlaid(_worker_pod(mesh, worker), worker.pod_spec)
    return {
        "metadata": _without_empty({"labels": {**worker.labels, **labels}, "annotations": dict(worker.annotations)}),
        "spec": pod,
    }


def _worker_pod(mesh: MeshSpec, worker: WorkerSpec) -> Object:
    selector = dict(worker.node_selector)
    if worker.gpu_type is not None:
        key, equals, value = worker.gpu_type.partition("=")
        selector.setdefault(*((key, value) if equals else (GPU_TYPE_LABEL, worker.gpu_type)))
    volumes, mounts = _volumes(worker)
    return _without_empty(
        {
            "containers": [_worker_container(mesh, worker, mounts)],
            "volumes": volumes,
            "nodeSelector": selector,
            "tolerations": list(worker.tolerations),
            "priorityClassName": worker.priority_class_name,
            "serviceAccountName": worker.service_account_name,
            # A worker runs the user's code, which has no business with the API unless it was given an account.
            "automountServiceAccountToken": worker.service_account_name is not None,
            "imagePullSecrets": [{"name": name} for name in worker.image_pull_secrets],
            "securityContext": {} if worker.fuse else _pod_security(),
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 10,
        }
    )


def _worker_container(mesh: MeshSpec, worker: WorkerSpec, mounts: list[Object]) -> Object:
    address = f"tcp://$(POD_IP):{mesh.port}@tcp://0.0.0.0:{mesh.port}"
    variables = {"MONARCH_PORT": str(mesh.port), **worker.env_vars}
    return _without_empty(
        {
            "name": "worker",
            "image": worker.image,
            "imagePullPolicy": worker.image_pull_policy,
            "command": ["python", "-u", "-c", WORKER_BOOTSTRAP, address],
            "env": [
                _from_field("POD_IP", "status.podIP"),
                _from_field("POD_NAME", "metadata.name"),
                _from_field("POD_NAMESPACE", "metadata.namespace"),
                *({"name": name, "value": value} for name, value in variables.items()),
            ],
            "envFrom": [{"secretRef": {"name": name}} for name in worker.secrets],
            "ports": [{"name": "monarch", "containerPort": mesh.port, "protocol": "TCP"}],
            "readinessProbe": {"tcpSocket": {"port": mesh.port}, "periodSeconds": 1, "failureThreshold": 2},
            "resources": _resources(worker),
            "volumeMounts": mounts,
            "securityContext": {"privileged": True} if worker.fuse else _container_security(),
        }
    )


def _resources(worker: WorkerSpec) -> Object:
    """Memory, disk and devices are requested and limited alike; cpu is requested only, so that an idle node
    may be used and nobody is throttled."""
    limits = {
        **({"memory": worker.memory} if worker.memory else {}),
        **({"ephemeral-storage": worker.disk_size} if worker.disk_size else {}),
        **({GPU_RESOURCE: str(worker.gpus)} if worker.gpus else {}),
        **worker.resources,
    }
    requests = {**({"cpu": worker.cpu} if worker.cpu else {}), **limits}
    return _without_empty({"requests": requests, "limits": limits})


def _volumes(worker: WorkerSpec) -> tuple[list[Object], list[Object]]:
    volumes: list[Object] = [{"name": "tmp", "emptyDir": {}}, {"name": "home", "emptyDir": {}}]
    mounts: list[Object] = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "home", "mountPath": _HOME}]
    if worker.shared_memory_limit is not None:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": worker.shared_memory_limit}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if worker.fuse:
        volumes.append({"name": "fuse", "hostPath": {"path": "/dev/fuse", "type": "CharDevice"}})
        mounts.append({"name": "fuse", "mountPath": "/dev/fuse"})
    for index, volume in enumerate(worker.volumes):
        volumes.append({"name": f"volume-{index}", **volume.source})
        mount: Object = {"name": f"volume-{index}", "mountPath": volume.mount_path}
        mounts.append({**mount, "readOnly": True} if volume.read_only else mount)
    return volumes, mounts


def gateway_template(spec: JobSpec) -> Object:
    names = Names(spec.name)
    probe = {"port": "gateway", "scheme": "HTTP"}
    container: Object = {
        "name": "gateway",
        "image": spec.gateway_image,
        "args": [
            *("--host", "0.0.0.0", "--port", str(GATEWAY_PORT)),
            *("--kubernetes-job", spec.name, "--idle-timeout", str(spec.idle_timeout)),
            *("--lease", str(spec.lease)),
        ],
        "env": [
            _from_field("MESHGATE_ENGINE_HOST", "status.podIP"),
            {
                "name": "MESHGATE_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": names.secret, "key": "token"}},
            },
        ],
        "ports": [{"name": "gateway", "containerPort": GATEWAY_PORT, "protocol": "TCP"}],
        "startupProbe": {"httpGet": {**probe, "path": "/healthz"}, "periodSeconds": 1, "failureThreshold": 120},
        "readinessProbe": {"httpGet": {**probe, "path": "/readyz"}, "periodSeconds": 1, "timeoutSeconds": 5},
        "livenessProbe": {
            "httpGet": {**probe, "path": "/healthz"},
            "periodSeconds": 10,
            "timeoutSeconds": 10,
            "failureThreshold": 6,
        },
        "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "home", "mountPath": _HOME}],
        "securityContext": {**_container_security(), "readOnlyRootFilesystem": True},
    }
    if spec.gateway_pull_policy is not None:
        container["imagePullPolicy"] = spec.gateway_pull_policy
    return {
        "metadata": {"labels": job_labels(spec, "gateway")},
        "spec": _without_empty(
            {
                "serviceAccountName": names.gateway,
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": 15,
                "securityContext": _pod_security(),
                "imagePullSecrets": [{"name": name} for name in spec.image_pull_secrets],
                "containers": [container],
                "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "home", "emptyDir": {}}],
            }
        ),
    }


def _pod_security() -> Object:
    return {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _container_security() -> Object:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _from_field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _labelled(template: Object, labels: dict[str, str]) -> Object:
    metadata = dict(template.get("metadata") or {})
    return {**template, "metadata": {**metadata, "labels": {**(metadata.get("labels") or {}), **labels}}}


def _overlaid(pod: Object, raw: Object) -> Object:
    """``pod`` with the fields of ``raw`` laid over it.

    Mappings are merged key by key, lists replaced, but for those whose items have names (containers, volumes,
    environment, mounts), where an item replaces or completes the one of its name.
    """
    return _merged(pod, raw) if raw else pod


def _merged(base: object, over: object) -> Object:
    assert isinstance(base, dict)
    assert isinstance(over, dict)
    result = dict(base)
    for key, value in over.items():
        mine = result.get(key)
        if isinstance(value, dict) and isinstance(mine, dict):
            result[key] = _merged(mine, value)
        elif isinstance(value, list) and isinstance(mine, list) and _all_named(value) and _all_named(mine):
            result[key] = _merged_by_name(mine, value)
        else:
            result[key] = value
    return result


def _all_named(items: list[object]) -> bool:
    return all(isinstance(item, dict) and "name" in item for item in items)


def _merged_by_name(base: list[Object], over: list[Object]) -> list[Object]:
    result = {item["name"]: item for item in base}
    for item in over:
        name = item["name"]
        result[name] = _merged(result[name], item) if name in result else item
    return list(result.values())


def _without_empty(fields: Object) -> Object:
    return {key: value for key, value in fields.items() if value not in (None, [], {})}
