"""The validated arguments of a KubernetesJob; they can be compared, saved, and turned into a JobSpec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from meshgate.errors import JobUnsupported
from meshgate.jobs.kubernetes.compute import (
    Compute,
    GatewayRequest,
    as_dict,
    as_json,
    inherit,
    reject_reserved_labels,
    resolve_image,
    selector_text,
    validation_text,
)
from meshgate.session.dialing import is_gateway_url
from meshgate_kubernetes.api.client import make_default
from meshgate_kubernetes.errors import KubernetesError
from meshgate_kubernetes.manifests.job_objects import OPERATOR_SELECTOR, statefulset_selector
from meshgate_kubernetes.manifests.names import POD_INDEX_LABEL, check_mesh_name, is_label_key, parse_selector
from meshgate_kubernetes.manifests.spec import (
    DEFAULT_LEASE,
    DEFAULT_PORT,
    Annotations,
    JobSpec,
    Labels,
    MeshSpec,
    Namespace,
    Object,
    WorkerSpec,
)


@dataclass(frozen=True)
class KubeConfig:
    """Monarch's ``KubeConfig``: a kubeconfig file. Without one, the driver runs inside the cluster."""

    local: Path | None = None
    remote: None = None

    @classmethod
    def from_path(cls, path: str) -> KubeConfig:
        """The kubeconfig file at ``path``, in which ``~`` is the home directory."""
        return cls(local=Path(path).expanduser())

    @classmethod
    def from_config(cls, config: Any) -> KubeConfig:
        """Raises JobUnsupported: other processes, such as the one that ends a job, need a file."""
        raise JobUnsupported("KubeConfig.from_config() is not supported: write a kubeconfig file and pass from_path()")

    @property
    def out_of_cluster(self) -> bool:
        """Whether the driver runs outside the cluster."""
        return self.local is not None

    def load(self) -> None:
        """Makes this the default configuration of the ``kubernetes`` package. A job does not need it.

        Raises RuntimeError if the kubeconfig, its credential plugin or the pod's service account cannot be used.
        """
        try:
            make_default(self.local)
        except KubernetesError as error:
            raise RuntimeError(f"Failed to load kubeconfig: {error}") from error


class ImageSpec(BaseModel):
    """Monarch's ``ImageSpec``: a container image and the resources of each worker pod."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str = Field(min_length=1)
    resources: dict[str, str | int] | None = None
    enable_fuse: bool = False
    shared_memory_size: str | None = None

    def __init__(
        self,
        image: str,
        resources: Mapping[str, str | int] | None = None,
        enable_fuse: bool = False,
        shared_memory_size: str | None = None,
    ) -> None:
        try:
            super().__init__(
                image=image,
                resources=as_dict("ImageSpec", "resources", resources) if resources is not None else None,
                enable_fuse=enable_fuse,
                shared_memory_size=shared_memory_size,
            )
        except ValidationError as error:
            raise ValueError(validation_text("ImageSpec", error)) from None


class MeshRequest(BaseModel):
    """One mesh: pods to create (``worker``) or existing pods (``selector``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    replicas: int
    selector: str | None = None
    rank_label: str = POD_INDEX_LABEL
    port: int = Field(default=DEFAULT_PORT, ge=1, le=65_535)
    worker: WorkerSpec | None = None
    labels: Labels = {}
    annotations: Annotations = {}

    def spec(self, job: str) -> MeshSpec:
        """The mesh as part of the job named ``job``, before it is resolved against a cluster."""
        selector = self.selector or f"{OPERATOR_SELECTOR}{self.name}"
        return MeshSpec(
            name=self.name,
            replicas=self.replicas,
            way="selector" if self.worker is None else "statefulset",
            selector=selector if self.worker is None else statefulset_selector(job, self.name),
            rank_label=self.rank_label,
            port=self.port,
            worker=self.worker,
            labels=self.labels,
            annotations=self.annotations,
        )


class JobRequest(BaseModel):
    """A job. ``name`` is None until one is generated; times are in seconds, and 0 means none. ``context`` and
    ``server`` lead to the cluster that the job was started or found in with a kubeconfig, and are empty before."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str | None = None
    namespace: Namespace = "default"
    meshes: tuple[MeshRequest, ...] = ()
    idle_timeout: int = 0
    lease: float = Field(default=DEFAULT_LEASE, gt=0, allow_inf_nan=False)
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    gateway_url: str | None = None
    kubeconfig: str | None = None
    context: str = ""
    server: str = ""
    gateway: GatewayRequest = GatewayRequest()
    log_output: bool = True

    @field_validator("gateway_url")
    @classmethod
    def _is_gateway_url(cls, value: str | None) -> str | None:
        if value is not None and not is_gateway_url(value):
            raise ValueError("expected ws://host:port or wss://host[:port]")
        return value

    def with_mesh(self, mesh: MeshRequest) -> JobRequest:
        """Adds ``mesh``, replacing a mesh of the same name, as Monarch does."""
        others = tuple(each for each in self.meshes if each.name != mesh.name)
        return self.model_copy(update={"meshes": (*others, mesh)})

    def spec(self, name: str) -> JobSpec:
        """The job as ``name``, before it is resolved against a cluster. Raises ValueError."""
        workers = [mesh.worker for mesh in self.meshes if mesh.worker is not None]
        image, gateway = resolve_image(self.gateway, workers)
        try:
            return JobSpec(
                name=name,
                namespace=self.namespace,
                meshes=tuple(mesh.spec(name) for mesh in self.meshes),
                gateway_image=image,
                gateway_pull_policy=self.gateway.pull_policy
                or next((each.image_pull_policy for each in workers if each.image_pull_policy), None),
                image_pull_secrets=tuple(
                    dict.fromkeys(
                        (*self.gateway.pull_secrets, *(name for each in workers for name in each.image_pull_secrets))
                    )
                ),
                gateway=inherit(gateway, workers[0]) if workers else gateway,
                idle_timeout=self.idle_timeout,
                lease=self.lease,
                log_output=self.log_output,
            )
        except ValidationError as error:
            raise ValueError(validation_text("KubernetesJob", error)) from None

    def same_as(self, other: JobRequest) -> bool:
        """Whether both describe the same pods in the same namespace, with the same name if both have one."""
        own, others = (
            each.model_copy(
                update={
                    **dict.fromkeys(("name", "timeout", "gateway_url", "kubeconfig")),
                    **dict.fromkeys(("context", "server"), ""),
                }
            )
            for each in (self, other)
        )
        return own == others and (self.name is None or other.name is None or self.name == other.name)


def mesh_from_compute(name: str, compute: Compute, replicas: int = 0, **options: Any) -> MeshRequest:
    """``replicas`` pods of ``compute``, or as many as it says if that is 0."""
    if not isinstance(compute, Compute):
        raise TypeError(f"compute={compute!r}: expected a Compute(…)")
    if compute.selector is not None:
        return mesh_from_selector(name, compute.selector, replicas or compute.replicas, **options)
    return _mesh(name, replicas=replicas or compute.replicas, worker=compute.worker, **options)


def mesh_from_selector(name: str, selector: Mapping[str, str] | str, replicas: int = 0, **options: Any) -> MeshRequest:
    """The existing pods that match ``selector``: ``replicas`` of them, or all if that is 0."""
    return _mesh(name, replicas=replicas, selector=_check_selector(selector), **options)


def _check_selector(selector: Mapping[str, str] | str) -> str:
    """A label selector as text. Raises TypeError or ValueError if it is invalid."""
    text = selector_text(selector)
    parse_selector(text)
    return text


def _mesh(name: str, *, owner: str = "KubernetesJob", **fields: Any) -> MeshRequest:
    check_mesh_name(name)
    for field in ("labels", "annotations"):
        if field in fields:
            fields[field] = as_dict(owner, field, fields[field])
    reject_reserved_labels(owner, fields.get("labels", {}))
    try:
        return MeshRequest(name=name, **fields)
    except ValidationError as error:
        message = validation_text(owner, error)
        raise ValueError(message if owner == "add_mesh" else message.replace("(port=", "(monarch_port=")) from None


def require_count(name: str, count: object, argument: str = "num_replicas") -> None:
    """Raises ValueError unless ``count``, an argument for mesh ``name``, is a positive integer."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"Mesh '{name}': {argument} must be at least 1, not {count!r}.")


def mesh_from_monarch_arguments(
    name: str,
    num_replicas: int,
    *,
    label_selector: str | None,
    pod_rank_label: str,
    image_spec: Any,
    port: int,
    pod_spec: Any,
    labels: Mapping[str, str] | None,
    annotations: Mapping[str, str] | None,
) -> MeshRequest:
    """A mesh from the arguments of Monarch's ``add_mesh``, with its rules."""
    check_mesh_name(name)
    _check_combination(label_selector, pod_rank_label, image_spec, pod_spec, labels, annotations)
    require_count(name, num_replicas)
    selector = _check_selector(label_selector) if label_selector is not None else None
    try:
        worker = _worker_from_monarch_arguments(image_spec, pod_spec)
    except ValidationError as error:
        raise ValueError(validation_text("add_mesh", error)) from None
    return _mesh(
        name,
        owner="add_mesh",
        replicas=num_replicas,
        selector=selector,
        rank_label=pod_rank_label,
        port=port,
        worker=worker,
        labels=labels,
        annotations=annotations,
    )


def _check_combination(
    label_selector: str | None,
    pod_rank_label: str,
    image_spec: Any,
    pod_spec: Any,
    labels: Mapping[str, str] | None,
    annotations: Mapping[str, str] | None,
) -> None:
    provisioned = image_spec is not None or pod_spec is not None
    if not isinstance(pod_rank_label, str) or not is_label_key(pod_rank_label):
        raise ValueError(f"'pod_rank_label' must be a label key, not {pod_rank_label!r}.")
    if image_spec is not None and pod_spec is not None:
        raise ValueError("'image_spec' and 'pod_spec' are mutually exclusive.")
    if provisioned and label_selector is not None:
        raise ValueError("'label_selector' cannot be customized when provisioning.")
    if provisioned and pod_rank_label != POD_INDEX_LABEL:
        raise ValueError("'pod_rank_label' cannot be customized when provisioning.")
    if not provisioned and labels is not None:
        raise ValueError("'labels' can only be set when provisioning.")
    if not provisioned and annotations is not None:
        raise ValueError("'annotations' can only be set when provisioning.")


def _worker_from_monarch_arguments(image_spec: Any, pod_spec: Any) -> WorkerSpec | None:
    if image_spec is not None and not hasattr(image_spec, "resources"):  # Monarch's own ImageSpec is accepted too
        raise TypeError(f"'image_spec' must be an ImageSpec, such as ImageSpec({image_spec!r}), not {image_spec!r}.")
    if image_spec is not None:
        resources = {str(key): str(value) for key, value in (image_spec.resources or {}).items()}
        return WorkerSpec(
            image=image_spec.image,
            resources=resources,
            fuse=image_spec.enable_fuse,
            shared_memory_limit=image_spec.shared_memory_size,
        )
    if pod_spec is None:
        return None
    template = _pod_template(as_json(pod_spec))
    return WorkerSpec(image=template["spec"]["containers"][0].get("image") or "unknown", template=template)


def _pod_template(raw: Any) -> Object:
    """A pod template, from a template or from a bare pod spec."""
    template = raw if isinstance(raw, dict) and "spec" in raw else {"spec": raw}
    spec = template["spec"]
    containers = spec.get("containers") if isinstance(spec, dict) else None
    if not isinstance(containers, list) or not containers or not all(isinstance(each, dict) for each in containers):
        raise ValueError("'pod_spec' has no containers: pass a V1PodSpec, a V1PodTemplateSpec or the same as a dict.")
    return template
