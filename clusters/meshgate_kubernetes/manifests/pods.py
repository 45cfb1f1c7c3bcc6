"""The pod templates of workers and gateway. Pure.

Both satisfy the "restricted" Pod Security Standard: no root, no privileges, no capabilities, the runtime's seccomp
profile. A raw ``pod_spec`` may override that.
"""

from __future__ import annotations

from meshgate_kubernetes.manifests.names import COMPONENT_LABEL, ENGINES, FORWARDER, JOB_LABEL, MESH_LABEL, Names
from meshgate_kubernetes.manifests.spec import (
    GPU_RESOURCE,
    GPU_TYPE_LABEL,
    GatewaySpec,
    JobSpec,
    MeshSpec,
    Object,
    Spot,
    WorkerSpec,
)
from meshgate_processes.marks import SYNC_AGENT

GATEWAY_CONTAINER = "gateway"
INSTALL_CONTAINER = "install-monarch"
GATEWAY_PORT = 8650
METRICS_PORT = 8651
# By these labels, providers and autoscalers mark nodes that they may take back.
SPOT_LABELS = {
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/gke-preemptible": "true",
    "eks.amazonaws.com/capacityType": "SPOT",
    "karpenter.sh/capacity-type": "spot",
    "kubernetes.azure.com/scalesetpriority": "spot",
    "node.kubernetes.io/lifecycle": "spot",
}
# Cluster autoscalers must not move pods that hold sessions: what runs in them would be lost.
STAY = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
EVICTABLE = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}
SCRAPE = {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS_PORT), "prometheus.io/path": "/metrics"}
GRACE_PERIOD = 30  # seconds between the request to delete a worker's pod and SIGKILL: Kubernetes' own default
_ENDING_TIME = 3  # seconds at the end of it for what still runs then
_USER = 1000
_HOME = "/home/meshgate"
_GATEWAY_CPU = ("250m", "4")  # request, limit
_GATEWAY_MEMORY = ("512Mi", "8Gi")
_GATEWAY_DISK = "10Gi"
_FORWARDER_RESOURCES = {
    "requests": {"cpu": "100m", "memory": "128Mi"},
    "limits": {"cpu": "2", "memory": "1Gi"},
}

# A worker image needs only torchmonarch. Without meshgate_worker, Monarch's loop runs in a child process: the first
# process of a container ignores SIGTERM unless it has a handler, and Monarch's loop never returns to Python to run one.
# Monarch does not answer clients of another release, so another child reports the worker's versions to the gateway.
VERSIONS_PORT_OFFSET = 1000  # from Monarch's port
WORKER_BOOTSTRAP = f"""\
import contextlib, importlib.util, os, signal, socket, sys, time
address, ip = sys.argv[1], os.environ.get("POD_IP", "")
family, port = socket.AF_INET, address.rpartition(":")[2]
if ":" in ip:  # Kubernetes cannot put it into brackets
    family, address = socket.AF_INET6, f"tcp://[{{ip}}]:{{port}}@tcp://[::]:{{port}}"
reporter = os.fork()
if not reporter:
    import importlib.metadata, json, platform
    versions = {{"python": platform.python_version(), "monarch": ""}}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["monarch"] = importlib.metadata.version("torchmonarch")
    with contextlib.suppress(OSError, OverflowError):
        listener = socket.create_server(("", int(port) + {VERSIONS_PORT_OFFSET}), family=family)
        while True:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError), connection:
                connection.sendall(json.dumps(versions).encode() + b"\\n")
    os._exit(0)
if importlib.util.find_spec("meshgate_worker"):
    os.execv(sys.executable, [sys.executable, "-u", "-m", "meshgate_worker", "--address", address,
              "--name", os.environ.get("POD_NAME", "worker")])
if not importlib.util.find_spec("monarch"):
    sys.exit("this image contains neither meshgate[worker] nor torchmonarch: install one of them with pip, or let the "
             "pods do so: Compute(install_monarch=True)")
child = os.fork()
if child:
    last = []  # once SIGTERM has come: when the host ends although other processes of the container go on
    def read(pid, name):
        with contextlib.suppress(OSError), open(f"/proc/{{pid}}/{{name}}", "rb") as file:
            return file.read()
        return b""
    def goes_on(pid):  # a zombie does not; nothing here waits for orphans
        here = read(pid, "cgroup") == read("self", "cgroup")  # pods may share their process namespace
        here = here and read(pid, "comm").strip() != {SYNC_AGENT.encode()!r}  # each session has one
        return here and read(pid, "stat").rpartition(b")")[2].split()[:1] not in ([], [b"Z"], [b"X"])
    def end(number, frame):
        last[:] = last or [time.monotonic() + float(os.environ.get("MESHGATE_WORKER_NOTICE", 0))]
        others = set(filter(str.isdigit, os.listdir("/proc"))) - {{str(os.getpid()), str(reporter), str(child)}}
        if time.monotonic() >= last[0] or not any(map(goes_on, others)):
            os.kill(child, signal.SIGTERM)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGALRM, end)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
from monarch.actor import run_worker_loop_forever
from monarch._src.job import service_identity
if hasattr(service_identity, "service_proc_id_from_uuid"):  # Monarch 0.8: clients attach by identity
    uid = service_identity.service_proc_id_from_uuid(os.environ["MONARCH_POD_UID"])
    address = service_identity.service_proc_addr(address, uid)
run_worker_loop_forever(address=address, ca="trust_all_connections")
"""

MONARCH_REQUIREMENT = "torchmonarch==0.7.*"  # as in the gateway's image: both ends of a connection need one release
_TARGET = "/opt/monarch"
# Some systems have a second directory for packages with machine code.
PYTHONPATH = f"{_TARGET}/packages-0:{_TARGET}/packages-1"

PACKED_WHEEL = "meshgate.whl.bz2"  # the key of the Secret
_WHEEL_DIRECTORY = "/opt/meshgate-wheel"

# pip has no option to install into a given directory what is missing only (--target repeats what the image has), and
# the layout below --prefix depends on the distribution, so the directories are found afterwards.
_INSTALL = """\
import bz2, glob, os, subprocess, sys, tempfile, zipfile
target, *requirements = sys.argv[1:]
requirement = requirements[0]
if requirements[1:]:  # pip takes the version of a wheel from its file name
    packed = bz2.open(requirements.pop())
    info = next(name for name in zipfile.ZipFile(packed).namelist() if ".dist-info/" in name)
    wheel = os.path.join(tempfile.mkdtemp(), info.partition(".dist-info/")[0] + "-py3-none-any.whl")
    packed.seek(0)
    with open(wheel, "wb") as file:
        file.write(packed.read())
    requirements.append(wheel + "[gateway]")
options = ["--no-cache-dir", "--disable-pip-version-check", "--no-warn-script-location", "--prefix", target]
if subprocess.run([sys.executable, "-m", "pip", "install", *options, *requirements]).returncode:
    sys.exit(f"cannot install {requirement} in this image: if pods do not reach PyPI, name an index that they reach "
             "with Compute(env_vars={'PIP_INDEX_URL': ...}), or use an image that contains torchmonarch")
for index, found in enumerate(sorted(glob.glob(f"{target}/**/*-packages", recursive=True))):
    link = f"{target}/packages-{index}"
    if not os.path.islink(link):
        os.symlink(found, link)
"""


# The installation of torchmonarch in worker pods whose image does not contain it, before their worker starts.
#
# An init container of the worker's own image installs it, with what it depends on and the image lacks, into a volume of
# the pod. Packages of the image are neither repeated nor replaced, whether they are in the system's directories, in a
# virtual environment or in conda's.


def install_container(container: Object) -> Object:
    """The init container for a worker's or gateway's ``container``, with its image, environment, volumes and rights."""
    same = ("image", "imagePullPolicy", "envFrom", "volumeMounts", "securityContext")
    environment = [each for each in container["env"] if each["name"] not in ("PYTHONPATH", "MESHGATE_TOKEN")]
    resources = container.get("resources", {})
    return {
        "name": INSTALL_CONTAINER,
        **{key: container[key] for key in same if key in container},
        "command": ["python", "-u", "-c", _INSTALL, _TARGET, MONARCH_REQUIREMENT],
        "env": environment,
        # Quotas may require them; devices are for the worker alone.
        "resources": {kind: _without_devices(amounts) for kind, amounts in resources.items()},
    }


def _without_devices(amounts: dict[str, str]) -> dict[str, str]:
    return {name: amount for name, amount in amounts.items() if "/" not in name}


def job_labels(spec: JobSpec, component: str) -> dict[str, str]:
    return {
        JOB_LABEL: spec.name,
        COMPONENT_LABEL: component,
        "app.kubernetes.io/managed-by": "meshgate",
    }


def recommended_labels(spec: JobSpec) -> dict[str, str]:
    """Kubernetes' recommended labels, which the user's take precedence over."""
    return {"app.kubernetes.io/name": "meshgate", "app.kubernetes.io/instance": spec.name}


def worker_labels(spec: JobSpec, mesh: MeshSpec) -> dict[str, str]:
    return {**job_labels(spec, "worker"), MESH_LABEL: mesh.name}


def worker_template(spec: JobSpec, mesh: MeshSpec) -> Object:
    """The pod template of a mesh whose pods are created for the job."""
    worker = mesh.worker
    assert worker is not None, mesh
    labels = worker_labels(spec, mesh)
    if worker.template is not None:
        return _labelled(_with_command(worker.template, mesh), labels)
    pod = _overlaid(_worker_pod(mesh, worker), worker.pod_spec)
    recommended = recommended_labels(spec) if mesh.way == "statefulset" else {}  # the operator sets its own name
    labels = {**recommended, **worker.labels, **labels}
    return {
        "metadata": {"labels": labels, "annotations": {**STAY, **worker.annotations}},
        "spec": pod,
    }


def _worker_pod(mesh: MeshSpec, worker: WorkerSpec) -> Object:
    selector = dict(worker.node_selector)
    if worker.gpu_type is not None:
        key, equals, value = worker.gpu_type.partition("=")
        selector.setdefault(*((key, value) if equals else (GPU_TYPE_LABEL, worker.gpu_type)))
    volumes, mounts = _volumes(worker)
    container = _worker_container(mesh, worker, mounts)
    return _without_empty(
        {
            "initContainers": [install_container(container)] if worker.install_monarch else [],
            "containers": [container],
            "volumes": volumes,
            "nodeSelector": selector,
            "tolerations": list(worker.tolerations),
            "affinity": _spot_affinity(worker.spot or "allow"),
            "priorityClassName": worker.priority_class_name,
            "serviceAccountName": worker.service_account_name,
            # User code gets no access to the API unless the user names a service account.
            "automountServiceAccountToken": worker.service_account_name is not None,
            "imagePullSecrets": [{"name": name} for name in worker.image_pull_secrets],
            "securityContext": {} if worker.fuse else _pod_security(),
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_PERIOD,
        }
    )


def _with_command(template: Object, mesh: MeshSpec) -> Object:
    """``template`` with the worker's command and variables in the container that has none: the only one, or the one
    named ``worker``."""
    containers: list[Object] = template["spec"].get("containers") or []
    worker = next((each for each in containers if len(containers) == 1 or each.get("name") == "worker"), None)
    if worker is None or worker.get("command") or worker.get("args"):
        return template
    named = {each["name"] for each in worker.get("env") or []}
    variables = {"MONARCH_PORT": str(mesh.port), **_notice(template["spec"])}
    own = [each for each in _worker_variables(variables) if each["name"] not in named]
    started = {**worker, "command": _worker_command(mesh), "env": [*own, *(worker.get("env") or [])]}
    changed = [started if each is worker else each for each in containers]
    return {**template, "spec": {**template["spec"], "containers": changed}}


def _worker_command(mesh: MeshSpec) -> list[str]:
    address = f"tcp://$(POD_IP):{mesh.port}@tcp://0.0.0.0:{mesh.port}"
    return ["python", "-u", "-c", WORKER_BOOTSTRAP, address]


def _notice(pod: Object) -> dict[str, str]:
    """How long the processes of a worker may go on after the SIGTERM to it. Older workers ignore it, unlike a flag."""
    grace = pod.get("terminationGracePeriodSeconds")
    return {"MESHGATE_WORKER_NOTICE": str(max(0, (GRACE_PERIOD if grace is None else int(grace)) - _ENDING_TIME))}


def _worker_variables(more: dict[str, str]) -> list[Object]:
    return [
        _from_field("POD_IP", "status.podIP"),
        _from_field("POD_NAME", "metadata.name"),
        _from_field("MONARCH_POD_UID", "metadata.uid"),
        _from_field("POD_NAMESPACE", "metadata.namespace"),
        *({"name": name, "value": value} for name, value in more.items()),
    ]


def _worker_container(mesh: MeshSpec, worker: WorkerSpec, mounts: list[Object]) -> Object:
    # In images of others, the user has no home.
    variables = {"MONARCH_PORT": str(mesh.port), "HOME": _HOME, **_notice(worker.pod_spec or {}), **worker.env_vars}
    if worker.install_monarch:
        variables["PYTHONPATH"] = ":".join(filter(None, (variables.get("PYTHONPATH"), PYTHONPATH)))
    return _without_empty(
        {
            "name": "worker",
            "image": worker.image,
            "imagePullPolicy": worker.image_pull_policy,
            "command": _worker_command(mesh),
            "env": _worker_variables(variables),
            "envFrom": [{"secretRef": {"name": name}} for name in worker.secrets],
            "ports": [{"name": "monarch", "containerPort": mesh.port, "protocol": "TCP"}],
            "readinessProbe": {"tcpSocket": {"port": mesh.port}, "periodSeconds": 1, "failureThreshold": 2},
            "resources": _resources(worker),
            "volumeMounts": mounts,
            "securityContext": {"privileged": True}
            if worker.fuse
            else {**_container_security(), "readOnlyRootFilesystem": True},
        }
    )


def _resources(worker: WorkerSpec) -> Object:
    """Requests and limits are equal for memory, disk and devices. CPU has only a request, so pods may use idle CPUs
    and are never throttled, unless the namespace asks for a limit."""
    limits = {
        **({"cpu": worker.cpu} if worker.cpu and worker.cpu_is_limit else {}),
        **({"memory": worker.memory} if worker.memory else {}),
        **({"ephemeral-storage": worker.disk_size} if worker.disk_size else {}),
        **({GPU_RESOURCE: str(worker.gpus)} if worker.gpus else {}),
        **worker.resources,
    }
    requests = {**({"cpu": worker.cpu} if worker.cpu else {}), **limits}
    return _without_empty({"requests": requests, "limits": limits})


def _volumes(worker: WorkerSpec) -> tuple[list[Object], list[Object]]:
    empty = {"emptyDir": {"sizeLimit": worker.disk_size} if worker.disk_size else {}}
    volumes: list[Object] = [{"name": "tmp", **empty}, {"name": "home", **empty}]
    mounts: list[Object] = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "home", "mountPath": _HOME}]
    if worker.install_monarch:
        volumes.append({"name": "monarch", **empty})
        mounts.append({"name": "monarch", "mountPath": _TARGET})
    own_shm = any(volume.mount_path.rstrip("/") == "/dev/shm" for volume in worker.volumes)
    if worker.shared_memory_limit is not None or (worker.has_gpus and not own_shm):
        # Container runtimes provide 64 MB, which the workers of a DataLoader and NCCL exceed.
        size = worker.shared_memory_limit or worker.memory
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", **({"sizeLimit": size} if size else {})}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if worker.fuse:
        volumes.append({"name": "fuse", "hostPath": {"path": "/dev/fuse", "type": "CharDevice"}})
        mounts.append({"name": "fuse", "mountPath": "/dev/fuse"})
    for index, volume in enumerate(worker.volumes):
        volumes.append({"name": f"volume-{index}", **volume.source})
        mount: Object = {"name": f"volume-{index}", "mountPath": volume.mount_path}
        mounts.append({**mount, "readOnly": True} if volume.read_only else mount)
    return volumes, mounts


def gateway_template(spec: JobSpec, component: str | None = None) -> Object:
    """The pod template of a component of ``spec.gateway_pods``, by default of the one with the engines. A gateway that
    forwards keeps nothing, so it may be evicted at any time."""
    component = component or [*spec.gateway_pods][-1]
    gateway, forwards = spec.gateway, component == FORWARDER
    labels = {**recommended_labels(spec), **gateway.labels, **job_labels(spec, component)}
    annotations = EVICTABLE if forwards else {**STAY, **SCRAPE}
    affinity = _spot_affinity(gateway.spot or ("allow" if forwards else "avoid"))
    limit = {"emptyDir": {"sizeLimit": gateway.disk_size or _GATEWAY_DISK}}
    container, volumes = _gateway_container(spec, component), [{"name": "tmp", **limit}, {"name": "home", **limit}]
    if gateway.install_monarch:
        wheel = {"name": "wheel", "secret": {"secretName": Names(spec.name).wheel}}
        volumes += [{"name": "monarch", **limit}, wheel]
    return {
        "metadata": {"labels": labels, "annotations": {**annotations, **gateway.annotations}},
        "spec": _without_empty(
            {
                "serviceAccountName": gateway.service_account_name or Names(spec.name).gateway,
                "automountServiceAccountToken": True,
                "nodeSelector": dict(gateway.node_selector),
                "tolerations": list(gateway.tolerations),
                "affinity": {**affinity, **_apart(labels)} if forwards else affinity,
                "priorityClassName": gateway.priority_class_name or _gateway_priority(spec),
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": 15,
                "securityContext": _pod_security(),
                "imagePullSecrets": [{"name": name} for name in spec.image_pull_secrets],
                "initContainers": [_gateway_install(container)] if gateway.install_monarch else [],
                "containers": [container],
                "volumes": volumes,
            }
        ),
    }


def _spot_affinity(spot: Spot) -> Object:
    if spot == "allow":
        return {}
    others = [{"key": key, "operator": "NotIn", "values": [value]} for key, value in SPOT_LABELS.items()]
    term = {"matchExpressions": others}
    if spot == "never":
        return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": term}]}}


def _apart(labels: dict[str, str]) -> Object:
    """On different nodes, as far as there are some: the loss of one must not take all gateways with it."""
    own = {key: labels[key] for key in (JOB_LABEL, COMPONENT_LABEL)}
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": own}}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _gateway_priority(spec: JobSpec) -> str | None:
    """That of the first workers with a priority class: whatever may not preempt these may not preempt their gateway."""
    classes = [mesh.worker.priority_class_name for mesh in spec.meshes if mesh.worker is not None]
    return next((each for each in classes if each), None)


def _gateway_container(spec: JobSpec, component: str) -> Object:
    probe = {"port": "gateway", "scheme": "HTTP"}
    forwards = component == FORWARDER
    sessions = [*("--idle-timeout", str(spec.idle_timeout)), *("--lease", str(spec.lease))]
    if component == ENGINES:
        sessions.append("--behind-gateways")
    secret = {"name": Names(spec.name).secret, "key": "key" if component == ENGINES else "token"}
    container: Object = {
        "name": GATEWAY_CONTAINER,
        "image": spec.gateway_image,
        "args": [
            *("--host", "0.0.0.0", "--port", str(GATEWAY_PORT)),
            *("--kubernetes-job", spec.name),
            *(("--forward-to", "job") if forwards else sessions),
        ],
        "env": [
            *([] if forwards else _engine_variables(spec)),
            {"name": "MESHGATE_LOG_FORMAT", "value": "json"},  # as the lines of actors, and for the audit log
            {"name": "MESHGATE_TOKEN", "valueFrom": {"secretKeyRef": secret}},
        ],
        "ports": [
            {"name": "gateway", "containerPort": GATEWAY_PORT, "protocol": "TCP"},
            *([] if forwards else [{"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"}]),
        ],
        # Without a startup probe, after whose success older kubelets wait a second before they probe the readiness.
        "readinessProbe": {"httpGet": {**probe, "path": "/readyz"}, "periodSeconds": 1, "timeoutSeconds": 5},
        "livenessProbe": {
            "httpGet": {**probe, "path": "/healthz"},
            "initialDelaySeconds": 60,
            "periodSeconds": 10,
            "timeoutSeconds": 10,
            "failureThreshold": 6,
        },
        "resources": _FORWARDER_RESOURCES if forwards else _gateway_resources(spec.gateway),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "home", "mountPath": _HOME}],
        "securityContext": {**_container_security(), "readOnlyRootFilesystem": True},
    }
    if spec.gateway_pull_policy is not None:
        container["imagePullPolicy"] = spec.gateway_pull_policy
    return _installed(container, spec.gateway) if spec.gateway.install_monarch else container


def _engine_variables(spec: JobSpec) -> list[Object]:
    return [
        _from_field("MESHGATE_ENGINE_HOST", "status.podIP"),
        {"name": "MESHGATE_METRICS_PORT", "value": str(METRICS_PORT)},  # older gateways ignore it, unlike a flag
        {"name": "MESHGATE_LOG_OUTPUT", "value": "true" if spec.log_output else "false"},
    ]


def _installed(container: Object, gateway: GatewaySpec) -> Object:
    """``container`` with what the gateway's own image would have set."""
    variables = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", **gateway.env_vars}
    variables["HOME"] = _HOME  # the one of the workers may be on a volume
    variables["PYTHONPATH"] = ":".join(filter(None, (variables.get("PYTHONPATH"), PYTHONPATH)))
    own = {each["name"] for each in container["env"]}
    given = [{"name": name, "value": value} for name, value in variables.items() if name not in own]
    return _without_empty(
        {
            **container,
            "command": ["python", "-m", "meshgate_gateway"],
            "workingDir": _HOME,
            "env": [*given, *container["env"]],
            "envFrom": [{"secretRef": {"name": name}} for name in gateway.secrets],
            "volumeMounts": [*container["volumeMounts"], {"name": "monarch", "mountPath": _TARGET}],
        }
    )


def _gateway_install(container: Object) -> Object:
    """As that of a worker; it installs meshgate as well, from the wheel that the job's creator has sent."""
    init = install_container(container)
    mount = {"name": "wheel", "mountPath": _WHEEL_DIRECTORY, "readOnly": True}
    command = [*init["command"], f"{_WHEEL_DIRECTORY}/{PACKED_WHEEL}"]
    return {**init, "command": command, "volumeMounts": [*init["volumeMounts"], mount]}


def _gateway_resources(gateway: GatewaySpec) -> Object:
    """Requests and limits, because quotas on limits reject pods without. What is given is both."""
    requests = {"cpu": gateway.cpu or _GATEWAY_CPU[0], "memory": gateway.memory or _GATEWAY_MEMORY[0]}
    limits = {"cpu": gateway.cpu or _GATEWAY_CPU[1], "memory": gateway.memory or _GATEWAY_MEMORY[1]}
    disk = {"ephemeral-storage": gateway.disk_size} if gateway.disk_size else {}
    return {"requests": {**requests, **disk}, "limits": {**limits, **disk}}


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
    annotations = {**STAY, **(metadata.get("annotations") or {})}
    labels = {**(metadata.get("labels") or {}), **labels}
    return {**template, "metadata": {**metadata, "labels": labels, "annotations": annotations}}


def _overlaid(pod: Object, raw: Object) -> Object:
    """``pod`` with the fields of ``raw`` merged over it.

    Mappings are merged by key, lists are replaced. Lists of named items (containers, volumes, environment, mounts) are
    merged by name.
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
