"""Recipes of docs/kubernetes.md: meshes whose pods a JobSet creates, and hosts that pin memory for RDMA."""

from __future__ import annotations

from typing import Any

import yaml

from meshgate import Compute, KubernetesJob
from tests.kubernetes.actors import Trainer
from tests.kubernetes.cluster import Kubectl
from tests.kubernetes.proxies import block

INDEX = "batch.kubernetes.io/job-completion-index"


def created_pods(job_set: dict[str, Any], image: str) -> list[dict[str, Any]]:
    """The pods that JobSet and Kubernetes create, with the labels that they set; no cluster of the tests has JobSet.

    The order of their names is not that of their indexes.
    """
    name, pods = job_set["metadata"]["name"], []
    for replicated in job_set["spec"]["replicatedJobs"]:
        template = replicated["template"]["spec"]
        (container,) = template["template"]["spec"]["containers"]
        own = {"jobset.sigs.k8s.io/jobset-name": name, "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"]}
        for index in range(template["completions"]):
            metadata = {
                "name": f"{name}-{replicated['name']}-0-{'zyxw'[index]}",
                "labels": {**own, INDEX: str(index)},
            }
            changed = {**container, "image": image, "imagePullPolicy": "IfNotPresent"}
            spec = {**template["template"]["spec"], "containers": [changed], "terminationGracePeriodSeconds": 1}
            pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    return pods


def test_the_documented_job_set_has_the_pods_of_two_meshes(
    namespace: str, kubectl: Kubectl, images: tuple[str, str]
) -> None:
    job_set = yaml.safe_load(block("kubernetes.md", "jobset.yaml"))
    job = KubernetesJob(name="trainer", namespace=namespace)
    with kubectl.applied(*created_pods(job_set, images[1])):
        for mesh in ("trainers", "dataloaders"):
            pods = f"jobset.sigs.k8s.io/jobset-name=trainer,jobset.sigs.k8s.io/replicatedjob-name={mesh}"
            job.add_mesh(mesh, 2, label_selector=pods, pod_rank_label=INDEX)
        with job:
            state, spawned = job.state(), {}
            for mesh in ("trainers", "dataloaders"):
                spawned[mesh] = actors = getattr(state, mesh).spawn_procs().spawn("actors", Trainer)
                names = list(actors.pod.call().get(timeout=60).values())
                assert names == [f"trainer-{mesh}-0-{letter}" for letter in "zy"]
            taken = spawned["trainers"].train_step.call(spawned["dataloaders"].pod.keep()).get(timeout=60)
            assert list(taken.values()) == [
                f"step of trainer-dataloaders-0-{letter} on trainer-trainers-0-{letter}" for letter in "zy"
            ]


def test_the_documented_pods_for_rdma_may_pin_memory_and_nothing_else(namespace: str) -> None:
    recipe = block("kubernetes.md", "rdma.py")
    for device in ("    gpus=8,\n", '    resources={"rdma/hca_shared_devices_a": 1},\n'):
        assert device in recipe
        recipe = recipe.replace(device, "")
    names: dict[str, Any] = {"Compute": Compute}
    exec(recipe, names)
    with KubernetesJob(compute=names["compute"], name="pinned", namespace=namespace) as job:
        actors = job.state(cached_path=None).workers.spawn_procs().spawn("actors", Trainer)
        assert actors.capabilities.call_one().get(timeout=60) == 1 << 14  # CAP_IPC_LOCK
