"""What a job asks of a cluster, as data: checked here, before anything is created, and by name.

The same models are what the client renders to objects itself, what a gateway takes over HTTP when it
provisions for a pod without rights, and what the job's ConfigMap holds for whoever finds the job later.
Unknown fields are refused rather than ignored: a misspelt ``tolerations`` must not cost an hour of waiting.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from meshgate_kubernetes.names import (
    POD_INDEX_LABEL,
    Names,
    check_job_name,
    check_mesh_name,
    is_label_key,
    is_label_value,
    is_object_name,
)
from meshgate_kubernetes.quantity import parse_quantity
from meshgate_kubernetes.selectors import LABEL_RULE, parse_selector

__all__ = ["JobName", "JobSpec", "MeshSpec", "Namespace", "Object", "VolumeMount", "WorkerSpec"]

Object: TypeAlias = dict[str, Any]
"""A Kubernetes object, or a part of one, as JSON."""

DEFAULT_PORT = 26600
DEFAULT_LEASE = 14_400.0
GPU_RESOURCE = "nvidia.com/gpu"
GPU_TYPE_LABEL = "nvidia.com/gpu.product"


def _quantity(value: str) -> str:
    if parse_quantity(value) <= 0:
        raise ValueError(f"{value!r} asks for nothing; leave it out instead")
    return value


def _size(value: str) -> str:
    if parse_quantity(_quantity(value)) < _LEAST_SIZE:
        raise ValueError(f"{value!r} is less than 1Mi: say the unit as well, as in 16Gi")
    return value


def _cpus(value: str) -> str:
    if parse_quantity(_quantity(value)) > _MOST_CPUS:
        raise ValueError(f"{value!r} is more than any machine has: say cores, as in 4, or thousandths, as in 500m")
    return value


def _object_name(name: str) -> str:
    if not is_object_name(name):
        raise ValueError(f"{name!r} is no name of an object: lower-case letters, digits, '-' and '.'")
    return name


def _resources(resources: dict[str, str]) -> dict[str, str]:
    for name, amount in resources.items():
        if name in _ORDINARY_RESOURCES or name.startswith("hugepages-"):
            continue
        if "/" not in name or not is_label_key(name):
            raise ValueError(f"{name!r} is no resource: write it with its vendor, such as {GPU_RESOURCE} or rdma/hca")
        if parse_quantity(amount) % 1:
            raise ValueError(f"{amount!r} of {name}: only whole ones are handed out")
    return resources


def _toleration(toleration: Object) -> Object:
    if unknown := set(toleration) - _TOLERATION_FIELDS:
        fields = ", ".join(sorted(_TOLERATION_FIELDS))
        raise ValueError(f"a toleration has no {', '.join(sorted(map(repr, unknown)))}: it has {fields}")
    return toleration


def _labels(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        if not is_label_key(key):
            raise ValueError(f"{key!r} is not a label key: {LABEL_RULE}, after an optional prefix/")
        if not is_label_value(value):
            raise ValueError(f"{value!r}, of {key!r}, is not a label value: {LABEL_RULE}")
    return labels


def _annotations(annotations: dict[str, str]) -> dict[str, str]:
    for key in annotations:
        if not is_label_key(key):
            raise ValueError(f"{key!r} is not an annotation key")
    return annotations


def _environment(variables: dict[str, str]) -> dict[str, str]:
    for name in variables:
        if not name or "=" in name or not name.isprintable():
            raise ValueError(f"{name!r} is not the name of an environment variable")
        if name in _OWN_VARIABLES:
            raise ValueError(f"{name} is set by meshgate itself")
    return variables


_OWN_VARIABLES = frozenset({"POD_IP", "POD_NAME", "POD_NAMESPACE", "MESHGATE_TOKEN"})
_OWN_MOUNTS = ("/tmp", "/home/meshgate")
_ORDINARY_RESOURCES = frozenset({"cpu", "memory", "ephemeral-storage"})
_TOLERATION_FIELDS = frozenset({"key", "operator", "value", "effect", "tolerationSeconds"})
# fmt: off
_VOLUME_KINDS = frozenset((
    "awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "configMap", "csi", "downwardAPI",
    "emptyDir", "ephemeral", "fc", "flexVolume", "flocker", "gcePersistentDisk", "gitRepo", "glusterfs",
    "hostPath", "image", "iscsi", "nfs", "persistentVolumeClaim", "photonPersistentDisk", "portworxVolume",
    "projected", "quobyte", "rbd", "scaleIO", "secret", "storageos", "vsphereVolume",
))
# fmt: on
_LEAST_SIZE, _MOST_CPUS = 1 << 20, 10_000

Quantity: TypeAlias = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_quantity)]
Cpus: TypeAlias = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_cpus)]
Size: TypeAlias = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_size)]
ObjectName: TypeAlias = Annotated[str, AfterValidator(_object_name)]
LabelValue: TypeAlias = Annotated[str, AfterValidator(lambda value: _labels({"label": value})["label"])]
Labels: TypeAlias = Annotated[dict[str, str], AfterValidator(_labels)]
Annotations: TypeAlias = Annotated[dict[str, str], AfterValidator(_annotations)]
Environment: TypeAlias = Annotated[dict[str, str], AfterValidator(_environment)]
JobName: TypeAlias = Annotated[str, AfterValidator(check_job_name)]
Namespace: TypeAlias = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
PullPolicy: TypeAlias = Literal["Always", "IfNotPresent", "Never"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class VolumeMount(_Model):
    """A volume (Kubernetes' own words, without its name) and where the worker sees it."""

    mount_path: str = Field(pattern=r"^/[^:]*$")
    source: Object
    read_only: bool = False

    @field_validator("source")
    @classmethod
    def _is_of_one_kind(cls, source: Object) -> Object:
        # An API server takes a kind that it does not know for an empty directory.
        if len(source) != 1 or not set(source) <= _VOLUME_KINDS:
            given = ", ".join(sorted(source)) or "nothing"
            raise ValueError(f"a volume is of one kind, such as emptyDir, configMap or nfs, not of {given}")
        return source


class WorkerSpec(_Model):
    """One worker pod of a mesh. Names are Kubetorch's; what they become is told in ``docs/kubernetes.md``."""

    image: str = Field(min_length=1, max_length=1024)
    cpu: Cpus | None = None
    memory: Size | None = None
    disk_size: Size | None = None
    gpus: int = Field(default=0, ge=0, le=1024)
    gpu_type: str | None = Field(default=None, min_length=1)
    resources: Annotated[dict[str, Quantity], AfterValidator(_resources)] = {}
    """Other resources by their full names, such as ``rdma/hca``."""
    env_vars: Environment = {}
    secrets: tuple[ObjectName, ...] = ()
    """Secrets whose keys become environment variables."""
    labels: Labels = {}
    annotations: Annotations = {}
    node_selector: Labels = {}
    tolerations: tuple[Annotated[Object, AfterValidator(_toleration)], ...] = ()
    volumes: tuple[VolumeMount, ...] = ()
    priority_class_name: ObjectName | None = None
    service_account_name: ObjectName | None = None
    image_pull_policy: PullPolicy | None = None
    image_pull_secrets: tuple[ObjectName, ...] = ()
    shared_memory_limit: Size | None = None
    queue_name: Annotated[LabelValue, Field(min_length=1)] | None = None
    fuse: bool = False
    """Privileged, with the host's ``/dev/fuse``: what Monarch's remote mounts need."""
    pod_spec: Object = {}
    """Raw fields laid over the pod specification that the others make."""
    template: Object | None = None
    """A whole pod template, taken as it is in place of all of the above: Monarch's ``pod_spec``."""

    @field_validator("gpu_type")
    @classmethod
    def _gpu_type_is_a_label_value(cls, value: str | None) -> str | None:
        if value is not None:
            _labels({GPU_TYPE_LABEL: value} if "=" not in value else dict([value.split("=", 1)]))
        return value

    @model_validator(mode="after")
    def _gpu_type_needs_gpus(self) -> WorkerSpec:
        if self.gpu_type is not None and not self.gpus:
            raise ValueError("gpu_type without gpus: say how many of them, gpus=1 for instance")
        return self

    @model_validator(mode="after")
    def _nothing_is_said_twice(self) -> WorkerSpec:
        said = {"cpu": self.cpu, "memory": self.memory, "ephemeral-storage": self.disk_size, GPU_RESOURCE: self.gpus}
        if twice := [name for name, value in said.items() if value and name in self.resources]:
            raise ValueError(f"{twice[0]} is in resources, and has an argument of its own: say it once")
        taken = {*_OWN_MOUNTS, *(["/dev/shm"] if self.shared_memory_limit else [])}
        for volume in self.volumes:
            path = volume.mount_path.rstrip("/") or "/"
            if path in taken:
                raise ValueError(f"mount path {path!r} is taken already: mount the volume elsewhere")
            taken.add(path)
        return self


class MeshSpec(_Model):
    """A named mesh of worker pods: how many, and which pods they are.

    ``way`` says who makes the pods: ``statefulset`` and ``monarchmesh`` are made for the job (``worker`` is
    set), with ``selector`` they exist already and are only found by it.
    """

    name: Annotated[str, AfterValidator(check_mesh_name)]
    replicas: int = Field(ge=0, le=65_536)
    """How many pods. 0, for existing pods alone: as many as the selector finds."""
    way: Literal["statefulset", "monarchmesh", "selector"]
    selector: str
    rank_label: str = POD_INDEX_LABEL
    port: int = Field(default=DEFAULT_PORT, ge=1, le=65_535)
    worker: WorkerSpec | None = None
    labels: Labels = {}
    """On the StatefulSet or MonarchMesh itself."""
    annotations: Annotations = {}

    @model_validator(mode="after")
    def _worker_and_way_agree(self) -> MeshSpec:
        if (self.worker is None) != (self.way == "selector"):
            raise ValueError(f"mesh {self.name!r}: a worker is for pods that are made, a selector for pods that exist")
        if self.way != "selector" and self.replicas < 1:
            raise ValueError(f"mesh {self.name!r}: replicas must be at least 1, not {self.replicas}")
        parse_selector(self.selector)
        return self


class JobSpec(_Model):
    """A whole job, and what the gateway pod of its own needs to know."""

    name: JobName
    namespace: Namespace
    meshes: tuple[MeshSpec, ...] = Field(min_length=1, max_length=64)
    gateway_image: str = Field(min_length=1, max_length=1024)
    gateway_pull_policy: PullPolicy | None = None
    image_pull_secrets: tuple[str, ...] = ()
    idle_timeout: int = Field(default=0, ge=0)
    """Seconds without a session after which the job deletes itself; 0: never."""
    lease: float = Field(default=DEFAULT_LEASE, gt=0, allow_inf_nan=False)
    """Seconds that a session is kept for a program that went away without a word."""

    @model_validator(mode="after")
    def _names_fit(self) -> JobSpec:
        names = [mesh.name for mesh in self.meshes]
        if duplicates := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"meshes named twice: {', '.join(sorted(duplicates))}")
        for mesh in self.meshes:
            if mesh.way != "selector":
                Names(self.name).mesh(mesh.name)
        return self

    def mesh(self, name: str) -> MeshSpec | None:
        return next((mesh for mesh in self.meshes if mesh.name == name), None)
