"""KubernetesJob: worker pods in a cluster, driven from anywhere through a gateway beside them.

The arguments are Kubetorch's, ``add_mesh`` is Monarch's. What a job makes in the cluster, the rights that takes and
the ways to its gateway are told in ``docs/kubernetes.md``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError
from typing_extensions import Self

from meshgate.client import Client
from meshgate.dialing import Dialer
from meshgate.errors import JobError, JobNotRunning
from meshgate.jobs.compute import DEFAULT_INACTIVITY_TTL, Compute, describe
from meshgate.jobs.given import listed
from meshgate.jobs.state import JobState, attached
from meshgate.jobs.trait import JobTrait
from meshgate.kubernetes.asked import (
    ImageSpec,
    JobAsked,
    MeshAsked,
    mesh_like_monarch,
    mesh_of_compute,
    mesh_of_selector,
    require_count,
)
from meshgate_kubernetes.names import POD_INDEX_LABEL, check_job_name
from meshgate_kubernetes.spec import DEFAULT_LEASE, DEFAULT_PORT

if TYPE_CHECKING:
    from meshgate_kubernetes.jobs import RunningJob


class Place(Protocol):
    """Where jobs are made. All methods raise JobError or GatewayError."""

    @property
    def names_its_job(self) -> bool:
        """Whether ``find_job`` needs no name."""

    def start(self, asked: JobAsked) -> RunningJob:
        """Makes the job and waits until it is up, or leaves nothing behind."""

    def find_job(self, name: str | None, namespace: str) -> RunningJob:
        """The running job of this name. Raises JobNotRunning."""

    def runs(self, job: RunningJob) -> bool: ...

    def end(self, job: RunningJob) -> None: ...

    def dialer(self, job: RunningJob) -> Dialer: ...


__all__ = ["ImageSpec", "KubernetesJob"]

DEFAULT_TIMEOUT = 900.0
DEFAULT_MESH = "workers"


class KubernetesJob(JobTrait):
    """Worker pods in a cluster, and a gateway of the job's own.

    ``compute`` describes pods to make, ``selector`` finds existing ones; either is the mesh ``workers``. More meshes,
    or others, come by :meth:`add_mesh`. With none of them the job called ``name`` is looked for, and used as it is.
    ``timeout`` is how long, in seconds, ``apply`` waits for the pods (default: ``compute.launch_timeout``, else 900).
    ``lease`` is how long, in seconds (14400), a session waits for a driver that went away without a word: it is killed,
    or its laptop is. Only then does the time that a forgotten job has left begin.
    ``gateway_url`` (default: ``$MESHGATE_URL`` or ``$KT_API_URL``) reaches the gateway through an ingress, rather
    than by a port-forward; ``$MESHGATE_CA`` is a file of certificates to trust there besides the system's.
    The driver's code follows: each ``state`` brings ``sync_dirs`` (default: the git root around the working directory
    or the script, where there is one) to the pods, and with ``watch`` so does every save; ``job.sync()`` does it at any
    time.
    ``use_websocket=False`` is refused: there is no other way. Raises ValueError or TypeError at once on what cannot
    be right; the cluster is asked nothing before ``apply`` or ``state``.
    """

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
    ) -> None:
        super().__init__()
        if not use_websocket:
            raise ValueError("KubernetesJob(use_websocket=False): the gateway is reached by a websocket only")
        if compute is not None and selector is not None:
            raise ValueError("KubernetesJob(compute=…, selector=…): pods are either made or found; give one of them")
        self._sync_dirs, self._watch = _directories(sync_dirs), watch
        meshes: tuple[MeshAsked, ...] = ()
        if compute is not None:
            meshes = (mesh_of_compute(DEFAULT_MESH, compute, port=monarch_port),)
            self._images[DEFAULT_MESH] = compute.image
        elif selector is not None:
            meshes = (mesh_of_selector(DEFAULT_MESH, selector, port=monarch_port),)
        launch_timeout = compute.launch_timeout if compute is not None else None
        self._asked = _checked(
            name=check_job_name(name) if name is not None else None,
            namespace=_one_namespace(namespace, compute.namespace if compute is not None else None),
            meshes=meshes,
            idle_timeout=compute.inactivity_ttl if compute is not None else DEFAULT_INACTIVITY_TTL,
            lease=lease if lease is not None else DEFAULT_LEASE,
            timeout=timeout if timeout is not None else launch_timeout or DEFAULT_TIMEOUT,
            gateway_url=gateway_url or os.environ.get("MESHGATE_URL") or os.environ.get("KT_API_URL") or None,
            kubeconfig=_kubeconfig_path(kubeconfig),
        )
        self._found: RunningJob | None = None
        self._where: Place | None = None
        self._client: Client | None = None

    def __repr__(self) -> str:
        name = self.name or "(not named yet)"
        meshes = {mesh.name: mesh.replicas for mesh in self._asked.meshes}
        return f"KubernetesJob({name}, namespace={self._asked.namespace!r}, {meshes})"

    @property
    def name(self) -> str | None:
        """The job's name; one that is made up is known once the job is applied."""
        running = self._running
        found = running._found if isinstance(running, KubernetesJob) else None
        return found.name if found is not None else self._asked.name

    @property
    def namespace(self) -> str:
        return self._asked.namespace

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
        """Adds a mesh of ``num_replicas`` pods, as Monarch's ``add_mesh``; one of the same name is replaced.

        Pods are found by ``label_selector`` (default: those of the MonarchMesh ``name``), or made from
        ``image_spec``, from ``pod_spec`` (a V1PodSpec, a V1PodTemplateSpec, or the same as a dict), or from
        ``compute``. ``labels`` and ``annotations`` are put on the StatefulSet or MonarchMesh.
        Raises ValueError on an invalid name or on arguments that contradict each other, TypeError on wrong types.
        """
        if self.active:
            raise JobError("meshes are added before apply(): this job runs already")
        if pod_spec is not None and pod_template is not None:
            raise ValueError("'pod_spec' and 'pod_template' are the same: give one of them.")
        raw = pod_spec if pod_spec is not None else pod_template
        self._images.pop(name, None)
        if compute is not None:
            if image_spec is not None or raw is not None or label_selector is not None:
                raise ValueError("'compute' describes the pods: 'image_spec', 'pod_spec' and 'label_selector' do too.")
            require_count(name, num_replicas)
            given = {"port": port, "labels": labels, "annotations": annotations, "owner": "add_mesh"}
            mesh = mesh_of_compute(name, compute, num_replicas, **given)
            self._images[name] = compute.image
        else:
            mesh = mesh_like_monarch(
                name, num_replicas, label_selector, pod_rank_label, image_spec, port, raw, labels, annotations
            )
        self._asked = self._asked.with_mesh(mesh)

    # --- what JobTrait asks for

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise JobError("KubernetesJob cannot run batch-mode scripts")
        place = self._place()
        if self._asked.meshes:
            self._found = place.start(self._asked)
        elif place.names_its_job or self._asked.name is not None:
            self._found = place.find_job(self._asked.name, self._asked.namespace)
        else:
            raise ValueError(
                "KubernetesJob: nothing is asked for. Pass compute= or selector=, call add_mesh(), or name a job that "
                "runs (name=, namespace=)"
            )

    def _state(self) -> JobState:
        found = self._found
        if found is None:
            raise JobNotRunning(f"{self!r} is not running")
        if self._client is not None and self._client.closed:
            self._client.close()
            self._client = None
        if self._client is None:
            self._client = Client.connect(self._place().dialer(found))
        client = self._client
        state = self._attached = attached(client, found.meshes, self._attached)
        return state

    def _bring_code(self, running: JobTrait) -> None:
        from meshgate.jobs.code import in_repository, sync_of  # noqa: PLC0415 - it imports what jobs are made of

        assert isinstance(running, KubernetesJob)
        assert running._client is not None
        if running._client.code_version is not None:
            sync_of(running, None).follow(watch=self._watch)  # the tree that is synced, whoever chose it
        elif self._sync_dirs is not None or in_repository():
            sync_of(running, self._sync_dirs).follow(watch=self._watch)

    def _kill(self) -> None:
        try:
            if self._client is not None:
                self._client.close()
                self._client = None
        finally:  # a second Ctrl-C, while the session ends, must not leave the pods
            if self._found is not None:
                self._place().end(self._found)
                self._found = None

    def _is_running(self) -> bool:
        return self._found is not None and self._place().runs(self._found)

    def can_run(self, spec: JobTrait) -> bool:
        """Whether ``spec`` is a KubernetesJob that asks for just this, and the job is still there."""
        return isinstance(spec, KubernetesJob) and self._asked.same_as(spec._asked) and self._is_running()

    def _spec(self) -> dict[str, Any]:
        return self._asked.model_dump(mode="json", exclude_defaults=True)

    def _allocation(self) -> dict[str, Any]:
        if self._found is None:
            raise JobNotRunning(f"{self!r} is not running")
        return self._found.model_dump(mode="json")

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self:
        job = cls()
        job._asked = JobAsked.model_validate(spec)
        if allocation is not None:
            from meshgate_kubernetes.jobs import RunningJob  # noqa: PLC0415

            job._found = RunningJob.model_validate(allocation)
        return job

    def _place(self) -> Place:
        """Who makes, finds and ends the job: the cluster that a kubeconfig leads to, or the gateway behind a URL."""
        if self._where is None:
            self._where = _find_place(self._asked)
        return self._where


def _find_place(asked: JobAsked) -> Place:
    # What these import takes a fifth of a second, and not every program has a job in a cluster.
    ca = os.environ.get("MESHGATE_CA") or None
    if asked.gateway_url is not None and asked.kubeconfig is None:
        from meshgate.kubernetes.remote import RemoteGateway, token_here  # noqa: PLC0415

        return RemoteGateway(asked.gateway_url, token_here(), ca)
    from meshgate.kubernetes.cluster import Cluster  # noqa: PLC0415

    return Cluster.find(asked.kubeconfig, url=asked.gateway_url, ca=ca)


def _checked(**given: Any) -> JobAsked:
    try:
        return JobAsked(**given)
    except ValidationError as error:
        raise ValueError(describe("KubernetesJob", error)) from None


def _one_namespace(job: str, compute: str | None) -> str:
    if compute and job not in ("default", compute):
        raise ValueError(f"KubernetesJob(namespace={job!r}, compute=Compute(namespace={compute!r})): give one of them")
    return compute or job


def _directories(given: Any) -> list[str] | None:
    """Checked before there are pods: a tree that is not there is better told now."""
    if given is None:
        return None
    paths = [os.fspath(path) for path in listed("KubernetesJob", "sync_dirs", given)]
    if missing := [path for path in paths if not os.path.isdir(os.path.expanduser(path))]:
        raise ValueError(f"KubernetesJob(sync_dirs=…): {missing[0]!r} is no directory here")
    return paths


def _kubeconfig_path(given: Any) -> str | None:
    """A path, or Monarch's ``KubeConfig``."""
    if given is None:
        return None
    path = getattr(given, "local", given)
    if path is None:
        raise ValueError("KubernetesJob(kubeconfig=…): pass the path of a kubeconfig file")
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"KubernetesJob(kubeconfig={path!r}): pass the path of a kubeconfig file")
    return str(os.path.expanduser(os.fspath(path)))
