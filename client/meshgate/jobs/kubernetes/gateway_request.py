"""The pod of a job's gateway: from ``KubernetesJob(gateway=Compute(…))``, and from what the workers have."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from meshgate.jobs.kubernetes.compute import Compute
from meshgate_kubernetes.manifests.spec import GPU_RESOURCE, GatewaySpec, PullPolicy, WorkerSpec

_IMAGE_FIELDS = {"image", "image_pull_policy", "image_pull_secrets"}


class GatewayRequest(BaseModel):
    """The gateway as the caller describes it. ``image`` is None for the default image."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str | None = None
    pull_policy: PullPolicy | None = None
    pull_secrets: tuple[str, ...] = ()
    pod: GatewaySpec = GatewaySpec()


def gateway_from_compute(compute: Compute | None) -> GatewayRequest:
    """Raises TypeError or ValueError on anything that a gateway cannot have."""
    if compute is None:
        return GatewayRequest()
    if not isinstance(compute, Compute):
        raise TypeError(f"KubernetesJob(gateway={compute!r}): expected a Compute(…)")
    fields = compute.worker.model_dump(exclude_defaults=True)
    extra = sorted(set(fields) - set(GatewaySpec.model_fields) - _IMAGE_FIELDS)
    extra += ["replicas"] if compute.replicas != 1 else []
    extra += ["selector"] if compute.selector is not None else []
    extra += ["image steps"] if compute.image.live_steps else []
    if extra:
        raise ValueError(f"KubernetesJob(gateway=Compute(…)): a gateway cannot have {', '.join(extra)}; remove it")
    return GatewayRequest(
        image=compute.image.reference,
        pull_policy=compute.worker.image_pull_policy,
        pull_secrets=compute.worker.image_pull_secrets,
        pod=GatewaySpec(**{name: value for name, value in fields.items() if name in GatewaySpec.model_fields}),
    )


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
