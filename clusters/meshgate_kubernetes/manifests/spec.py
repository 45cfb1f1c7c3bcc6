"""The specification of a job and its quantities, validated before anything is created.

The client turns it into objects or sends it to a provisioning gateway, and the job's ConfigMap stores it. Unknown
fields are rejected: a misspelt ``tolerations`` must not cost an hour of waiting.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from meshgate_kubernetes.manifests.names import (
    ENGINES,
    FORWARDER,
    GATEWAY,
    LABEL_RULE,
    POD_INDEX_LABEL,
    Names,
    check_job_name,
    check_mesh_name,
    is_label_key,
    is_label_value,
    is_object_name,
    parse_selector,
)

Object: TypeAlias = dict[str, Any]
"""A Kubernetes object, or a part of one, as JSON."""

DEFAULT_PORT = 26600
DEFAULT_LEASE = 14_400.0
GPU_RESOURCE = "nvidia.com/gpu"
GPU_TYPE_LABEL = "nvidia.com/gpu.product"

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|([numkMGTPE]|[KMGTPE]i)?)")
_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)},
}
_MOST = Decimal("1e24")
"""More than Kubernetes takes. Decimal has 28 digits: it could not divide much larger numbers, nor int() hold them."""


# Kubernetes quantities (``500m``, ``1.5Gi``): parsed exactly, formatted for people.


def parse_quantity(text: str | int | float) -> Decimal:
    """The value of ``text``. Raises ValueError if it is not a valid quantity."""
    match = _QUANTITY.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a Kubernetes quantity such as 2, 500m, 1.5 or 64Gi")
    number, exponent, suffix = match.groups()
    try:
        value = Decimal(number + (exponent or "")) * _SUFFIXES.get(suffix or "", Decimal(1))
    except ArithmeticError:  # the exponent is beyond those of Decimal
        value = _MOST
    if abs(value) >= _MOST:
        raise ValueError(f"{text!r} is not a Kubernetes quantity: it is out of range, which ends at 1e24")
    return value


def format_quantity(value: Decimal, resource: str = "") -> str:
    """``value`` for people: memory and storage with the largest fitting binary suffix, other resources plain."""
    if resource == "memory" or resource.endswith("storage"):
        for suffix in ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki"):
            if abs(value) >= _SUFFIXES[suffix]:
                return f"{_trim(value / _SUFFIXES[suffix])}{suffix}"
        return str(int(value))
    if resource == "cpu" and value != value.to_integral_value():
        return f"{int(value * 1000)}m"
    return _trim(value)


def _trim(value: Decimal) -> str:
    text = f"{value:.1f}"
    return text.removesuffix(".0")


def _quantity(value: str) -> str:
    if parse_quantity(value) <= 0:
        raise ValueError(f"{value!r} must be greater than 0; omit it instead")
    return value


def _size(value: str) -> str:
    if parse_quantity(_quantity(value)) < _LEAST_SIZE:
        raise ValueError(f"{value!r} is less than 1Mi: give a unit, as in 16Gi")
    return value


def _cpus(value: str) -> str:
    if parse_quantity(_quantity(value)) > _MOST_CPUS:
        raise ValueError(f"{value!r} is more CPUs than any machine has: give cores, as in 4, or millicores, as in 500m")
    return value


def _object_name(name: str) -> str:
    if not is_object_name(name):
        raise ValueError(f"invalid object name {name!r}: use lower-case letters, digits, '-' and '.'")
    return name


def _resources(resources: dict[str, str]) -> dict[str, str]:
    for name, amount in resources.items():
        if name in _ORDINARY_RESOURCES or name.startswith("hugepages-"):
            continue
        if "/" not in name or not is_label_key(name):
            raise ValueError(f"unknown resource {name!r}: give its full name, such as {GPU_RESOURCE} or rdma/hca")
        if parse_quantity(amount) % 1:
            raise ValueError(f"invalid amount {amount!r} of {name}: use a whole number")
    return resources


def _toleration(toleration: Object) -> Object:
    if unknown := set(toleration) - _TOLERATION_FIELDS:
        fields = ", ".join(sorted(_TOLERATION_FIELDS))
        raise ValueError(f"unknown toleration field {', '.join(sorted(map(repr, unknown)))}: use {fields}")
    return toleration


def _labels(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        if not is_label_key(key):
            raise ValueError(f"invalid label key {key!r}: use {LABEL_RULE}, after an optional prefix/")
        if not is_label_value(value):
            raise ValueError(f"invalid value {value!r} of label {key!r}: use {LABEL_RULE}")
    return labels


def _annotations(annotations: dict[str, str]) -> dict[str, str]:
    for key in annotations:
        if not is_label_key(key):
            raise ValueError(f"invalid annotation key {key!r}: use {LABEL_RULE}, after an optional prefix/")
    return annotations


def _environment(variables: dict[str, str]) -> dict[str, str]:
    for name in variables:
        if not name or "=" in name or not name.isprintable():
            raise ValueError(f"invalid name {name!r} of an environment variable")
        if name in _OWN_VARIABLES:
            raise ValueError(f"{name} is reserved: meshgate sets it")
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
Spot: TypeAlias = Literal["allow", "avoid", "never"]
"""Whether a pod may run on nodes that the provider may take back at any time: ``avoid`` only if there are no others."""
PullPolicy: TypeAlias = Literal["Always", "IfNotPresent", "Never"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class VolumeMount(_Model):
    """A volume source in the Kubernetes API's format, and its mount path in the worker."""

    mount_path: str = Field(pattern=r"^/[^:]*$")
    source: Object
    read_only: bool = False

    @field_validator("source")
    @classmethod
    def _check_type(cls, source: Object) -> Object:
        # The API server treats an unknown type as an emptyDir.
        if len(source) != 1 or not set(source) <= _VOLUME_KINDS:
            types = ", ".join(sorted(source)) or "nothing"
            raise ValueError(f"a volume needs one type, such as emptyDir, configMap or nfs, not {types}")
        return source


class WorkerSpec(_Model):
    """The worker pods of a mesh. Field names are Kubetorch's; ``docs/kubernetes.md`` explains them."""

    image: str = Field(min_length=1, max_length=1024)
    cpu: Cpus | None = None
    memory: Size | None = None
    disk_size: Size | None = None
    gpus: int = Field(default=0, ge=0, le=1024)
    gpu_type: str | None = Field(default=None, min_length=1)
    resources: Annotated[dict[str, Quantity], AfterValidator(_resources)] = {}
    """Other resources by full name, such as ``rdma/hca``."""
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
    spot: Spot | None = None
    cpu_is_limit: bool = False
    """Whether ``cpu`` is a limit as well, which it is only where the namespace asks for one."""
    install_monarch: bool = False
    """Installs torchmonarch in each pod before the worker starts, for images without it."""
    fuse: bool = False
    """Runs privileged with the host's ``/dev/fuse``, as Monarch's remote mounts require."""
    pod_spec: Object = {}
    """Raw fields merged over the generated pod specification."""
    template: Object | None = None
    """A complete pod template that replaces all of the above (Monarch's ``pod_spec``)."""

    @property
    def has_gpus(self) -> bool:
        return self.gpu_count > 0

    @property
    def gpu_count(self) -> int:
        """The GPUs of a pod, of any vendor."""
        others = (amount for name, amount in self.resources.items() if name.endswith("/gpu"))
        return self.gpus + sum(int(parse_quantity(amount)) for amount in others)

    @field_validator("gpu_type")
    @classmethod
    def _check_gpu_label(cls, value: str | None) -> str | None:
        if value is not None:
            _labels({GPU_TYPE_LABEL: value} if "=" not in value else dict([value.split("=", 1)]))
        return value

    @model_validator(mode="after")
    def _check_gpu_type(self) -> WorkerSpec:
        if self.gpu_type is not None and not self.gpus:
            raise ValueError("gpu_type requires gpus, the number of GPUs (such as gpus=1)")
        return self

    @model_validator(mode="after")
    def _check_duplicates(self) -> WorkerSpec:
        fields = {"cpu": self.cpu, "memory": self.memory, "ephemeral-storage": self.disk_size, GPU_RESOURCE: self.gpus}
        if duplicates := [name for name, value in fields.items() if value and name in self.resources]:
            raise ValueError(f"{duplicates[0]} is given twice: remove it from resources, or its own argument")
        taken = {*_OWN_MOUNTS, *(["/dev/shm"] if self.shared_memory_limit else [])}
        for volume in self.volumes:
            path = volume.mount_path.rstrip("/") or "/"
            if path in taken:
                raise ValueError(f"mount path {path!r} is already in use: choose another path")
            taken.add(path)
        return self


class GatewaySpec(_Model):
    """The gateway's pod, apart from its image."""

    replicas: int = Field(default=1, ge=1, le=16)
    """More than 1: so many pods forward to the one with the engines, which alone has ``cpu`` and ``memory``."""
    cpu: Cpus | None = None
    memory: Size | None = None
    disk_size: Size | None = None
    labels: Labels = {}
    annotations: Annotations = {}
    node_selector: Labels = {}
    tolerations: tuple[Annotated[Object, AfterValidator(_toleration)], ...] = ()
    priority_class_name: ObjectName | None = None
    spot: Spot | None = None
    """None: it avoids them, because every session ends with this pod."""
    service_account_name: ObjectName | None = None
    """An existing account with the permissions of ``gateway_rules``; None: the job creates one."""
    install_monarch: bool = False
    """Installs torchmonarch and the meshgate that creates the job before the gateway starts, for images without it."""
    env_vars: Environment = {}
    secrets: tuple[ObjectName, ...] = ()
    """As those of workers, for the installation: pip reads its settings from them. Unused without one."""


class MeshSpec(_Model):
    """A named mesh of worker pods.

    ``way`` says where the pods come from: a ``statefulset`` or ``monarchmesh`` creates them for the job (``worker`` is
    set); with ``selector`` the job uses existing pods.
    """

    name: Annotated[str, AfterValidator(check_mesh_name)]
    replicas: int = Field(ge=0, le=65_536)
    """The number of pods. 0 (existing pods only): as many as the selector matches."""
    way: Literal["statefulset", "monarchmesh", "selector"]
    selector: str
    rank_label: str = POD_INDEX_LABEL
    port: int = Field(default=DEFAULT_PORT, ge=1, le=65_535)
    worker: WorkerSpec | None = None
    labels: Labels = {}
    """On the StatefulSet or MonarchMesh itself."""
    annotations: Annotations = {}

    @model_validator(mode="after")
    def _check_way(self) -> MeshSpec:
        if (self.worker is None) != (self.way == "selector"):
            raise ValueError(
                f"mesh {self.name!r}: give a worker for new pods or way='selector' for existing pods, not both"
            )
        if self.way != "selector" and self.replicas < 1:
            raise ValueError(f"mesh {self.name!r}: replicas must be at least 1, not {self.replicas}")
        parse_selector(self.selector)
        return self


class JobSpec(_Model):
    """A job: its meshes, and the settings of its gateway pod."""

    name: JobName
    namespace: Namespace
    meshes: tuple[MeshSpec, ...] = Field(min_length=1, max_length=64)
    gateway_image: str = Field(min_length=1, max_length=1024)
    gateway_pull_policy: PullPolicy | None = None
    image_pull_secrets: tuple[str, ...] = ()
    gateway: GatewaySpec = GatewaySpec()
    idle_timeout: int = Field(default=0, ge=0)
    """Seconds without a session after which the job deletes itself; 0: never."""
    lease: float = Field(default=DEFAULT_LEASE, gt=0, allow_inf_nan=False)
    """Seconds that a session outlives its connection."""
    log_output: bool = True
    """Whether what actors print is also in the log of the gateway's pod."""

    @model_validator(mode="after")
    def _check_names(self) -> JobSpec:
        names = [mesh.name for mesh in self.meshes]
        if duplicates := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"duplicate mesh names: {', '.join(sorted(duplicates))}")
        for mesh in self.meshes:
            if mesh.way != "selector":
                Names(self.name).mesh(mesh.name)
        return self

    @property
    def gateway_pods(self) -> dict[str, int]:
        """How many pods the gateway has, by component."""
        replicas = self.gateway.replicas
        return {GATEWAY: 1} if replicas == 1 else {FORWARDER: replicas, ENGINES: 1}

    @property
    def gpu_count(self) -> int:
        """The GPUs of all pods that are created for the job, except those of raw pod templates."""
        return sum(mesh.replicas * mesh.worker.gpu_count for mesh in self.meshes if mesh.worker is not None)

    def mesh(self, name: str) -> MeshSpec | None:
        return next((mesh for mesh in self.meshes if mesh.name == name), None)
