"""Compute: the resources of each worker of a job, under Kubetorch's names.

Every value is validated in the constructor, so an invalid one never reaches a cluster.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from meshgate.images.image import Image
from meshgate.suggestions import explains_arguments
from meshgate_kubernetes.manifests.spec import GPU_RESOURCE, GatewaySpec, PullPolicy, VolumeMount, WorkerSpec

DEFAULT_INACTIVITY_TTL = 3600
DEFAULT_LAUNCH_TIMEOUT = 900
MAX_DURATION = 3650 * 86_400
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)?")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_RESERVED_LABELS = ("meshgate.dev/", "app.kubernetes.io/component", "app.kubernetes.io/managed-by")
_IMAGE_FIELDS = {"image", "image_pull_policy", "image_pull_secrets"}


class Compute:
    """``replicas`` worker pods (default: 1), each with these resources.

    ``gpu`` and ``cpu`` are aliases of ``gpus`` and ``cpus``. ``cpus`` sets a request; ``memory``, ``disk_size`` and
    ``gpus`` set request and limit. ``gpu_type`` is the product label of GPU feature discovery
    (``NVIDIA-A100-SXM4-80GB``), or ``label=value`` for another node label. ``secrets`` are existing Secrets whose
    keys become environment variables; ``volumes`` are existing claims (``"claim:/mount/path"``) or volumes as in a pod
    spec, with ``mountPath``. ``queue_name`` is a Kueue queue. ``launch_timeout`` and ``inactivity_ttl`` are seconds or
    text such as ``"30m"``; the job ends after ``inactivity_ttl`` without a session (default: one hour; 0: never).
    ``selector`` uses existing pods instead, ``replicas`` of them (default: all). ``pod_spec`` is merged over the pod
    that the other arguments describe. ``install_monarch`` is for images without torchmonarch: each pod installs it with
    pip before it is ready, and so does the gateway, with meshgate, if no image of its own is named. ``spot`` says
    whether pods may run on nodes that the provider may take back: ``"allow"``, ``"never"``, or ``"avoid"``, if there
    are others (default: workers may, a gateway avoids them). Raises TypeError on an unknown argument or a wrong type,
    ValueError on an invalid value.
    """

    @explains_arguments()
    def __init__(
        self,
        cpus: str | float | None = None,
        memory: str | None = None,
        disk_size: str | None = None,
        gpus: str | int | None = None,
        gpu_type: str | None = None,
        gpu_memory: str | None = None,
        priority_class_name: str | None = None,
        namespace: str | None = None,
        image: Image | str | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        volumes: Sequence[str | Mapping[str, Any]] = (),
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Mapping[str, Any]] = (),
        env_vars: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
        service_account_name: str | None = None,
        image_pull_policy: str | None = None,
        image_pull_secrets: Sequence[str] = (),
        inactivity_ttl: str | float | None = DEFAULT_INACTIVITY_TTL,
        launch_timeout: str | float | None = DEFAULT_LAUNCH_TIMEOUT,
        shared_memory_limit: str | None = None,
        replicas: int | None = None,
        queue_name: str | None = None,
        selector: Mapping[str, str] | str | None = None,
        *,
        gpu: str | int | None = None,
        cpu: str | float | None = None,
        resources: Mapping[str, str | int] | None = None,
        pod_spec: Any = None,
        install_monarch: bool = False,
        spot: str | None = None,
    ) -> None:
        if gpu_memory is not None:
            raise ValueError(
                "Compute(gpu_memory=…): Kubernetes allocates whole GPUs; use gpus= for their number and gpu_type= for "
                "their size"
            )
        self.image = _as_image(image)
        # 0: all pods that match the selector
        self.replicas = int(selector is None) if replicas is None else _check_replicas(replicas)
        self.namespace = namespace
        self.selector = selector_text(selector) if selector is not None else None
        self.inactivity_ttl = seconds("Compute", "inactivity_ttl", inactivity_ttl)
        self.launch_timeout = seconds("Compute", "launch_timeout", launch_timeout) or None
        self.worker = _worker_spec(
            image=self.image.reference or default_worker_image(),
            cpu=_either("cpus", cpus, "cpu", cpu),
            memory=memory,
            disk_size=disk_size,
            gpus=_check_gpus(_either("gpus", gpus, "gpu", gpu)),
            gpu_type=_normalize_gpu_type(gpu_type),
            resources=resources,
            env_vars=env_vars,
            secrets=secrets,
            labels=labels,
            annotations=annotations,
            node_selector=node_selector,
            tolerations=tolerations,
            volumes=volumes,
            priority_class_name=priority_class_name,
            service_account_name=service_account_name,
            image_pull_policy=image_pull_policy,
            image_pull_secrets=image_pull_secrets,
            shared_memory_limit=shared_memory_limit,
            queue_name=queue_name,
            install_monarch=install_monarch,
            spot=spot,
            pod_spec=_check_pod_spec(pod_spec),
        )
        if self.selector is not None:
            _require_only_selector(self.image, self.worker)

    def __repr__(self) -> str:
        fields = self.worker.model_dump(exclude_defaults=True)
        if self.selector is not None:
            fields = {"selector": self.selector}
        if self.replicas:
            fields["replicas"] = self.replicas
        return f"Compute({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def default_worker_image() -> str:
    """``$MESHGATE_WORKER_IMAGE``, or the worker image of this version of meshgate."""
    return os.environ.get("MESHGATE_WORKER_IMAGE") or _published_image("worker")


def default_gateway_image() -> str:
    """``$MESHGATE_GATEWAY_IMAGE``, or the gateway image of this version of meshgate."""
    return own_gateway_image() or _published_image("gateway")


def own_gateway_image() -> str | None:
    return os.environ.get("MESHGATE_GATEWAY_IMAGE") or None


def _published_image(target: str) -> str:
    from meshgate_wire.handshake import SOFTWARE_VERSION  # noqa: PLC0415

    return f"ghcr.io/meshgate/meshgate-{target}:{SOFTWARE_VERSION}"


def seconds(owner: str, name: str, value: str | float | None) -> int:
    """``value`` (seconds, or ``"90s"``, ``"30m"``, ``"4h"``, ``"1d"``) in seconds; None and 0 are 0."""
    try:
        return 0 if value is None else duration(value)
    except ValueError as error:
        raise ValueError(f"{owner}({name}={value!r}): {error}") from None


def duration(value: str | float) -> int:
    """In seconds. Raises ``ValueError``, which says what is expected."""
    match = _DURATION.fullmatch(str(value).strip())
    if match is None:
        raise ValueError("expected seconds, or a duration such as '30m' or '4h'")
    number, unit = match.groups()
    found = float(number) * _UNITS[unit or ""]
    if found > MAX_DURATION:
        raise ValueError(f"at most {MAX_DURATION // _UNITS['d']} days")
    return math.ceil(found)  # a fraction of a second must not become 0


def _as_image(image: Any) -> Image:
    if image is None:
        return Image()
    if isinstance(image, str):
        return Image().from_docker(image)
    if not isinstance(image, Image):
        raise TypeError(f"Compute(image={image!r}): expected an Image(…) or a reference such as 'pytorch/pytorch'")
    return image


def _require_only_selector(image: Image, worker: WorkerSpec) -> None:
    extra = set(worker.model_dump(exclude_defaults=True)) - {"image"} | ({"image"} if image.reference else set())
    if extra:
        names = ", ".join(sorted(extra))
        raise ValueError(f"Compute(selector=…) uses existing pods and cannot change them: remove {names}")


def _check_pod_spec(raw: Any) -> Any:
    spec = as_json(raw) if raw is not None else {}
    if isinstance(spec, dict) and "spec" in spec:
        raise ValueError("Compute(pod_spec=…): expected a pod spec, not a whole pod or template: pass its 'spec'")
    if isinstance(spec, dict) and "containers" in spec:
        containers = spec["containers"] if isinstance(spec["containers"], list) else [None]
        if not all(isinstance(each, dict) and "name" in each for each in containers):
            raise ValueError("Compute(pod_spec=…): every container needs a name; meshgate's container is 'worker'")
    return spec


def _worker_spec(**fields: Any) -> WorkerSpec:
    for name in ("resources", "env_vars", "labels", "annotations", "node_selector"):
        fields[name] = as_dict("Compute", name, fields[name])
    for name in ("secrets", "tolerations", "volumes", "image_pull_secrets"):
        fields[name] = as_tuple("Compute", name, fields[name])
    fields["tolerations"] = tuple(as_json(each) for each in fields["tolerations"])
    fields["volumes"] = tuple(_as_volume(each) for each in fields["volumes"])
    reject_reserved_labels("Compute", fields["labels"])
    try:
        return WorkerSpec(**fields)
    except ValidationError as error:
        raise ValueError(validation_text("Compute", error)) from None


def _check_replicas(value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"Compute(replicas={value!r}): must be an integer of at least 1")
    return value


def _either(name: str, value: Any, alias: str, other: Any) -> Any:
    if value is not None and other is not None and str(value) != str(other):
        raise ValueError(f"Compute({name}={value!r}, {alias}={other!r}): {alias} is an alias of {name}; pass only one")
    return value if value is not None else other


def _check_gpus(gpus: Any) -> Any:
    if isinstance(gpus, bool):
        raise TypeError(f"Compute(gpus={gpus!r}): expected a number")
    return 0 if gpus is None else gpus


def _normalize_gpu_type(value: Any) -> Any:
    """Converts Kubetorch's form ``"label: value"`` to ``"label=value"``."""
    return re.sub(r"\s*:\s*", "=", value.strip()) if isinstance(value, str) else value


def _as_volume(value: Any) -> VolumeMount:
    if isinstance(value, str):
        claim, colon, path = value.partition(":")
        if not (claim and colon and path.startswith("/")):
            raise ValueError(f"Compute(volumes=[{value!r}]): expected an existing claim as 'claim:/mount/path'")
        value = {"persistentVolumeClaim": {"claimName": claim}, "mountPath": path}
    value = as_json(value)
    if not isinstance(value, dict):
        raise TypeError(f"Compute(volumes=[{value!r}]): expected 'claim:/mount/path' or a mapping")
    source = {key: each for key, each in value.items() if key not in ("name", "mountPath", "readOnly")}
    try:
        return VolumeMount(
            mount_path=value.get("mountPath", ""), source=source, read_only=bool(value.get("readOnly", False))
        )
    except ValidationError as error:
        raise ValueError(validation_text("Compute(volumes): volume", error)) from None


# A string is a sequence too: without a check, ``secrets="hf-token"`` would be eight secrets of one letter each.


def as_tuple(owner: str, name: str, value: Any) -> tuple[Any, ...]:
    """``value`` as a tuple; None is empty. Raises TypeError on a string, a mapping, or a value that is not iterable."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{owner}({name}={value!r}): expected a list, such as {name}=[…]")
    return tuple(value)


def as_dict(owner: str, name: str, value: Any) -> dict[Any, Any]:
    """``value`` as a dict; None is empty. Raises TypeError on anything but a mapping."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{owner}({name}={value!r}): expected a mapping, such as {name}={{'key': 'value'}}")
    return dict(value)


def as_json(raw: Any) -> Any:
    """``raw`` as JSON. Objects of the ``kubernetes`` package are converted by their attribute maps."""
    if isinstance(raw, Mapping):
        return {str(key): as_json(value) for key, value in raw.items()}
    if isinstance(raw, (list, tuple)):
        return [as_json(each) for each in raw]
    names = getattr(raw, "attribute_map", None)
    if isinstance(names, Mapping):
        found = {json_name: getattr(raw, name) for name, json_name in names.items()}
        return {name: as_json(value) for name, value in found.items() if value is not None}
    return raw


def reject_reserved_labels(owner: str, labels: Mapping[Any, Any]) -> None:
    """Raises ValueError on labels by which meshgate finds the objects of a job."""
    if reserved := [key for key in labels if str(key).startswith(_RESERVED_LABELS)]:
        raise ValueError(f"{owner}(labels): {reserved[0]!r} is reserved for meshgate; remove it")


def selector_text(selector: Any) -> str:
    """A label selector as text, from text or a mapping of labels. Raises TypeError on anything else."""
    if isinstance(selector, str):
        return selector
    if not isinstance(selector, Mapping):
        raise TypeError(f"selector={selector!r}: expected labels, such as {{'app': 'my-workers'}}, or text")
    for key, value in selector.items():
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise TypeError(f"selector: the value of {key!r} must be text, not {value!r}")
    return ",".join(f"{key}={value}" for key, value in selector.items())


def validation_text(owner: str, error: ValidationError) -> str:
    """The problems of a validation, one a line, each with the name of its argument."""
    lines = []
    for problem in error.errors(include_url=False):
        argument = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        value = "" if not argument or isinstance(problem["input"], (dict, list, tuple)) else f"={problem['input']!r}"
        lines.append(f"{owner}({argument}{value}): {message}" if argument else f"{owner}: {message}")
    return "\n".join(lines)


class GatewayRequest(BaseModel):
    """The gateway as the caller describes it. ``image`` is None for the default image."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str | None = None
    pull_policy: PullPolicy | None = None
    pull_secrets: tuple[str, ...] = ()
    pod: GatewaySpec = GatewaySpec()


def as_compute(unknown: Mapping[str, Any]) -> str:
    """What to write instead of keywords that are arguments of ``Compute``; "" if others are among them."""
    if not unknown.keys() <= inspect.signature(Compute).parameters.keys():
        return ""
    return f"write compute=Compute({', '.join(f'{name}={value!r}' for name, value in unknown.items())})"


def gateway_from_compute(compute: Compute | None) -> GatewayRequest:
    """Raises TypeError or ValueError on anything that a gateway cannot have."""
    if compute is None:
        return GatewayRequest()
    if not isinstance(compute, Compute):
        raise TypeError(f"KubernetesJob(gateway={compute!r}): expected a Compute(…)")
    fields = compute.worker.model_dump(exclude_defaults=True)
    extra = sorted(set(fields) - set(GatewaySpec.model_fields) - _IMAGE_FIELDS)
    if not compute.worker.install_monarch:
        extra += [f"{name} without install_monarch=True" for name in ("env_vars", "secrets") if name in fields]
    extra += ["selector"] if compute.selector is not None else []
    extra += ["image steps"] if compute.image.live_steps else []
    if extra:
        raise ValueError(f"KubernetesJob(gateway=Compute(…)): a gateway cannot have {', '.join(extra)}; remove it")
    return GatewayRequest(
        image=compute.image.reference,
        pull_policy=compute.worker.image_pull_policy,
        pull_secrets=compute.worker.image_pull_secrets,
        pod=_gateway_pod(compute.replicas, fields),
    )


def _gateway_pod(replicas: int, fields: Mapping[str, Any]) -> GatewaySpec:
    known = {name: value for name, value in fields.items() if name in GatewaySpec.model_fields}
    try:
        return GatewaySpec(replicas=replicas, **known)
    except ValidationError as error:
        raise ValueError(validation_text("KubernetesJob: gateway", error)) from None


def resolve_image(gateway: GatewayRequest, workers: Sequence[WorkerSpec]) -> tuple[str, GatewaySpec]:
    """The image of the gateway, and its pod.

    If the workers install Monarch and no image of the gateway is named, it installs itself into theirs, which has their
    version of Python, from the index that they use.
    """
    installing = next((each for each in workers if each.install_monarch), None)
    named = gateway.image or own_gateway_image()
    if installing is None or (named and not gateway.pod.install_monarch):
        return gateway.image or default_gateway_image(), gateway.pod
    pod = gateway.pod.model_dump()
    inherited = {
        "install_monarch": True,
        "env_vars": pod["env_vars"] or installing.env_vars,
        "secrets": pod["secrets"] or installing.secrets,
    }
    return gateway.image or installing.image, GatewaySpec.model_validate({**pod, **inherited})


def inherit(gateway: GatewaySpec, worker: WorkerSpec) -> GatewaySpec:
    """``gateway`` where the workers may run: what it does not say itself is taken from them.

    A pod that requests GPUs is often allowed on GPU nodes without a toleration of its own (an admission controller adds
    it), so the gateway of such workers gets one if it is bound to their nodes.
    """
    raw: dict[str, Any] = worker.template["spec"] if worker.template is not None else worker.pod_spec
    nodes = raw.get("nodeSelector") or worker.node_selector
    tolerations = tuple(raw.get("tolerations") or worker.tolerations)
    if worker.has_gpus and nodes and not gateway.node_selector:
        tolerations += ({"key": GPU_RESOURCE, "operator": "Exists"},)
    inherited = {
        "labels": worker.labels,
        "node_selector": nodes,
        "tolerations": tolerations,
        "priority_class_name": raw.get("priorityClassName") or worker.priority_class_name,
    }
    own = gateway.model_dump()
    return GatewaySpec.model_validate({**own, **{name: value for name, value in inherited.items() if not own[name]}})
