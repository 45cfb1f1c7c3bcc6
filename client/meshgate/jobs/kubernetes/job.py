"""KubernetesJob: worker pods in a cluster, driven from anywhere through a gateway next to them.

The arguments are Kubetorch's, ``add_mesh`` is Monarch's. ``docs/kubernetes.md`` describes the objects that a job
creates, the permissions this needs and the ways to reach its gateway.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError
from typing_extensions import Self

from meshgate.errors import JobError, JobUnsupported
from meshgate.jobs.cluster_job import ClusterJob
from meshgate.jobs.joined import join
from meshgate.jobs.kubernetes.compute import (
    DEFAULT_INACTIVITY_TTL,
    Compute,
    as_compute,
    gateway_from_compute,
    validation_text,
)
from meshgate.jobs.kubernetes.requests import (
    ImageSpec,
    JobRequest,
    KubeConfig,
    MeshRequest,
    mesh_from_compute,
    mesh_from_monarch_arguments,
    mesh_from_selector,
    require_count,
)
from meshgate.jobs.saved import DEFAULT_JOB_PATH
from meshgate.jobs.sessions import check_detached
from meshgate.jobs.tokens import has_own_token, url_of_gateway
from meshgate.jobs.trait import JobTrait
from meshgate.session.dialing import Dialer
from meshgate.suggestions import did_you_mean, explains_arguments
from meshgate_kubernetes.manifests.names import POD_INDEX_LABEL, check_job_name
from meshgate_kubernetes.manifests.spec import DEFAULT_LEASE, DEFAULT_PORT

if TYPE_CHECKING:
    from meshgate_kubernetes.jobs.lifecycle import ListedJob, RunningJob
    from meshgate_wire.status import JoinableJob

__all__ = ["ImageSpec", "KubeConfig", "KubernetesJob"]

DEFAULT_TIMEOUT = 900.0
DEFAULT_MESH = "workers"


class JobProvider(Protocol):
    """Starts, finds and ends jobs: a cluster or a remote gateway. All methods raise JobError or GatewayError."""

    @property
    def name_is_optional(self) -> bool:
        """Whether ``find_job`` works without a name."""

    def start(self, request: JobRequest, created: Callable[[RunningJob], None]) -> RunningJob:
        """Starts the job and waits until it is ready. Leaves nothing behind if that fails.

        ``created`` is called with what ``end`` needs as soon as the job exists, if this process created it.
        """

    def find_job(self, name: str | None, namespace: str) -> RunningJob:
        """The running job of this name. Raises JobNotRunning."""

    def list_jobs(self, namespace: str) -> list[ListedJob]:
        """The running jobs in a namespace, or, if that is empty, in all."""

    def refreshed(self, job: RunningJob) -> RunningJob | None:
        """The job with the numbers of hosts that it has now; None if it has ended."""

    def scale(self, job: RunningJob, mesh: str, hosts: int, timeout: float) -> RunningJob:
        """The job with ``hosts`` hosts in ``mesh``, once new ones are ready or removed ones gone."""

    def end(self, job: RunningJob | ListedJob, *, quiet: bool = False) -> None:
        """Returns when nothing of the job is left. ``quiet``: shows no progress."""

    def dialer(self, job: RunningJob) -> Dialer: ...


class KubernetesJob(ClusterJob["RunningJob"]):
    """Worker pods in a cluster, with their own gateway.

    ``compute`` describes pods to create, ``selector`` finds existing ones; either becomes the mesh ``workers``.
    ``add_mesh`` adds meshes. Without any mesh, the running job called ``name`` is used as it is.
    ``timeout`` is how long, in seconds, ``apply`` waits for the pods (default: ``compute.launch_timeout``, else 900).
    ``lease`` is how long, in seconds (14400), a session waits for a driver that has fallen silent, for example because
    its laptop sleeps, and 1800 at most for one whose connection ended; only then does ``inactivity_ttl`` begin.
    A ``with`` block also ends the job if this process is killed.
    ``gateway`` describes the gateway's pod; what it does not say of labels, node selector, tolerations and priority is
    taken from the first mesh's workers. With ``service_account_name``, the job creates no account and no role. With
    ``replicas=2``, two gateways forward to the pod with the sessions, and any of them may be replaced at any time.
    ``gateway_url`` (default: ``$MESHGATE_URL`` or ``$KT_API_URL``) reaches the gateway through an ingress instead of a
    port-forward; ``$MESHGATE_CA`` is a file of certificates to trust there in addition to the system's, and
    ``$MESHGATE_CLIENT_CERT`` and ``$MESHGATE_CLIENT_KEY`` are those of a client certificate.
    Each ``state`` pushes ``sync_dirs`` (default: the git root around the working directory or the script; without git,
    the directory of the program) to the pods, and with ``watch`` every save does too; ``job.sync()`` pushes at any
    time.
    With ``detached``, which may be a name for the session, a session keeps running for its lease when its driver
    leaves, also at the end of a ``with`` block, and ``attach`` takes it over, here or on another machine.
    With ``log_output``, the log of the gateway's pod also has what actors print, as JSON lines.
    ``use_websocket=False`` is rejected, as there is no other transport, and so is an address in ``attach_to``. Raises
    ValueError or TypeError on invalid arguments; does not contact the cluster before ``apply`` or ``state``.
    """

    @explains_arguments(as_compute)
    def __init__(
        self,
        compute: Compute | None = None,
        selector: Mapping[str, str] | str | None = None,
        name: str | None = None,
        namespace: str = "default",
        monarch_port: int = DEFAULT_PORT,
        use_websocket: bool = True,
        sync_dirs: Sequence[str] | None = None,
        *,
        gateway_url: str | None = None,
        kubeconfig: Any = None,
        timeout: float | None = None,
        lease: float | None = None,
        watch: bool = False,
        detached: bool | str = False,
        gateway: Compute | None = None,
        log_output: bool = True,
        attach_to: str | None = None,
    ) -> None:
        super().__init__(sync_dirs, watch=watch)
        self._detached = check_detached(detached)
        if not use_websocket:
            raise ValueError("KubernetesJob(use_websocket=False): the gateway supports websockets only")
        if attach_to is not None:
            raise ValueError(
                f"KubernetesJob(attach_to={attach_to!r}): the driver reaches workers through the gateway only, and "
                "needs no port-forward of its own; leave attach_to out"
            )
        if compute is not None and selector is not None:
            raise ValueError("KubernetesJob(compute=…, selector=…): pods are either created or found; pass only one")
        meshes: tuple[MeshRequest, ...] = ()
        if compute is not None:
            meshes = (mesh_from_compute(DEFAULT_MESH, compute, port=monarch_port),)
            self._images[DEFAULT_MESH] = compute.image
        elif selector is not None:
            meshes = (mesh_from_selector(DEFAULT_MESH, selector, port=monarch_port),)
        launch_timeout = compute.launch_timeout if compute is not None else None
        self._request = _job_request(
            name=check_job_name(name) if name is not None else None,
            namespace=_choose_namespace(namespace, compute.namespace if compute is not None else None),
            meshes=meshes,
            idle_timeout=compute.inactivity_ttl if compute is not None else DEFAULT_INACTIVITY_TTL,
            lease=lease if lease is not None else DEFAULT_LEASE,
            timeout=timeout if timeout is not None else launch_timeout or DEFAULT_TIMEOUT,
            gateway_url=gateway_url or url_of_gateway(),
            kubeconfig=_kubeconfig_path(kubeconfig),
            gateway=gateway_from_compute(gateway),
            log_output=log_output,
        )
        self._cached_provider: JobProvider | None = None

    def __repr__(self) -> str:
        name = self.name or "(unnamed)"
        meshes = {mesh.name: mesh.replicas for mesh in self._request.meshes}
        return f"KubernetesJob({name}, namespace={self._request.namespace!r}, {meshes})"

    @property
    def name(self) -> str | None:
        """The job's name. A generated name is None until the job is applied."""
        running = self._running
        job = running._job if isinstance(running, KubernetesJob) else None
        return job.name if job is not None else self._request.name

    @property
    def namespace(self) -> str:
        return self._request.namespace

    def add_mesh(
        self,
        name: str,
        num_replicas: int,
        label_selector: str | None = None,
        pod_rank_label: str = POD_INDEX_LABEL,
        image_spec: ImageSpec | Any = None,
        port: int = DEFAULT_PORT,
        pod_spec: Any = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        *,
        pod_template: Any = None,
        compute: Compute | None = None,
    ) -> None:
        """Adds a mesh of ``num_replicas`` pods, as Monarch's ``add_mesh``; replaces a mesh of the same name.

        Finds pods by ``label_selector`` (default: those of the MonarchMesh ``name``), or creates them from
        ``image_spec``, from ``pod_spec`` (a V1PodSpec, a V1PodTemplateSpec, or the same as a dict), or from
        ``compute``. ``labels`` and ``annotations`` are set on the StatefulSet or MonarchMesh.
        Raises ValueError on an invalid name or contradictory arguments, TypeError on wrong types.
        """
        if self.active:
            raise JobError("cannot add a mesh: this job is already running. Call add_mesh() before apply()")
        if pod_spec is not None and pod_template is not None:
            raise ValueError("'pod_spec' and 'pod_template' are aliases: pass only one of them.")
        raw = pod_spec if pod_spec is not None else pod_template
        options: dict[str, Any] = {"port": port, "labels": labels, "annotations": annotations}
        self._images.pop(name, None)
        if compute is not None:
            if image_spec is not None or raw is not None or label_selector is not None:
                raise ValueError(
                    "'compute' describes the pods: it cannot be combined with 'image_spec', 'pod_spec' or "
                    "'label_selector'."
                )
            require_count(name, num_replicas)
            mesh = mesh_from_compute(name, compute, num_replicas, owner="add_mesh", **options)
            self._images[name] = compute.image
        else:
            mesh = mesh_from_monarch_arguments(
                name,
                num_replicas,
                label_selector=label_selector,
                pod_rank_label=pod_rank_label,
                image_spec=image_spec,
                pod_spec=raw,
                **options,
            )
        self._request = self._request.with_mesh(mesh)

    def scale(
        self, mesh: str, hosts: int, *, timeout: float | None = None, cached_path: str | None = DEFAULT_JOB_PATH
    ) -> None:
        """Changes the number of hosts of ``mesh``. Processes on hosts that stay are not affected.

        Returns when new hosts are ready, or the pods of removed ones are gone. The next ``state()`` has the mesh of the
        new size; meshes that the program holds keep their hosts. New hosts that are not ready within ``timeout``
        seconds (default: the job's) are removed again. A mesh loses its last hosts, unless processes of any session
        run on them. Finds the job as ``state`` does, but never starts one. Raises ValueError if there is no such mesh
        or ``hosts`` is not a positive integer, JobNotRunning, JobUnsupported without a kubeconfig, JobError and
        GatewayError.
        """
        require_count(mesh, hosts, "hosts")
        with self._lock:
            running = self._find_running(cached_path)
            if not isinstance(running, KubernetesJob):
                raise JobUnsupported(f"{running!r} cannot be scaled by a program that was submitted to it")
            job = running._require_job()
            if mesh not in job.meshes:
                known = ", ".join(job.meshes)
                raise ValueError(f"the job has no mesh {mesh!r}; its meshes: {known}{did_you_mean(mesh, job.meshes)}")
            limit = timeout if timeout is not None else self._request.timeout or DEFAULT_TIMEOUT
            running._job = running._provider().scale(job, mesh, hosts, limit)
            if self._cache_file is not None:  # for job_load(), after which state() does not ask the cluster
                self.dump(self._cache_file)

    # --- implementation of JobTrait

    def _mesh_names(self) -> Collection[str] | None:
        return [mesh.name for mesh in self._request.meshes] or None  # without any, those of the running job

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise JobError(f"KubernetesJob cannot run batch-mode scripts: run {client_script} yourself")
        provider = self._provider()
        if self._request.meshes:
            self._job = self._start(provider)
        elif provider.name_is_optional or self._request.name is not None:
            self._job = provider.find_job(self._request.name, self._request.namespace)
        else:
            raise ValueError(
                "KubernetesJob has no meshes: pass compute= or selector=, call add_mesh(), or name a running job "
                "(name=, namespace=)"
            )
        self._bind_if_scoped(self._job)

    def _start(self, provider: JobProvider) -> RunningJob:
        try:
            return provider.start(self._request, self._bind_if_scoped)
        except Exception:  # nothing of the job is left; after a Ctrl-C, the reaper completes the deletion
            self._outlive_driver()
            raise

    def _bind_if_scoped(self, job: RunningJob) -> None:
        if job.uid:  # otherwise it is the job of the gateway itself, which kill() does not end
            super()._bind_if_scoped(job)

    def _spec_for_reaper(self) -> tuple[type[JobTrait], dict[str, Any]]:
        request = self._request.model_copy(update={"meshes": ()})
        return KubernetesJob, request.model_dump(mode="json", exclude_defaults=True)

    def _dialer(self) -> Dialer:
        return self._provider().dialer(self._require_job())

    def _find_joined(self) -> JobTrait | None:
        meshes = {mesh.name: mesh.replicas for mesh in self._request.meshes}
        return join(self, self._request.name, self._request.namespace, meshes)

    def _joinable(self) -> JoinableJob:
        from meshgate_wire.status import JoinableJob  # noqa: PLC0415 - few programs submit others

        return JoinableJob(kind="KubernetesJob", name=self.name or "", namespace=self.namespace)

    def _find_existing(self) -> bool:
        """A job with a name is found by it, from any machine."""
        if self._request.name is None:
            return False
        self._job = self._provider().find_job(self._request.name, self._request.namespace)
        return True

    def _end(self, job: RunningJob) -> None:
        self._provider().end(job)

    @property
    def _ends_when_killed(self) -> bool:
        return bool(self._require_job().uid)  # without one, MESHGATE_URL is the job's own gateway, which ends no job

    def _is_running(self) -> bool:
        found = None if self._job is None else self._provider().refreshed(self._job)
        self._job = found or self._job  # kill() needs one that has ended
        return found is not None

    def can_run(self, spec: JobTrait) -> bool:
        """Whether ``spec`` is a KubernetesJob for the same pods and this job still exists."""
        return isinstance(spec, KubernetesJob) and self._request.same_as(spec._request) and self._is_running()

    def _spec(self) -> dict[str, Any]:
        return self._request.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self:
        job = cls()
        job._request = JobRequest.model_validate(spec)
        if allocation is not None:
            from meshgate_kubernetes.jobs.lifecycle import RunningJob  # noqa: PLC0415

            job._job = RunningJob.model_validate(allocation)
        return job

    def _provider(self) -> JobProvider:
        if self._cached_provider is None:
            self._cached_provider, self._request = _find_provider(self._request)
        return self._cached_provider


def _find_provider(request: JobRequest) -> tuple[JobProvider, JobRequest]:
    """The gateway of ``gateway_url`` if there is a token for it or no kubeconfig, else the cluster; and ``request``,
    which leads to that cluster from now on."""
    # Deferred imports: they take a fifth of a second, and not every program has a job in a cluster.
    exported = any(os.path.exists(each) for each in os.environ.get("KUBECONFIG", "").split(os.pathsep) if each)
    if request.gateway_url is not None and not request.kubeconfig:
        from meshgate.jobs.kubernetes.remote_gateway import RemoteGateway  # noqa: PLC0415

        if has_own_token() or not exported:
            return RemoteGateway(request.gateway_url, None), request
    from meshgate.jobs.kubernetes.cluster import Cluster  # noqa: PLC0415

    cluster = Cluster.find(request.kubeconfig, url=request.gateway_url, context=request.context, server=request.server)
    return cluster, request.model_copy(update=cluster.place)


def _job_request(**arguments: Any) -> JobRequest:
    try:
        return JobRequest(**arguments)
    except ValidationError as error:
        raise ValueError(validation_text("KubernetesJob", error)) from None


def _choose_namespace(job: str, compute: str | None) -> str:
    if compute and job not in ("default", compute):
        raise ValueError(f"KubernetesJob(namespace={job!r}, compute=Compute(namespace={compute!r})): pass only one")
    return compute or job


def _kubeconfig_path(kubeconfig: Any) -> str | None:
    """From a path or a ``KubeConfig``, ours or Monarch's; None without either."""
    path = getattr(kubeconfig, "local", kubeconfig)
    if path is None:
        if getattr(kubeconfig, "remote", None) is None:
            return None
        raise ValueError("KubernetesJob(kubeconfig=…): pass the path of a kubeconfig file")
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"KubernetesJob(kubeconfig={path!r}): pass the path of a kubeconfig file")
    return str(os.path.expanduser(os.fspath(path)))
