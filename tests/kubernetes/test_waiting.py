"""A job that cannot become ready reports why as soon as waiting is pointless, and leaves nothing behind."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshgate import Compute, Image, KubernetesJob
from meshgate.doctor.checks import check_cluster
from meshgate.errors import JobStartFailed
from meshgate_kubernetes.manifests.spec import GPU_TYPE_LABEL
from tests.kubernetes.cluster import Kubectl, kubeconfig_of, own_namespace, tainted
from tests.waiting import wait_for

REPORTED_WITHIN = 300.0  # seconds, for a busy machine; without giving up early these would take the job's 15 minutes


@contextmanager
def start_failure() -> Iterator[pytest.ExceptionInfo[JobStartFailed]]:
    started = time.monotonic()
    with pytest.raises(JobStartFailed) as caught:
        yield caught
    assert time.monotonic() - started < REPORTED_WITHIN


def start(compute: Compute, namespace: str, name: str, **options: object) -> None:
    with KubernetesJob(compute=compute, name=name, namespace=namespace, **options) as job:  # type: ignore[arg-type]
        job.apply()


def test_a_missing_image(namespace: str) -> None:
    image = Image().from_docker("localhost/no-such-image:1")
    with start_failure() as caught:
        start(Compute(image=image), namespace, "noimage")
    assert "pod noimage-workers-0: ErrImagePull" in str(caught.value) or "ImagePullBackOff" in str(caught.value)
    assert "localhost/no-such-image:1" in str(caught.value)
    if "not found" in str(caught.value):
        assert "Set $MESHGATE_WORKER_IMAGE or Compute(image=…)" in str(caught.value)


def test_an_invalid_image_name(namespace: str) -> None:
    with start_failure() as caught:
        start(Compute(image="Not An Image"), namespace, "badname")
    assert "InvalidImageName" in str(caught.value)


def test_more_gpus_than_any_node_has(namespace: str, no_gpus: None) -> None:
    with start_failure() as caught:
        start(Compute(gpus=8, replicas=9), namespace, "nogpus")
    assert "Insufficient nvidia.com/gpu: the pod requests 8, the largest node has 0 (8 short)" in str(caught.value)
    assert str(caught.value).count("Unschedulable") == 1  # of nine pods
    assert "9 pods (nogpus-workers-0, nogpus-workers-1, …)" in str(caught.value)


def test_a_node_of_another_architecture_is_missing(namespace: str) -> None:
    """A job goes only to nodes that its images are for, and its gateway with it; no node here is of this kind."""
    with start_failure() as caught:
        start(Compute(node_selector={"kubernetes.io/arch": "riscv64"}), namespace, "noarch")
    assert re.search(r"noarch-.*: Unschedulable: .*didn't match", str(caught.value))


def test_an_image_for_another_architecture_is_reported(namespace: str, images: tuple[str, str]) -> None:
    # Linux has the same error for a program of another processor and for a text without an interpreter.
    script = {"name": "script", "image": images[1], "imagePullPolicy": "IfNotPresent",
              "command": ["sh", "-c", "echo program > /tmp/python && chmod +x /tmp/python"],
              "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}  # fmt: skip
    pod_spec = {"initContainers": [script], "containers": [{"name": "worker", "command": ["/tmp/python"]}]}
    with start_failure() as caught:
        start(Compute(pod_spec=pod_spec), namespace, "wrongarch")
    assert re.search(r"another architecture than the node: .*kubernetes\.io/arch", str(caught.value))


def test_gpus_of_a_node(namespace: str, kubectl: Kubectl, four_gpus: None) -> None:
    with KubernetesJob(compute=Compute(gpus=1, replicas=2), name="gpus", namespace=namespace) as job:
        job.apply()
        limits = kubectl("get", "pod", "gpus-workers-1", "-o", "jsonpath={.spec.containers[0].resources.limits}")
        assert '"nvidia.com/gpu":"1"' in limits
    with start_failure() as caught:
        start(Compute(gpus=5), namespace, "more")
    assert "the pod requests 5, the largest node has 4 (1 short)" in str(caught.value)


def assert_nothing_left(kubectl: Kubectl) -> None:
    assert kubectl("get", "all,configmap,secret", "-l", "meshgate.dev/job", "-o", "name") == ""


def wait_counted(kubectl: Kubectl, quota: str) -> None:
    """Until a controller has counted what is there, the API server refuses everything that the quota is about."""
    path = "jsonpath={.status.hard}"
    wait_for(lambda: kubectl("get", "resourcequota", quota, "-o", path), "the quota to be counted")


def test_an_exhausted_quota(namespace: str) -> None:
    with own_namespace(f"{namespace}-quota") as kubectl:
        quota = {"hard": {"pods": "1"}}
        kubectl.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": quota})
        wait_counted(kubectl, "small")
        with start_failure() as caught:
            start(Compute(replicas=2), kubectl.namespace, "crowd")
        assert "QuotaExceeded: quota small is exceeded" in str(caught.value)
        assert "pods=1" in str(caught.value)
        assert_nothing_left(kubectl)


def test_a_pod_rejected_by_admission(namespace: str) -> None:
    with own_namespace(f"{namespace}-limited") as kubectl:
        limits = {"limits": [{"type": "Container", "max": {"memory": "2Gi"}, "maxLimitRequestRatio": {"cpu": "4"}}]}
        kubectl.apply({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}, "spec": limits})
        small = Compute(cpus="200m", memory="1Gi")
        with start_failure() as caught:
            start(Compute(cpus="200m", memory="3Gi"), kubectl.namespace, "large", gateway=small)
        assert "statefulset large-workers: FailedCreate" in str(caught.value)
        assert "maximum memory usage per Container is 2Gi, but limit is 3Gi" in str(caught.value)
        assert "Set Compute(memory=…)" in str(caught.value)
        assert_nothing_left(kubectl)
        with start_failure() as caught:
            start(small, kubectl.namespace, "gateway")
        assert "cpu max limit to request ratio per Container is 4, but provided ratio is 16" in str(caught.value)
        assert "Set gateway=Compute(cpus=…, memory=…)" in str(caught.value)
        assert_nothing_left(kubectl)


def test_what_would_reject_a_job_is_known_before_it_is_created(namespace: str) -> None:
    with own_namespace(f"{namespace}-doctor") as kubectl:
        limits = {"limits": [{"type": "Container", "max": {"memory": "2Gi"}}]}
        kubectl.apply(
            {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}, "spec": limits},
            {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "2"}}},
        )
        wait_counted(kubectl, "few")
        found = check_cluster(None, kubectl.namespace, Compute(memory="3Gi", replicas=2))
        gateway, workers, quota = (each.text for each in found if each.check == "admission")
        assert gateway.endswith("Set gateway=Compute(memory=…)")
        assert "maximum memory usage per Container is 2Gi, but limit is 3Gi" in workers
        assert workers.endswith("Set Compute(memory=…)")
        assert quota == "quota few has 2 of pods left, and the job needs 3"
        assert_nothing_left(kubectl)


def test_the_images_of_a_job_are_pulled_before_it_is_created(namespace: str, images: tuple[str, str]) -> None:
    missing = "localhost/no-such-image:1"
    with own_namespace(f"{namespace}-pulls") as kubectl:
        found = check_cluster(None, kubectl.namespace, Compute(image=missing), images=True)
        pulled, failed = (each for each in found if each.check == "images")
        assert (pulled.outcome, pulled.text) == ("ok", f"the cluster can pull {images[0]}")
        assert failed.outcome == "problem"
        assert re.match(rf"{missing}: pod doctor-\w+-workers-image: (ErrImagePull|ImagePullBackOff): ", failed.text)
        wait_for(lambda: kubectl("get", "pods", "-o", "name") == "", "the pods to be deleted")


def test_an_interrupted_check_of_images_leaves_no_pods(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    with own_namespace(f"{namespace}-stopped") as kubectl:
        monkeypatch.setattr("meshgate.doctor.images._was_pulled", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(check_cluster(None, kubectl.namespace, images=True))
        monkeypatch.undo()
        wait_for(lambda: kubectl("get", "pods", "-o", "name") == "", "the pods to be deleted")
        events = kubectl("get", "events", "-o", "jsonpath={.items[*].involvedObject.name}")
        assert "-gateway-image" in events  # there was one


ASKS = {
    "quota": ("ResourceQuota", {"hard": {"limits.cpu": "16"}}),
    "default": ("LimitRange", {"limits": [{"type": "Container", "default": {"cpu": "100m"}}]}),  # below the request
    "pods": ("LimitRange", {"limits": [{"type": "Pod", "max": {"cpu": "8"}, "maxLimitRequestRatio": {"cpu": "16"}}]}),
}


@pytest.mark.parametrize("asks", ASKS)
def test_cpus_are_a_limit_where_the_namespace_asks_for_one(namespace: str, asks: str) -> None:
    kind, spec = ASKS[asks]
    with own_namespace(f"{namespace}-{asks}") as kubectl:
        kubectl.apply({"apiVersion": "v1", "kind": kind, "metadata": {"name": "cpu"}, "spec": spec})
        if asks == "quota":
            wait_counted(kubectl, "cpu")
        with KubernetesJob(compute=Compute(cpus="200m"), name="bound", namespace=kubectl.namespace) as job:
            job.apply()
            path = "jsonpath={.spec.containers[0].resources.limits.cpu}"
            assert kubectl("get", "pod", "bound-workers-0", "-o", path) == "200m"
        if asks != "default":
            with start_failure() as caught:
                start(Compute(), kubectl.namespace, "unbound")
            assert "Set Compute(cpus=…)" in str(caught.value)
        assert_nothing_left(kubectl)


def test_labels_that_no_node_has_are_named(namespace: str, kubectl: Kubectl, no_gpus: None) -> None:
    (arch,) = {*kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.labels.kubernetes\\.io/arch}").split()}
    excludes = {"matchExpressions": [{"key": "kubernetes.io/arch", "operator": "NotIn", "values": [arch]}]}
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [excludes]}}
    compute = Compute(
        node_selector={"kubernetes.io/arch": "sparc"},
        gpus=1,
        gpu_type="H100",
        pod_spec={"affinity": {"nodeAffinity": affinity}},
    )
    (node, *_) = kubectl("get", "nodes", "-o", "name").split()
    kubectl("label", node, f"{GPU_TYPE_LABEL}=A100")
    try:
        with start_failure() as caught:
            start(compute, namespace, "elsewhere", gateway=Compute(node_selector={"kubernetes.io/arch": arch}))
    finally:
        kubectl("label", node, f"{GPU_TYPE_LABEL}-")
    error = str(caught.value)
    assert f"No node has the label kubernetes.io/arch=sparc: nodes have {arch}" in error
    assert "No node has the label nvidia.com/gpu.product=H100: nodes have A100" in error
    assert f"Every node has the label kubernetes.io/arch={arch}, which the pod's node affinity excludes" in error
    assert_nothing_left(kubectl)


@pytest.mark.disturbing
def test_a_taint_that_the_pods_do_not_tolerate_is_named(namespace: str, kubectl: Kubectl) -> None:
    other = {"key": "dedicated", "value": "inference", "effect": "NoSchedule"}
    with tainted(kubectl, "dedicated=training:NoSchedule"), start_failure() as caught:
        start(Compute(tolerations=[other]), namespace, "untolerated")
    remedy = 'which tolerations=[{"key": "dedicated", "operator": "Exists"}] tolerates'
    assert f"has the taint dedicated=training:NoSchedule, {remedy}" in str(caught.value)
    assert_nothing_left(kubectl)


def test_a_crashing_worker_is_reported_with_its_last_output(namespace: str, images: tuple[str, str]) -> None:
    pod_spec = {
        "containers": [
            {
                "name": "worker",
                "command": ["python", "-c", "print('reading the config'); exit('no config')"],
            }
        ]
    }
    with start_failure() as caught:
        start(Compute(pod_spec=pod_spec), namespace, "crash")
    error = str(caught.value)
    assert "CrashLoopBackOff: container worker ended with exit code 1" in error
    assert "reading the config" in error
    assert "no config" in error


def test_a_worker_that_exceeds_its_memory_limit(namespace: str) -> None:
    hungry = "x = bytearray(900 << 20); x[::4096] = b'x' * len(x[::4096]); import time; time.sleep(60)"
    pod_spec = {"containers": [{"name": "worker", "command": ["python", "-c", hungry]}]}
    with start_failure() as caught:
        start(Compute(memory="64Mi", pod_spec=pod_spec), namespace, "oom")
    assert "OOMKilled" in str(caught.value)
    assert "it exceeded its memory limit of 64Mi" in str(caught.value)


def test_an_image_without_torchmonarch_reports_it(namespace: str) -> None:
    pod_spec = {"containers": [{"name": "worker", "env": [{"name": "PATH", "value": "/usr/local/bin:/usr/bin:/bin"}]}]}
    with start_failure() as caught:
        start(Compute(pod_spec=pod_spec), namespace, "nomonarch")
    assert "contains neither meshgate[worker] nor torchmonarch" in str(caught.value)


def test_a_missing_secret(namespace: str) -> None:
    with start_failure() as caught:
        start(Compute(secrets=["no-such-secret"]), namespace, "nosecret")
    assert "CreateContainerConfigError" in str(caught.value)
    assert "no-such-secret" in str(caught.value)


def test_a_timeout_lists_the_pods_that_are_not_ready(namespace: str) -> None:
    pod_spec = {"containers": [{"name": "worker", "command": ["sleep", "600"]}]}
    with start_failure() as caught:
        start(Compute(replicas=2, pod_spec=pod_spec), namespace, "slow", timeout=15)
    # a busy node may need longer than this for the gateway, too
    assert re.search(r"within 15 s; not ready: (the gateway, )?slow-workers-0, slow-workers-1", str(caught.value))


def test_a_missing_permission_is_reported(namespace: str, kubectl: Kubectl, tmp_path: Path) -> None:
    kubectl("create", "serviceaccount", "stranger")
    try:
        kubeconfig = kubeconfig_of(kubectl, "stranger", tmp_path)
        with start_failure() as caught:
            start(Compute(), namespace, "norights", kubeconfig=str(kubeconfig))
        assert f"system:serviceaccount:{namespace}:stranger may not create configmaps" in str(caught.value)
        assert f"in namespace '{namespace}'" in str(caught.value)
    finally:
        kubectl("delete", "serviceaccount", "stranger")


def test_all_missing_permissions_are_reported(namespace: str, kubectl: Kubectl, tmp_path: Path) -> None:
    kubectl("create", "serviceaccount", "halfway")
    kubectl("create", "role", "halfway", "--verb=*", "--resource=configmaps,pods,secrets")
    kubectl("create", "rolebinding", "halfway", "--role=halfway", f"--serviceaccount={namespace}:halfway")
    try:
        kubeconfig = kubeconfig_of(kubectl, "halfway", tmp_path)
        with start_failure() as caught:
            start(Compute(), namespace, "halfway", kubeconfig=str(kubeconfig))
        error = str(caught.value)
        assert "may not create serviceaccounts" in error
        assert "roles.rbac.authorization.k8s.io" in error
        assert "statefulsets.apps" in error
    finally:
        kubectl("delete", "serviceaccount/halfway", "role/halfway", "rolebinding/halfway")


def test_an_expired_token(namespace: str, kubectl: Kubectl, tmp_path: Path) -> None:
    kubectl("create", "serviceaccount", "gone")
    kubeconfig = kubeconfig_of(kubectl, "gone", tmp_path)
    kubectl("delete", "serviceaccount", "gone")
    while Kubectl(namespace, kubeconfig).knows_the_user():  # the API server caches a valid token for seconds
        pass
    with start_failure() as caught:
        start(Compute(), namespace, "expired", kubeconfig=str(kubeconfig))
    assert "does not accept the credentials" in str(caught.value)
    assert "expired" in str(caught.value)
