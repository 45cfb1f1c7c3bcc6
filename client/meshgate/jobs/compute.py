"""Compute: what each worker of a job gets, under Kubetorch's names.

Every value is checked when it is given, and refused by its name: nothing wrong reaches a cluster.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from meshgate.jobs.given import listed, mapped, own_labels_refused, plain, selector_text
from meshgate.jobs.image import Image
from meshgate_kubernetes.spec import VolumeMount, WorkerSpec

__all__ = ["DEFAULT_INACTIVITY_TTL", "Compute", "seconds"]

DEFAULT_INACTIVITY_TTL = 3600
DEFAULT_LAUNCH_TIMEOUT = 900
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)?")
LONGEST = 3650 * 86_400
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


class Compute:
    """``replicas`` worker pods, each with these resources.

    ``gpu`` and ``cpu`` are the same as ``gpus`` and ``cpus``. ``cpus`` is requested; ``memory``, ``disk_size`` and
    ``gpus`` are requested and limited. ``gpu_type`` is the product that GPU feature discovery labels nodes with
    (``NVIDIA-A100-SXM4-80GB``), or ``label=value`` for any other node label. ``secrets`` are existing Secrets whose
    keys become environment variables; ``volumes`` are existing claims (``"claim:/mount/path"``) or mappings of a
    volume as Kubernetes writes it, with ``mountPath``. ``queue_name`` is a Kueue queue. ``launch_timeout`` and
    ``inactivity_ttl`` are seconds or ``"30m"``; without a session for ``inactivity_ttl`` (default: an hour; 0:
    never) the job ends itself. ``selector`` finds existing pods instead, all there are or ``replicas``
    of them. ``pod_spec`` is laid over the pod that the rest describes. Raises TypeError on an argument that is unknown
    or of a wrong type, and ValueError on an impossible value.
    """

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
        replicas: int = 1,
        queue_name: str | None = None,
        selector: Mapping[str, str] | str | None = None,
        *,
        gpu: str | int | None = None,
        cpu: str | float | None = None,
        resources: Mapping[str, str | int] | None = None,
        pod_spec: Any = None,
    ) -> None:
        if gpu_memory is not None:
            raise ValueError(
                "Compute(gpu_memory=…): Kubernetes hands out whole GPUs: ask for gpus=, choose their size by gpu_type="
            )
        self.image = _image(image)
        self.replicas = _replicas(replicas)
        self.namespace = namespace
        self.selector = selector_text(selector) if selector is not None else None
        self.inactivity_ttl = seconds("Compute", "inactivity_ttl", inactivity_ttl)
        self.launch_timeout = seconds("Compute", "launch_timeout", launch_timeout) or None
        given: dict[str, Any] = {
            "image": self.image.reference or default_worker_image(),
            "cpu": _one_of("cpus", cpus, "cpu", cpu),
            "memory": memory,
            "disk_size": disk_size,
            "gpus": _whole(_one_of("gpus", gpus, "gpu", gpu)),
            "gpu_type": _gpu_type(gpu_type),
            "resources": mapped("Compute", "resources", resources),
            "env_vars": mapped("Compute", "env_vars", env_vars),
            "secrets": listed("Compute", "secrets", secrets),
            "labels": mapped("Compute", "labels", labels),
            "annotations": mapped("Compute", "annotations", annotations),
            "node_selector": mapped("Compute", "node_selector", node_selector),
            "tolerations": tuple(plain(each) for each in listed("Compute", "tolerations", tolerations)),
            "volumes": tuple(_volume(each) for each in listed("Compute", "volumes", volumes)),
            "priority_class_name": priority_class_name,
            "service_account_name": service_account_name,
            "image_pull_policy": image_pull_policy,
            "image_pull_secrets": listed("Compute", "image_pull_secrets", image_pull_secrets),
            "shared_memory_limit": shared_memory_limit,
            "queue_name": queue_name,
            "pod_spec": _pod_spec(pod_spec),
        }
        own_labels_refused("Compute", given["labels"])
        self.worker = _checked(given)
        if self.selector is not None:
            _nothing_else_than_the_selector(self.image, self.worker)

    def __repr__(self) -> str:
        asked = self.worker.model_dump(exclude_defaults=True)
        return f"Compute({', '.join(f'{name}={value!r}' for name, value in asked.items())}, replicas={self.replicas})"


def default_worker_image() -> str:
    """The worker image of this version of meshgate, or the one that ``MESHGATE_WORKER_IMAGE`` names."""
    return os.environ.get("MESHGATE_WORKER_IMAGE") or _published("worker")


def default_gateway_image() -> str:
    """The gateway image of this version of meshgate, or the one that ``MESHGATE_GATEWAY_IMAGE`` names."""
    return os.environ.get("MESHGATE_GATEWAY_IMAGE") or _published("gateway")


def _published(target: str) -> str:
    from meshgate_wire.version import SOFTWARE_VERSION  # noqa: PLC0415

    return f"ghcr.io/meshgate/meshgate-{target}:{SOFTWARE_VERSION}"


def seconds(owner: str, name: str, value: str | float | None) -> int:
    """``value`` (seconds, or ``"90s"``, ``"30m"``, ``"4h"``, ``"1d"``) in seconds; None and 0 are 0."""
    if value is None:
        return 0
    match = _DURATION.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"{owner}({name}={value!r}): say seconds, or a time such as '30m' or '4h'")
    number, unit = match.groups()
    found = float(number) * _UNITS[unit or ""]
    if found > LONGEST:
        raise ValueError(f"{owner}({name}={value!r}): at most {LONGEST // _UNITS['d']} days")
    return math.ceil(found)  # no part of a second is none


def _image(image: Any) -> Image:
    if image is None:
        return Image()
    if isinstance(image, str):
        return Image().from_docker(image)
    if not isinstance(image, Image):
        raise TypeError(f"Compute(image={image!r}): expected an Image(…) or a reference such as 'pytorch/pytorch'")
    return image


def _nothing_else_than_the_selector(image: Image, worker: WorkerSpec) -> None:
    given = set(worker.model_dump(exclude_defaults=True)) - {"image"} | ({"image"} if image.reference else set())
    if given:
        names = ", ".join(sorted(given))
        raise ValueError(f"Compute(selector=…) finds pods that exist, and they stay as they are: leave out {names}")


def _pod_spec(raw: Any) -> Any:
    spec = plain(raw) if raw is not None else {}
    if isinstance(spec, dict) and "spec" in spec:
        raise ValueError("Compute(pod_spec=…): this is a whole pod, or a template of one: pass what is under 'spec'")
    if isinstance(spec, dict) and "containers" in spec:
        containers = spec["containers"] if isinstance(spec["containers"], list) else [None]
        if not all(isinstance(each, dict) and "name" in each for each in containers):
            raise ValueError("Compute(pod_spec=…): containers have names, each its own; meshgate's is called 'worker'")
    return spec


def _checked(given: dict[str, Any]) -> WorkerSpec:
    try:
        return WorkerSpec(**given)
    except ValidationError as error:
        raise ValueError(describe("Compute", error)) from None


def describe(owner: str, error: ValidationError) -> str:
    """The problems of a validation, each by the name that was given."""
    lines = []
    for problem in error.errors(include_url=False):
        place = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        value = "" if not place or isinstance(problem["input"], (dict, list, tuple)) else f"={problem['input']!r}"
        lines.append(f"{owner}({place}{value}): {message}" if place else f"{owner}: {message}")
    return "\n".join(lines)


def _replicas(value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"Compute(replicas={value!r}): a mesh has at least one worker")
    return value


def _one_of(name: str, value: Any, alias: str, other: Any) -> Any:
    if value is not None and other is not None and str(value) != str(other):
        raise ValueError(f"Compute({name}={value!r}, {alias}={other!r}): both mean the same; give one of them")
    return value if value is not None else other


def _whole(gpus: Any) -> Any:
    if isinstance(gpus, bool):
        raise TypeError(f"Compute(gpus={gpus!r}): say how many")
    return 0 if gpus is None else gpus


def _gpu_type(value: Any) -> Any:
    """Kubetorch also writes ``"label: value"``."""
    return re.sub(r"\s*:\s*", "=", value.strip()) if isinstance(value, str) else value


def _volume(given: Any) -> VolumeMount:
    if isinstance(given, str):
        claim, colon, path = given.partition(":")
        if not (claim and colon and path.startswith("/")):
            raise ValueError(f"Compute(volumes=[{given!r}]): write an existing claim as 'claim:/mount/path'")
        given = {"persistentVolumeClaim": {"claimName": claim}, "mountPath": path}
    given = plain(given)
    if not isinstance(given, dict):
        raise TypeError(f"Compute(volumes=[{given!r}]): write an existing claim as 'claim:/mount/path'")
    source = {key: value for key, value in given.items() if key not in ("name", "mountPath", "readOnly")}
    try:
        return VolumeMount(
            mount_path=given.get("mountPath", ""), source=source, read_only=bool(given.get("readOnly", False))
        )
    except ValidationError as error:
        raise ValueError(describe("Compute(volumes): volume", error)) from None
