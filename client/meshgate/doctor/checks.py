"""Checks of this machine, of the way to a cluster and of the way to a gateway.

On the way to a cluster (kubeconfig, API server, permissions, admission) and to a gateway (HTTP, websocket, what the
connection is like), each check needs the one before it, so the first problem ends them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from meshgate.doctor.echo import Echo
from meshgate.doctor.images import check_pulls
from meshgate.errors import AuthenticationError, GatewayError, MeshgateError, VersionMismatchError
from meshgate.jobs.kubernetes.compute import Compute
from meshgate.jobs.kubernetes.remote_gateway import RemoteGateway
from meshgate.jobs.kubernetes.requests import JobRequest, mesh_from_compute
from meshgate.progress import Waiting
from meshgate.proxies.client import Client
from meshgate.session.dialing import Dialer, Route
from meshgate.session.gateway_client import request_json
from meshgate.session.settings import ClientSettings
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import (
    Forbidden,
    KubernetesError,
    NotFound,
    NotKubernetes,
    Rejected,
    Unauthenticated,
    Unreachable,
    UntrustedCertificate,
)
from meshgate_kubernetes.jobs.lifecycle import require_permissions, resolve
from meshgate_kubernetes.manifests.job_objects import (
    OPTIONAL_KINDS,
    gateway_objects,
    mesh_objects,
    parent,
    token_secret,
)
from meshgate_kubernetes.manifests.names import Names, generate_job_name
from meshgate_kubernetes.manifests.pods import gateway_template, worker_template
from meshgate_kubernetes.manifests.spec import JobSpec, Object
from meshgate_kubernetes.status.diagnosis import failed_create, quota_shortages, requests, shortages_of
from meshgate_kubernetes.status.readiness import read_cluster
from meshgate_wire.status import JobStatus

_REMEDIES: dict[type[KubernetesError], str] = {
    Unauthenticated: "log in to the cluster again, as you do for kubectl; then `kubectl get pods` works too",
    Unreachable: "start the VPN or proxy that the cluster needs, and check the server's address in the kubeconfig",
    NotKubernetes: "correct the server's address in the kubeconfig: it is that of another service",
    UntrustedCertificate: "put the cluster's CA into the kubeconfig (certificate-authority-data); download it again",
}
LIMITS = Path("/proc/sys/fs/inotify")
FEWEST_WATCHES = 65_536
FEWEST_INSTANCES = 64
SLOW_ROUND_TRIP = 0.25  # seconds
SLOW_THROUGHPUT = 2.0  # MB/s
ROUND_TRIPS = 10
NBYTES = 4 * 2**20
CONNECT_TIMEOUT = 15.0  # seconds
TIMEOUT = 60.0  # seconds

_PULLS_NEED = "ask for the permission to create, get and delete pods and to list events, or leave out --images"
_PULLABLE = (
    "name an image that the cluster can pull, or the Secret of its registry: --image-pull-secret here, "
    "Compute(image_pull_secrets=[…]) in the job"
)
_REACH = "check the URL, and that the ingress routes to the job's gateway; for a port-forward, that the job runs"
_UPGRADE = (
    "let the ingress forward websockets: nginx needs `proxy_http_version 1.1` and the headers Upgrade and Connection; "
    "Envoy and the Gateway API need websocket upgrades, or appProtocol kubernetes.io/ws"
)
_CUT = (
    "raise the limit of the ingress for websockets: proxy-read-timeout (nginx), idle_timeout (ALB), timeoutSec of the "
    "BackendConfig (GCE). Calls survive cuts, but wait for the new connection"
)


def check_cluster(
    kubeconfig: str | None, namespace: str, compute: Compute | None = None, *, images: bool = False
) -> Iterator[Finding]:
    """Whether jobs can be started in ``namespace`` of the cluster that ``kubeconfig`` (None: as kubectl) selects.
    ``compute`` describes the workers of such a job; ``images``: also pulls its images."""
    try:
        api = Api.from_kubeconfig(kubeconfig)
    except Unauthenticated as error:
        yield problem("kubeconfig", error, _REMEDIES[Unauthenticated])
        return
    except KubernetesError as error:
        remedy = (
            "set KUBECONFIG to the kubeconfig of your cluster; `kubectl config view` shows the one that kubectl uses"
        )
        yield problem("kubeconfig", error, remedy)
        return
    yield Finding(check="kubeconfig", outcome="ok", text=f"selects the API server at {api.host}")
    try:
        started = time.monotonic()
        api.list_rules(namespace)
    except KubernetesError as error:
        yield problem("API server", error, _remedy(error, "ask the administrator"))
        return
    yield Finding(check="API server", outcome="ok", text=f"answers within {time.monotonic() - started:.2f} s")
    request = JobRequest(namespace=namespace).with_mesh(mesh_from_compute("workers", compute or Compute()))
    spec = request.spec(generate_job_name("doctor"))
    if not _exists(api, spec):
        text = f"namespace {namespace!r} does not exist in the cluster at {api.host}"
        yield problem("namespace", text, f"create it (`kubectl create namespace {namespace}`), or name another with -n")
        return
    permissions = _check_permissions(api, spec)
    yield permissions
    if permissions.outcome == "ok":
        yield from _check_admission(api, spec)
        yield from _check_images(api, spec) if images else ()


def _exists(api: Api, spec: JobSpec) -> bool:
    """Whether there is such a namespace. Few users may read it, and the API server reviews permissions without it."""
    try:
        api.create(parent(spec), dry_run=True)
    except KubernetesError as error:  # the next checks report any other
        return not isinstance(error, NotFound)
    return True


def _remedy(error: KubernetesError, otherwise: str) -> str:
    return next((text for kind, text in _REMEDIES.items() if isinstance(error, kind)), otherwise)


def _check_permissions(api: Api, spec: JobSpec) -> Finding:
    namespace = spec.namespace
    try:
        require_permissions(api, spec, forward=True)
    except Forbidden as error:
        remedy = f"ask for the Kubernetes role `edit` in namespace {namespace}, or for the Role in docs/kubernetes.md"
        return problem("permissions", error, remedy)
    except KubernetesError as error:
        return problem("permissions", error, "try again; the API server did not answer a permission review")
    return Finding(check="permissions", outcome="ok", text=f"jobs can be started in namespace {namespace}")


def _check_admission(api: Api, spec: JobSpec) -> Iterator[Finding]:
    """What rejects the objects of a job, in a dry run: admission webhooks, quotas, limit ranges, pod security. Then
    whether its quotas and nodes have enough for all of its pods."""
    pods: list[Object] = []
    try:
        spec = resolve(api, spec)
        problems = []
        for subject, obj, count in _rehearsed(spec):
            made, rejected = _rehearse(api, subject, obj)
            problems += rejected
            pods += count * [made] if obj["kind"] == "Pod" else []
        rejecting = " ".join(problems)  # a quota that even rejects the first pod is among them
        for quota in _quotas(api, spec.namespace):
            if f"quota {quota['metadata']['name']} is exceeded" not in rejecting:
                problems += quota_shortages(quota, pods)
    except KubernetesError as error:
        yield problem("admission", error, "try again; the API server did not answer a dry run")
        return
    for text in dict.fromkeys(problems):
        yield problem("admission", text, f"change the job as it says, or ask the administrator of {spec.namespace}")
    if not problems:
        yield Finding(check="admission", outcome="ok", text=f"namespace {spec.namespace} admits the objects of a job")
    yield from _check_nodes(api, pods)


def _rehearsed(spec: JobSpec) -> Iterator[tuple[str, Object, int]]:
    """The objects of a job that something may reject, with what a job calls their creator, and the pods of each
    template, with their number. The binding of a role needs the role itself, so it has no dry run."""
    objects = [parent(spec), token_secret(spec, "none"), *gateway_objects(spec)]
    objects += [obj for mesh in spec.meshes for obj in mesh_objects(spec, mesh)]
    for obj in objects:
        if obj["kind"] not in ("RoleBinding", *OPTIONAL_KINDS):
            yield f"{obj['kind'].lower()} {obj['metadata']['name']}", obj, 1
    for component, replicas in spec.gateway_pods.items():
        name = Names(spec.name).deployment(component)
        yield _pod("replicaset", spec, name, gateway_template(spec, component), replicas)
    for mesh in spec.meshes:
        yield _pod("statefulset", spec, Names(spec.name).mesh(mesh.name), worker_template(spec, mesh), mesh.replicas)


def _pod(creator: str, spec: JobSpec, name: str, template: Object, count: int) -> tuple[str, Object, int]:
    metadata = {**template["metadata"], "namespace": spec.namespace, "name": f"{name}-0"}
    pod = dict(template["spec"])
    if creator == "replicaset" and spec.gateway.service_account_name is None:
        del pod["serviceAccountName"]  # the job creates it
    return f"{creator} {name}", {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}, count


def _rehearse(api: Api, subject: str, obj: Object) -> tuple[Object, list[str]]:
    """``obj`` as the API server would have created it, and why it would not."""
    try:
        return api.create(obj, dry_run=True), []
    except Forbidden:  # most users may not create pods themselves; for other kinds, that is another check
        return obj, []
    except (Rejected, NotFound) as error:
        text = str(error).rpartition(" (HTTP ")[0] or str(error)
        if "does not support dry run" in text:  # a webhook that only a real object can ask
            return obj, []
        found = failed_create(subject, text)
        return obj, [f"{found.reason}: {found.message}"]


def _check_images(api: Api, spec: JobSpec) -> Iterator[Finding]:
    try:
        with Waiting(lambda: "waiting until the cluster has pulled the images"):
            found = check_pulls(api, resolve(api, spec))
    except Forbidden as error:
        yield problem("images", error, _PULLS_NEED)
        return
    except KubernetesError as error:
        yield problem("images", error, _remedy(error, f"change the job, or ask the administrator of {spec.namespace}"))
        return
    for image, reason in found.items():
        if reason:
            yield problem("images", f"{image}: {reason}", _PULLABLE)
        else:
            yield Finding(check="images", outcome="ok", text=f"the cluster can pull {image}")


def _quotas(api: Api, namespace: str) -> list[Object]:
    try:
        return api.list_objects("ResourceQuota", namespace)[0]
    except Forbidden:
        return []


def _check_nodes(api: Api, pods: list[Object]) -> Iterator[Finding]:
    """Silent for users who may not list nodes."""
    cluster = read_cluster(api)
    if cluster is None:
        return
    missing = dict.fromkeys(each for pod in pods for each in shortages_of(pod, cluster, requests(pod)))
    for each in missing:
        remedy = "request less, or add such a node; an autoscaler may" if each.impossible else "wait until others end"
        yield problem("nodes", each, remedy)
    if not missing:
        yield Finding(check="nodes", outcome="ok", text="each pod of a job fits on a node")


class Finding(BaseModel):
    """The outcome of one check."""

    model_config = ConfigDict(frozen=True)

    check: str
    outcome: Literal["ok", "problem"]
    text: str
    remedy: str = Field(default="", description="what to change")


def problem(check: str, text: object, remedy: str) -> Finding:
    return Finding(check=check, outcome="problem", text=str(text), remedy=remedy)


def check_file_watches(limits: Path = LIMITS) -> Iterator[Finding]:
    """Whether ``job.sync(watch=True)`` can watch a large project. Finds nothing where the kernel has no such limits."""
    for name, fewest in (("max_user_watches", FEWEST_WATCHES), ("max_user_instances", FEWEST_INSTANCES)):
        try:
            limit = int((limits / name).read_text())
        except (OSError, ValueError):  # another kernel
            continue
        if limit < fewest:
            remedy = f"run `sudo sysctl fs.inotify.{name}={fewest}`, and set it in /etc/sysctl.d to keep it"
            yield problem("file watches", f"the limit {name} is {limit}: saves may not be noticed", remedy)
        else:
            yield Finding(check="file watches", outcome="ok", text=f"{name} is {limit}")


# The measurements use a session and a process on one host, which end with the check.


class _CountingDialer:
    """Counts how often a connection is dialed."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self.dialed = 0

    async def dial(self) -> Route:
        self.dialed += 1
        return replace(await self._dialer.dial())

    async def gone(self) -> str | None:
        return await self._dialer.gone()

    def __str__(self) -> str:
        return str(self._dialer)


def check_gateway(dialer: Dialer, watch: float = 0.0, url: str | None = None) -> Iterator[Finding]:
    """Whether a session works through ``dialer``, and how well; then watches the connection for ``watch`` seconds.

    ``url``: it is that of MESHGATE_URL, which may be that of a provisioning gateway.
    """
    try:
        status = JobStatus.model_validate(request_json(dialer, "/v1/status"))
    except AuthenticationError as error:
        if url is not None and (usable := _usable_jobs(url)) is not None:
            text = f"{dialer} starts jobs, and knows this identity, which may use these: {usable}"
            yield Finding(check="gateway", outcome="ok", text=text)
            return
        yield problem("gateway", error, "set MESHGATE_TOKEN to the token of this job, or log in to the cluster again")
        return
    except VersionMismatchError as error:
        yield problem("gateway", error, "install the gateway's version of meshgate here")
        return
    except (MeshgateError, ValueError) as error:
        yield problem("gateway", error, _REACH)
        return
    yield Finding(check="gateway", outcome="ok", text=f"{dialer} runs meshgate {status.gateway_version}")
    counting = _CountingDialer(dialer)
    settings = ClientSettings.load(output=False).model_copy(
        update={"connect_timeout": CONNECT_TIMEOUT, "log_dir": None}
    )
    try:
        client = Client.connect(counting, settings=settings)
    except GatewayError as error:
        yield problem("websocket", error, _UPGRADE)
        return
    with client:
        yield Finding(check="websocket", outcome="ok", text="a session can be opened")
        yield from _measure(client, status, counting, watch)


def _usable_jobs(url: str) -> str | None:
    """The jobs of a provisioning gateway that this caller may use; None if the gateway starts no jobs, or rejects the
    caller as well."""
    try:
        jobs = RemoteGateway(url, None).list_jobs()
    except MeshgateError:  # then the caller reports why the gateway itself rejected the request
        return None
    return ", ".join(f"{job.namespace}/{job.name}" for job in jobs) or "none"


def _measure(client: Client, status: JobStatus, dialer: _CountingDialer, watch: float) -> Iterator[Finding]:
    if not status.meshes:
        return
    mesh, count = next(iter(status.meshes.items()))
    try:
        rank = min((host.rank for host in status.hosts if host.mesh == mesh), default=0)  # one that is not lost
        host: Any = client.attach_hosts(mesh, count).slice(hosts=slice(rank, rank + 1))
        echo: Any = host.spawn_procs(name="meshgate_doctor").spawn("meshgate_doctor", Echo)
        echo.echo.call_one(b"", 0).get(TIMEOUT)
        round_trip = statistics.median(_seconds(echo, b"", 0) for _ in range(ROUND_TRIPS))
        up, down = (NBYTES / 1e6 / _seconds(echo, bytes(sent), NBYTES - sent) for sent in (NBYTES, 0))
    except (MeshgateError, TimeoutError) as error:
        yield problem("hosts", error, f"look at the hosts with `meshgate status` and `meshgate logs`; mesh {mesh}")
        return
    text = f"a call takes {round_trip * 1e3:.1f} ms"
    if round_trip > SLOW_ROUND_TRIP:
        remedy = "send calls without waiting for each; look for a VPN or proxy on the way that is far away, or buffers"
        yield problem("round trip", text, remedy)
    else:
        yield Finding(check="round trip", outcome="ok", text=text)
    text = f"{up:.1f} MB/s up, {down:.1f} MB/s down"
    if min(up, down) < SLOW_THROUGHPUT:
        yield problem("throughput", text, "use another way: a port-forward, or an ingress that does not buffer")
    else:
        yield Finding(check="throughput", outcome="ok", text=text)
    yield _watch(echo, dialer, watch)


def _seconds(echo: Any, sent: bytes, answer: int) -> float:
    started = time.perf_counter()
    echo.echo.call_one(sent, answer).get(TIMEOUT)
    return time.perf_counter() - started


def _watch(echo: Any, dialer: _CountingDialer, watch: float) -> Finding:
    """Uses the connection until ``watch`` seconds have passed."""
    end = time.monotonic() + watch
    with Waiting(lambda: f"watching the connection for {watch:g} s"):
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            _seconds(echo, b"", 0)
    cuts = dialer.dialed - 1
    if cuts:
        return problem("connection", f"the connection was cut {cuts} times in {watch:.0f} s of use", _CUT)
    text = f"it was not cut in {watch:.0f} s" if watch else "not watched; --watch 120 finds limits of an ingress"
    return Finding(check="connection", outcome="ok", text=text)
