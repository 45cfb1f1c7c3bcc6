"""The three ways to get workers, each from creation to deletion."""

from __future__ import annotations

from pathlib import Path

import pytest
from kubernetes.client import V1Container, V1PodSpec

import meshgate as kt
from meshgate import Compute, Image, ImageSpec, KubernetesJob
from tests.kubernetes.actors import Trainer
from tests.kubernetes.cluster import Kubectl, bare_worker_pods, tainted
from tests.kubernetes.monarch_operator import monarch_operator
from tests.ways_in import (
    check_admin,
    check_commands,
    check_mounts,
    check_ports_and_stacks,
    check_telemetry,
    check_terminal,
)


def pods_of(job: KubernetesJob, mesh: str = "workers") -> list[str]:
    """The pods that the ranks of a mesh run on, in rank order."""
    procs = getattr(job.state(), mesh).spawn_procs(per_host={"gpus": 1})
    trainers = procs.spawn("trainers", Trainer)
    return list(trainers.pod.call().get(timeout=300).values())  # sixteen processes start on two cores, beside others


def test_pods_created_for_the_job(namespace: str, capfd: pytest.CaptureFixture[str]) -> None:
    compute = Compute(cpu="50m", memory="500Mi", replicas=2, image=Image(name="trainer"), env_vars={"FLAVOUR": "mint"})
    with KubernetesJob(compute=compute, name="own", namespace=namespace) as job:
        trainers = job.state().workers.spawn_procs(per_host={"gpus": 1}).spawn("trainers", Trainer)
        steps = trainers.train_step.call(batch_size=32).get(timeout=60)
        assert [*steps.values()] == ["step of 32 on own-workers-0", "step of 32 on own-workers-1"]
        assert [*trainers.variable.call("FLAVOUR").get(timeout=60).values()] == ["mint", "mint"]
    progress = capfd.readouterr().err
    assert "workers: 2 ready (of 2)" in progress
    assert "ends after 1 h without a session" in progress


def test_pods_with_gpus_hold_more_shared_memory_than_the_64_mb_of_container_runtimes(
    namespace: str, kubectl: Kubectl, four_gpus: None
) -> None:
    with KubernetesJob(compute=Compute(gpus=1, memory="1Gi"), name="sharing", namespace=namespace) as job:
        job.apply()
        write = "open('/dev/shm/batch', 'wb').write(bytes(200 << 20))"
        kubectl("exec", "sharing-workers-0", "--", "python", "-c", write)


@pytest.mark.disturbing
def test_the_gateway_tolerates_the_taints_that_the_workers_tolerate(namespace: str, kubectl: Kubectl) -> None:
    compute = Compute(tolerations=[{"key": "dedicated", "operator": "Exists"}])
    with (
        tainted(kubectl, "dedicated=training:NoSchedule"),
        KubernetesJob(compute=compute, name="tolerant", namespace=namespace) as job,
    ):
        assert pods_of(job) == ["tolerant-workers-0"]


def test_existing_pods_with_only_torchmonarch(namespace: str, kubectl: Kubectl, images: tuple[str, str]) -> None:
    with bare_worker_pods(kubectl, images[1], "bare", 2):
        kubectl("rollout", "status", "statefulset/bare", "--timeout=180s", timeout=190)
        with KubernetesJob(selector={"app": "bare"}, namespace=namespace) as job:
            assert pods_of(job) == ["bare-0", "bare-1"]
        assert kubectl("get", "pods", "-l", "app=bare", "-o", "name") == "pod/bare-0\npod/bare-1"


@pytest.mark.disturbing
def test_a_mesh_of_the_monarch_operator(namespace: str, kubectl: Kubectl, images: tuple[str, str]) -> None:
    with monarch_operator(kubectl):
        job = KubernetesJob(name="crd", namespace=namespace)
        job.add_mesh("trainers", 2, image_spec=ImageSpec(images[1]), labels={"team": "vision"})
        with job:
            job.apply()
            meshes = kubectl("get", "monarchmeshes", "-o", "jsonpath={.items[*].metadata.labels.team}")
            assert meshes == "vision"
            pods = pods_of(job, "trainers")
        assert [name.rpartition("-")[2] for name in pods] == ["0", "1"]
        assert kubectl("get", "monarchmeshes,statefulsets,pods", "-o", "name") == ""


def test_meshes_of_one_job_whose_pods_are_described_in_three_ways(namespace: str, images: tuple[str, str]) -> None:
    job = KubernetesJob(name="several", namespace=namespace)
    job.add_mesh("trainers", 2, image_spec=ImageSpec(images[1]))
    job.add_mesh("dataloaders", 1, compute=Compute(cpu="10m"))
    container = V1Container(name="evaluator", image=images[1], image_pull_policy="IfNotPresent")  # without a command
    job.add_mesh("evaluators", 1, pod_spec=V1PodSpec(containers=[container]))
    with job:
        assert pods_of(job, "trainers") == ["several-trainers-0", "several-trainers-1"]
        assert pods_of(job, "dataloaders") == ["several-dataloaders-0"]
        assert pods_of(job, "evaluators") == ["several-evaluators-0"]


@pytest.mark.slow
@pytest.mark.disturbing  # sixteen processes of Monarch start, on as few as two cores
def test_sixteen_workers(namespace: str) -> None:
    with (
        kt.config.configured(mesh_proc_spawn_max_idle="5m", actor_spawn_max_idle="5m"),  # not Monarch's 30 s
        KubernetesJob(compute=Compute(replicas=16), name="many", namespace=namespace) as job,
    ):
        assert pods_of(job) == [f"many-workers-{rank}" for rank in range(16)]


def test_the_way_into_two_pods(namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Compute(cpu="50m", memory="1Gi", replicas=2)
    with KubernetesJob(compute=compute, name="into", namespace=namespace) as job:
        hosts = job.state().workers
        assert check_commands(job) == ["into-workers-0", "into-workers-1"]
        check_terminal(job, monkeypatch)
        check_ports_and_stacks(job, hosts)
        check_admin(job)
        check_mounts(job, tmp_path, "/tmp/way")
        check_telemetry(job)
